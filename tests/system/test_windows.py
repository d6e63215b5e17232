"""Real servers of windowed models, whose layers keep rings: conversations, and sequences that leave and come back.

The models are tiny and random, with the demo's tokenizer.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import httpx2
import pytest

from tests.running import Server
from tests.system.test_kv_demand import check_tokens_stay
from tests.system.test_states import ANSWER, FLOAT32, conversation, made

DISTANCE = 64  # tokens between two places at which windows are kept
BLOCK = 16
SHORT_STEPS = ("--max-batch-prefill-tokens", "64", "--state-checkpoint-tokens", str(DISTANCE))


@pytest.mark.parametrize(
    ("name", "flags", "num_kills"),
    [
        ("gemma4-e", (), 0),  # layers that share keys and values, and have inputs of their own
        pytest.param("gpt_oss", (), 0, marks=pytest.mark.rest),
        pytest.param("gemma4-e", ("--pipeline-parallel", "2", "--max-deaths", "9"), 2, marks=pytest.mark.rest),
        pytest.param("gemma3_text", ("--num-shard", "2", "--max-deaths", "9"), 2, marks=pytest.mark.rest),
        pytest.param("mistral", ("--max-deaths", "9"), 1, marks=pytest.mark.rest),
        ("gemma2", ("--pipeline-parallel", "3", "--max-deaths", "9"), 2),  # of which two have windows alone
    ],
    ids=[
        "one shard",
        "another",
        "two stages that die",
        "two shards that die",
        "windows alone, and it dies",
        "three stages that die",
    ],
)
def test_who_is_sent_away_or_lost_gets_the_same_tokens(
    tmp_path: Path, name: str, flags: tuple[str, ...], num_kills: int
) -> None:
    own = ("--model-id", made(name, tmp_path), *SHORT_STEPS, "--max-batch-size", "12")
    check_tokens_stay(own, flags, num_kills)


@pytest.mark.parametrize("name", ["gemma3_text", pytest.param("gpt_oss", marks=pytest.mark.rest)])
def test_a_turn_computes_its_own_tokens_and_a_block_or_two(tmp_path: Path, name: str) -> None:
    flags = (*FLOAT32, "--model-id", made(name, tmp_path / "model"), *SHORT_STEPS)
    disk = ("--prefix-cache-disk-gb", "0.2", "--prefix-cache-dir", str(tmp_path / "cache"))
    with Server(*flags, "--disable-prefix-caching") as server:
        expected = conversation(server)
        assert all(computed == given for _, given, computed in expected)
    with Server(*flags, *disk) as server:
        assert any(f"windows kept at ends and every {DISTANCE} tokens" in line for line in server.lines)
        turns = conversation(server)
        server.stop()
        server.wait()
    assert [text for text, _, _ in expected] == [text for text, _, _ in turns]
    for (_, before, _), (_, given, computed) in itertools.pairwise(turns):
        own = given - before - ANSWER  # what was computed for the answer is kept too
        assert computed <= own + 2 * BLOCK
    with Server(*flags, *disk) as server:
        again = conversation(server)
    assert [text for text, _, _ in expected] == [text for text, _, _ in again]
    assert max(computed for _, _, computed in again) <= DISTANCE + BLOCK


@pytest.mark.rest
def test_kept_prefixes_of_a_server_with_rings_are_not_those_of_one_without(tmp_path: Path) -> None:
    """With one layer, blocks are as large with rings, and hold nothing of it."""
    folder = tmp_path / "model"
    own = (*FLOAT32, "--model-id", made("mistral", folder, num_hidden_layers=1))
    sizes = ("--max-batch-prefill-tokens", "64", "--max-batch-total-tokens", "4096")
    kept = ("--prefix-cache-disk-gb", "0.05", "--prefix-cache-dir", str(tmp_path / "kept"))
    prompt = " ".join(f"The little fox number {number} walked along the river." for number in range(9))
    body = {"inputs": prompt, "parameters": {"max_new_tokens": 24, "ignore_eos": True}}
    texts = []
    for longest in ("600", "190", "600"):  # longer than the window, shorter, and longer again
        with Server(*own, *sizes, *kept, "--max-total-tokens", longest) as server:
            texts.append(httpx2.post(f"{server.url}/generate", json=body, timeout=60).json()["generated_text"])
            hits = server.metrics()['tgi_prefix_tier_hit_tokens{tier="disk"}']
            server.stop()
            server.wait()
    assert [texts[0]] * 3 == texts and hits > 0
