"""Real servers of models with recurrent layers: sequences that leave and come back, shards that die, conversations.

The models are tiny and random, with the demo's tokenizer.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tokenizers import Tokenizer

from tests.running import Server
from tests.server import tiny
from tests.server.conftest import DEMO
from tests.system.test_kv_demand import check_tokens_stay

FLOAT32 = ("--dtype", "float32")
DISTANCE = 32  # tokens between two places at which states are kept
NUM_TURNS, ANSWER = 10, 24
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
WORDS = [TOKENIZER.encode(f" {word}").ids for word in "the fox river walked a was near found ball little and".split()]
WORD_IDS = [ids[0] for ids in WORDS if len(ids) == 1]  # a text of these has the same tokens when it is read again


def made(name: str, folder: Path, **more: Any) -> str:
    """A folder with a model as long as conversations become."""
    if name == "gemma4-e":
        more["vocab_size_per_layer_input"] = 2048
    tiny.save_tiny(name, folder, vocab_size=2048, max_position_embeddings=2048, **more)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO / file, folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of one that attends in some layers, and recurs in the others."""
    return made("qwen3_5", tmp_path_factory.mktemp("recurrent"))


@pytest.mark.parametrize(
    ("name", "flags", "num_kills"),
    [
        ("qwen3_5", (), 0),
        pytest.param("mamba2", ("--num-shard", "2", "--max-deaths", "9"), 2, marks=pytest.mark.rest),
        ("falcon_h1", ("--pipeline-parallel", "2", "--max-deaths", "9"), 2),  # both in every layer
        pytest.param("qwen3_5", ("--pipeline-parallel", "2", "--max-deaths", "9"), 2, marks=pytest.mark.rest),
    ],
    ids=["one shard", "two shards that die", "two stages that die", "two others that die"],
)
def test_who_is_sent_away_or_lost_gets_the_same_tokens(
    tmp_path: Path, name: str, flags: tuple[str, ...], num_kills: int
) -> None:
    own = ("--model-id", made(name, tmp_path), "--state-checkpoint-tokens", str(DISTANCE), "--max-batch-size", "12")
    check_tokens_stay(own, flags, num_kills)


def turn(server: Server, text: str) -> tuple[str, int, int]:
    """An answer of words that are a token each, how many tokens its prompt has, and how many were computed."""
    body = {"prompt": text, "model": "m", "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    body["logit_bias"] = {str(id): 100 for id in WORD_IDS}
    answer: dict[str, Any] = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
    usage = answer["usage"]
    given = usage["prompt_tokens"]
    return answer["choices"][0]["text"], given, given - usage["prompt_tokens_details"]["cached_tokens"]


def conversation(server: Server) -> list[tuple[str, int, int]]:
    text, turns = "Once upon a time there was a fox who lived near the river and walked a lot. " * 3, []
    for number in range(NUM_TURNS):
        turns.append(turn(server, text))
        text += f"{turns[-1][0]} Then the fox asked number {number}."
    return turns


@pytest.mark.parametrize("shards", ["1", pytest.param("2", marks=pytest.mark.rest)])
def test_a_turn_computes_its_own_tokens_and_one_distance_at_most(model: str, tmp_path: Path, shards: str) -> None:
    flags = (*FLOAT32, "--model-id", model, "--num-shard", shards, "--state-checkpoint-tokens", str(DISTANCE))
    disk = ("--prefix-cache-disk-gb", "0.2", "--prefix-cache-dir", str(tmp_path / "cache"))
    with Server(*flags, "--disable-prefix-caching") as server:
        expected = conversation(server)
        assert all(computed == given for _, given, computed in expected)
    with Server(*flags, *disk) as server:
        assert any("states kept every 32 tokens" in line for line in server.lines)
        turns = conversation(server)
        server.stop()
        server.wait()
    assert [text for text, _, _ in expected] == [text for text, _, _ in turns]
    for (_, before, _), (_, given, computed) in itertools.pairwise(turns):
        own = given - before - ANSWER  # what was computed for the answer is kept too
        assert computed <= own + DISTANCE + 16
    with Server(*flags, *disk) as server:
        again = conversation(server)
    assert [text for text, _, _ in expected] == [text for text, _, _ in again]
    assert max(computed for _, _, computed in again) <= DISTANCE + 16
