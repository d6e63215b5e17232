"""The watermark: the detector knows the green list, its numbers are the paper's, and texts that have it are found."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from router.text.watermark import Detection, TextTooShort, detect, is_green, needed
from server.backends.reference.logits import StockLogits
from server.ranks.collectives import Shard
from server.stepping.sampling import greenlist
from server.stepping.vocabulary import Vocabulary
from tests.running import PATIENCE_S, ROOT, Server, generate_all, tokens_of
from tests.system.watermark import LEAST, MOST, requests

BLOOM = 250_880


@pytest.mark.parametrize("gamma", [0.01, 0.25, 0.5, 0.99])
def test_the_detector_s_green_list_is_the_sampler_s(gamma: float) -> None:
    rng = random.Random(1)
    previous = [0, BLOOM - 1, *rng.choices(range(BLOOM), k=5), 2**31]
    tokens = [0, 1, BLOOM - 1, *rng.choices(range(BLOOM), k=300)]
    lists = greenlist(torch.tensor(previous), Vocabulary(StockLogits(), Shard(), BLOOM), gamma)
    for before, green in zip(previous, lists, strict=True):
        assert green[tokens].tolist() == [is_green(token, before, gamma) for token in tokens]
        assert gamma == pytest.approx(green.float().mean().item(), abs=0.005)


def test_the_green_lists_of_ranks_are_parts_of_one() -> None:
    previous = torch.tensor([3, 99])
    whole = greenlist(previous, Vocabulary(StockLogits(), Shard(), 100), 0.5)
    parts = [greenlist(previous, Vocabulary(StockLogits(), Shard(), 100, start, 50), 0.5) for start in (0, 50)]
    assert torch.equal(whole, torch.cat(parts, dim=1))


def test_what_is_green_behind_one_token_says_nothing_of_another() -> None:
    lists = greenlist(torch.arange(200), Vocabulary(StockLogits(), Shard(), 4000), 0.5).float() * 2 - 1
    correlations = (lists @ lists.T / 4000).fill_diagonal_(0.0)
    assert correlations.abs().max() < 6 / math.sqrt(4000)
    assert lists.mean(dim=0).abs().max() < 6 / math.sqrt(200)  # nor is a token green more often than others


def test_the_numbers_are_those_of_the_paper() -> None:
    """z by its equation 3; z 4 is a p of 3e-5, but for what a few tokens can do."""
    found = Detection(num_tokens=201, num_scored=200, num_green=176, gamma=0.5)
    assert (176 - 100) / math.sqrt(200 * 0.25) == pytest.approx(found.z)
    assert found.is_watermarked and found.p < 1e-20
    at_four = Detection(40_001, 40_000, 20_400, 0.5)
    assert 4.0 == at_four.z and 3.167e-5 == pytest.approx(at_four.p, rel=0.05)
    assert 1.0 == pytest.approx(Detection(201, 200, 0, 0.25).p)
    few = Detection(17, 16, 2, 0.01)  # z is above 4, and 2 in 16 come by chance once in 90 texts
    assert few.z > 4 and not few.is_watermarked and 0.0109 == pytest.approx(few.p, rel=0.01)
    assert sum(math.comb(60, k) * 0.3**k * 0.7 ** (60 - k) for k in range(25, 61)) == pytest.approx(
        Detection(61, 60, 25, 0.3).p
    )


def test_a_pair_of_tokens_is_scored_once() -> None:
    once = [*range(40)]
    assert 39 == detect(once, 0.5).num_scored
    assert 40 == detect(once * 50, 0.5).num_scored  # and the pair from the last token to the first
    assert detect(once * 50, 0.5).num_green - detect(once, 0.5).num_green == is_green(0, 39, 0.5)


@pytest.mark.parametrize("gamma", [0.01, 0.25, 0.5, 0.9, 0.99])
def test_texts_of_which_nothing_can_be_told_are_refused_with_the_length_that_it_takes(gamma: float) -> None:
    least = needed(gamma)
    with pytest.raises(TextTooShort, match=rf"{least - 1} different pairs .* at least {least}"):
        detect(range(least), gamma)
    detect(range(least + 1), gamma)
    assert Detection(least + 1, least, least, gamma).is_watermarked
    assert not Detection(least, least - 1, least - 1, gamma).is_watermarked
    with pytest.raises(TextTooShort, match="0 different pairs"):
        detect([], gamma)


# ------------------------------------------------------------------------------------------------------------ a server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--dtype", "float32", "--watermark-gamma", "0.25", "--watermark-delta", "8", "--num-shard", "2") as it:
        yield it


def command(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "launcher.py", "watermark", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        input=text,
        check=False,
        timeout=PATIENCE_S,
    )


async def answers_of(server: Server, asked: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [answer.json() for answer in await generate_all(server, list(asked))]


@pytest.mark.rest
def test_watermarked_texts_are_found_and_others_are_not(server: Server, tmp_path: Path) -> None:
    """The embedded model is sure of most of what it says: it takes a larger delta than random weights do."""
    prompt, found = "Once upon a time", {}
    for watermark in (True, False):
        answers = asyncio.run(answers_of(server, requests(6, 200, prompt, watermark=watermark)))
        found[watermark] = [detect(tokens_of(answer), 0.25).z for answer in answers]
        path = tmp_path / f"{watermark}.txt"
        path.write_text(answers[0]["generated_text"])
        told = command("--json", "--watermark-gamma", "0.25", str(path))
        assert "" == told.stderr
        assert watermark == json.loads(told.stdout)["is_watermarked"]
    assert mean(found[True]) > LEAST and mean(found[False]) < MOST


def test_the_command_says_what_it_found_and_what_is_wrong(tmp_path: Path) -> None:
    text = "Once upon a time there was a fox that walked along the river and found a red ball under the old tree."
    told = command("-", text=text)
    assert 0 == told.returncode
    assert re.match(r"z -?\d+\.\d\d, p [0-9.e-]+: no watermark is found \(p below 3\.2e-05\)\n\d+ of \d+ ", told.stdout)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for arguments, given, code, sentence in (
        (["-"], "too short", 1, "different pairs of neighbouring tokens, and with gamma 0.5 it takes at least 15"),
        ([str(tmp_path / "none")], "", 1, "none cannot be read: No such file"),
        ([str(tmp_path / "binary")], "", 1, "is not UTF-8 text"),
        (["-", "--watermark-gamma", "1"], text, 2, "--watermark-gamma is 1: the largest allowed value is 0.99"),
        (["-", "--model-id", "null"], text, 2, "has no watermark"),
        (["-", "--model-id", str(tmp_path)], text, 1, "config.json"),
        (["-", "--gama", "1"], text, 2, "--gama is not an option"),
        ([], "", 2, "FILE"),
    ):
        told = command(*arguments, text=given)
        assert code == told.returncode and "" == told.stdout
        assert told.stderr.startswith("error: ") and sentence in told.stderr
