"""A real server that guesses what texts go on with: its answers are those of one that guesses nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import pytest

from tests.running import ROOT, Server
from tests.system import guesses
from tests.system.test_kv_demand import FLAGS, LONGEST, ROOM, Asked, all_answers, requests_of

TEXT = "The little fox walked along the river and found a ball. " * 4
LOOP = {"max_new_tokens": 150, "details": True, "ignore_eos": True}


def repeating() -> list[Asked]:
    """Prompts that repeat themselves, whose answers soon do, and others that were answered before."""
    found: list[Asked] = []
    for number in range(3):
        found.append(("/generate", {"inputs": TEXT[: 100 + 40 * number], "parameters": LOOP}))
        drawn = {"prompt": TEXT[: 120 + 40 * number], "model": "demo", "max_tokens": 120, "temperature": 0.3}
        found.append(("/v1/completions", drawn | {"seed": number, "ignore_eos": True, "logprobs": 2}))
    return found * 2


def test_answers_are_those_without_a_draft_model(tmp_path: Path) -> None:
    """Which is the served model itself, so that it is always right; some requests want none of it."""
    requests = [*requests_of(5, 5), *repeating()[:6]]
    generate = {"inputs": TEXT[:90], "parameters": {**LOOP, "do_sample": True, "seed": 7}}
    requests += [("/generate", generate), ("/generate", {**generate, "parameters": LOOP | {"speculate": 0}})]
    with Server(*FLAGS, str(LONGEST)) as server:
        expected = asyncio.run(all_answers(server, requests))
    model = str(ROOT / "server/demo")
    flags, env = ("--speculative-model", model, "--speculative-method", "draft"), guesses.guessing(tmp_path, 4)
    with Server(*FLAGS, str(LONGEST), *flags, env=env) as server:
        assert 4 == httpx2.get(f"{server.url}/info", timeout=60).json()["speculate"]
        got = asyncio.run(all_answers(server, requests, at_once=4))
        metrics = server.metrics()
    assert not [answer for answer in expected if "error" in answer]
    assert expected == got
    guessed, right = metrics["tgi_request_guessed_tokens"], metrics["tgi_request_right_guesses"]
    assert metrics["tgi_request_proposed_tokens"] >= guessed >= right > 0.5 * guessed


@pytest.mark.parametrize(
    ("flags", "tokens", "num_kills"),
    [
        ((), LONGEST, 0),
        pytest.param(("--num-shard", "2"), ROOM, 2, marks=pytest.mark.rest),
        pytest.param(
            ("--pipeline-parallel", "2", "--speculative-method", "ngram"), 2 * LONGEST, 2, marks=pytest.mark.rest
        ),
    ],
    ids=["a small cache", "two shards that die", "two stages that die"],
)
def test_answers_are_those_without_guesses(flags: tuple[str, ...], tokens: int, num_kills: int, tmp_path: Path) -> None:
    """It guesses wherever it can: how often that pays differs from one machine to the next."""
    requests = [*requests_of(9, 5), *repeating()]
    with Server(*FLAGS, str(ROOM), *flags) as server:
        expected = asyncio.run(all_answers(server, requests))
        assert 0 == server.metrics()["tgi_request_guessed_tokens"]
    with Server(*FLAGS, str(tokens), *flags, "--speculate", "8", env=guesses.guessing(tmp_path, 8)) as server:
        assert 8 == httpx2.get(f"{server.url}/info", timeout=60).json()["speculate"]
        got = asyncio.run(all_answers(server, requests, num_kills, at_once=4))
        metrics = server.metrics()
    assert not [answer for answer in expected if "error" in answer]
    assert expected == got
    guessed, right = metrics["tgi_request_guessed_tokens"], metrics["tgi_request_right_guesses"]
    assert guessed >= right > 50
    assert not metrics["tgi_queue_size"]
    assert not num_kills or metrics["tgi_shards_recovery_count"] >= 1  # a busy machine may cost some without kills


@pytest.mark.rest
@pytest.mark.parametrize(
    ("method", "troubles", "flags"),
    [
        ("suffix", ("kill", "stop", "leave"), ("--num-shard", "2", "--max-batch-total-tokens", "16384")),
        ("ngram", ("router", "kill"), ("--pipeline-parallel", "2", "--max-batch-total-tokens", "16384")),
        ("suffix", ("leave",), ("--max-batch-total-tokens", str(guesses.LONGEST))),
    ],
    ids=["two shards", "two stages", "a small cache"],
)
def test_whatever_is_asked_and_happens(method: str, troubles: tuple[str, ...], flags: tuple[str, ...]) -> None:
    """As `python -m tests.system.guesses` does at length."""
    requests = guesses.requests_of(96, 3)
    expected, _ = guesses.served(requests, "--dtype", "float32", *flags)
    speculating = ("--speculate", "8", "--speculative-method", method)
    got, metrics = guesses.served(requests, "--dtype", "float32", *flags, *speculating, troubles=troubles)
    told = guesses.compare(expected, got, metrics)
    assert not [answer for answer in expected if "error" in answer]
    assert (0, 0) == (told["others"], told["left"]), told
    assert told["request_guessed_tokens"] > told["request_right_guesses"] > 0
    assert [name for name in troubles if name != guesses.LEAVE] == [name for name in troubles if told.get(name)]


@pytest.mark.rest
def test_a_router_that_measures_lives_through_deaths_of_shards_and_leaving_clients() -> None:
    """What guesses and a model's proposals cost is measured meanwhile, and decides; nobody has to ask again."""
    requests = guesses.requests_of(96, 4)
    room = ("--dtype", "float32", "--max-batch-total-tokens", str(guesses.LONGEST))
    expected, _ = guesses.served(requests, *room)
    speculating = ("--speculative-model", str(ROOT / "server/demo"), "--speculative-method", "draft")
    got, metrics = guesses.served(requests, *room, *speculating, troubles=("kill", "leave"), is_measured=True)
    told = guesses.compare(expected, got, metrics)
    assert not [answer for answer in expected if "error" in answer]
    assert (0, 0, 0) == (told["others"], told["left"], told["asked again"]), told
    assert told["kill"] > 0, told
