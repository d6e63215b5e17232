"""What is sent and when: arrivals, lengths, prompts. Plain numbers and a tokenizer that one can check by eye."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from statistics import fmean, median

import pytest

from benchmark.result import BenchError
from benchmark.serving.datasets import Lengths
from benchmark.serving.workload import (
    LONGEST,
    WORDS,
    draw_lengths,
    exact_prompt,
    local_token_ends,
    mean_lengths,
    read_lengths,
)
from tests.benchmark.mock_server import word_ends
from tests.running import ROOT

MEAN = Lengths(100, 40)


def test_one_seed_gives_one_workload() -> None:
    assert draw_lengths("lognormal", MEAN, 50, Random(1)) == draw_lengths("lognormal", MEAN, 50, Random(1))


def test_fixed_lengths_are_the_cells_own() -> None:
    assert [MEAN] * 3 == draw_lengths("fixed", MEAN, 3, Random(0))


@pytest.mark.parametrize("kind", ["uniform", "lognormal"])
def test_drawn_lengths_have_the_cells_mean_and_a_known_longest(kind: str) -> None:
    drawn = draw_lengths(kind, MEAN, 5000, Random(0))
    assert pytest.approx(100, rel=0.03) == fmean(one.input_length for one in drawn)
    assert pytest.approx(40, rel=0.03) == fmean(one.output_length for one in drawn)
    assert all(1 <= one.input_length <= LONGEST[kind] * 100 for one in drawn)
    assert len({one.input_length for one in drawn}) > 50


def test_log_normal_lengths_have_a_long_tail() -> None:
    drawn = sorted(one.input_length for one in draw_lengths("lognormal", MEAN, 5000, Random(0)))
    assert median(drawn) < 92
    assert drawn[4500] > 1.8 * median(drawn)


def test_a_length_of_one_stays_possible() -> None:
    for kind in ("fixed", "uniform", "lognormal"):
        assert all(one.output_length >= 1 for one in draw_lengths(kind, Lengths(1, 1), 100, Random(0)))


def test_lengths_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"input_length": 10, "output_length": 4}\n\n{"input_length": 30, "output_length": 8}\n')
    assert [Lengths(10, 4), Lengths(30, 8)] == read_lengths(path)
    assert Lengths(20, 6) == mean_lengths(read_lengths(path))


@pytest.mark.parametrize(
    "text", ["", "not json", '{"input_length": 3}', '{"input_length": 0, "output_length": 1}', "[1, 2]"]
)
def test_a_file_without_lengths_says_what_it_should_look_like(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(text)
    with pytest.raises(BenchError, match='"input_length": 128'):
        read_lengths(path)


@pytest.mark.parametrize("num_tokens", [1, 2, 17, 128, 1000])
def test_prompts_have_exactly_the_asked_tokens_of_a_real_tokenizer(num_tokens: int) -> None:
    ends = local_token_ends(ROOT / "server" / "demo")
    prompt = asyncio.run(exact_prompt(num_tokens, ends, Random(num_tokens)))
    assert num_tokens == len(asyncio.run(ends(prompt)))


def test_special_tokens_count() -> None:
    async def ends(text: str) -> list[int]:
        return [0, *word_ends(text), 0]

    assert 5 - 2 == len(asyncio.run(exact_prompt(5, ends, Random(0))).split())


def test_prompts_differ_from_each_other() -> None:
    async def ends(text: str) -> list[int]:
        return word_ends(text)

    random = Random(0)
    prompts = [asyncio.run(exact_prompt(20, ends, random)) for _ in range(10)]
    assert 10 == len(set(prompts))
    assert set(" ".join(prompts).split()) <= set(WORDS)


def test_an_impossible_length_is_refused() -> None:
    async def ends(text: str) -> list[int]:
        return [0, 0, *word_ends(text)]

    with pytest.raises(BenchError, match="use another --input-length"):
        asyncio.run(exact_prompt(1, ends, Random(0)))


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="give --tokenizer the folder"):
        local_token_ends(tmp_path)
