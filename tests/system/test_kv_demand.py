"""A real server whose KV cache is far too small for what is asked: requests pause, and get what they would have alone.

`python -m tests.system.test_kv_demand --requests 100 --kills 3 --rounds 5` is the same by hand: in each round so many
requests of its own in each arrangement of the model, with shards that are killed meanwhile. It prints one JSON object
for each, and ends with 1 if an answer is another one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import httpx2
import pytest

from tests.running import Server

LONGEST = 304
FLAGS = (
    "--dtype",
    "float32",
    "--max-total-tokens",
    str(LONGEST),
    "--max-input-length",
    "250",
    "--max-concurrent-requests",
    "9999",
    "--max-batch-total-tokens",
)
ROOM = 16_384  # tokens of a cache in which many run at once
TOOL_TOKENS = 50  # its prompt takes nearly all of the cache
ARRANGEMENTS: tuple[tuple[str, ...], ...] = (
    (),
    ("--prefix-cache-host-gb", "0.01", "--prefix-cache-disk-gb", "0.01", "--prefix-cache-dir"),
    ("--pipeline-parallel", "2"),
    ("--num-shard", "2"),
)
# Names, times, and how an answer came about.
OF_ITS_OWN = ("id", "created", "prompt_tokens_details", "completion_tokens_details", "guessed")
Asked = tuple[str, dict[str, Any]]


def schema(least: int, most: int) -> dict[str, Any]:
    """Of an object with a name of so many letters."""
    name: dict[str, Any] = {"type": "string", "maxLength": most}
    if least:
        name["minLength"] = least
    return {
        "type": "object",
        "properties": {"name": name, "kind": {"enum": ["fox", "owl"]}},
        "required": ["name", "kind"],
    }


TOOL = {"type": "function", "function": {"name": "note", "parameters": schema(0, 20)}}


def requests_of(count: int, seed: int) -> list[Asked]:
    """Requests of every kind that mostly write all that they ask for, each behind three that end soon: so little is
    expected of it."""
    chance = random.Random(seed)
    return [one for number in range(count) for one in (*[_short(number)] * 3, _request(number, chance))]


def _short(number: int) -> Asked:
    """Of the same route as the request with this number."""
    if number % 9 < 6:
        return "/generate", {"inputs": "The", "parameters": {"max_new_tokens": 180, "stop": [" "], "details": True}}
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 180, "stop": [" "], "seed": number}
    if number % 9 < 8:
        return "/v1/chat/completions", asked | {"messages": [{"role": "user", "content": "The"}]}
    return "/v1/completions", asked | {"prompt": "The"}


def _request(number: int, chance: random.Random) -> Asked:
    text = " ".join(chance.choices(("The little fox", "walked along", "the river", "and found a ball"), k=5))
    length = chance.randint(120, 180)
    own: dict[str, Any] = {"max_new_tokens": length, "details": True, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": text}], "model": "demo", "max_tokens": length, "seed": number}
    match number % 9:
        case 0:
            return "/generate", {"inputs": text, "parameters": own}
        case 1:
            own |= {"do_sample": True, "seed": number, "temperature": 0.9, "top_n_tokens": 3}
        case 2:
            own |= {"grammar": {"type": "json", "value": schema(200, 300)}, "ignore_eos": False}
        case 3:
            own |= {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "do_sample": True, "seed": number}
        case 4:
            own |= {"watermark": True, "do_sample": True, "seed": number}
        case 5:
            own |= {"decoder_input_details": True, "return_full_text": True}
        case 6:
            return "/v1/chat/completions", chat | {"n": 2, "logprobs": True, "top_logprobs": 2, "ignore_eos": True}
        case 7:
            return "/v1/chat/completions", chat | {
                "tools": [TOOL],
                "tool_choice": "required",
                "max_tokens": TOOL_TOKENS,
            }
        case _:
            asked = {"prompt": text, "model": "demo", "max_tokens": length, "logprobs": 2, "echo": True, "seed": number}
            return "/v1/completions", asked | {"ignore_eos": True}
    return "/generate", {"inputs": text, "parameters": own}


async def all_answers(server: Server, requests: Sequence[Asked], num_kills: int = 0, at_once: int = 9999) -> list[Any]:
    """So many at a time, with a shard killed whenever another part of them is answered."""
    limits, turns = httpx2.Limits(max_connections=None), asyncio.Semaphore(at_once)

    async def ask(client: httpx2.AsyncClient, path: str, asked: dict[str, Any]) -> Any:
        async with turns:
            return bare((await client.post(path, json=asked)).json())

    async with httpx2.AsyncClient(base_url=server.url, timeout=900, limits=limits) as client:
        asking = [asyncio.create_task(ask(client, *request)) for request in requests]
        for number in range(num_kills):
            while sum(task.done() for task in asking) < len(requests) * (number + 1) // (num_kills + 2):
                await asyncio.sleep(0.02)
            shards = server.shards()
            os.kill(shards[number % len(shards)], signal.SIGKILL)
        return await asyncio.gather(*asking)


def bare(answer: Any) -> Any:
    """Without what is another one in every answer."""
    if isinstance(answer, list):
        return [bare(one) for one in answer]
    if not isinstance(answer, dict):
        return answer
    return {key: bare(value) for key, value in answer.items() if key not in OF_ITS_OWN}


def answers_and_metrics(
    kv_admission: str, requests: Sequence[Asked], flags: Sequence[str], tokens: int = LONGEST, num_kills: int = 0
) -> tuple[list[Any], dict[str, float]]:
    """What a server with a cache of so many tokens answers, and its metrics."""
    with Server(*FLAGS, str(tokens), "--kv-admission", kv_admission, *flags) as server:
        return asyncio.run(all_answers(server, requests, num_kills)), server.metrics()


def check_tokens_stay(own: Sequence[str], flags: Sequence[str], num_kills: int) -> None:
    """A model of states or rings answers as ever where sequences are sent away and shards die. own: what it is."""
    requests = requests_of(9, 5)
    expected, _ = answers_and_metrics("reserve", requests, (*own, *flags, "--disable-prefix-caching"))
    got, metrics = answers_and_metrics("demand", requests, (*own, *flags), num_kills=num_kills)
    assert not [answer for answer in expected if "error" in answer]
    assert expected == got
    assert metrics["tgi_kv_preempted"] and not metrics["tgi_queue_size"]
    assert not num_kills or metrics["tgi_shards_recovery_count"] >= 1  # a busy machine may cost some without kills


@pytest.mark.parametrize(
    "flags",
    [
        (),
        pytest.param(("--num-shard", "2", "--prefix-cache-host-gb", "0.01"), marks=pytest.mark.rest),
        pytest.param(("--pipeline-parallel", "2", "--disable-prefix-caching"), marks=pytest.mark.rest),
    ],
    ids=["one shard", "two shards and a tier", "two stages without prefixes"],
)
def test_who_is_sent_away_for_want_of_blocks_gets_the_same_tokens(flags: tuple[str, ...]) -> None:
    requests = requests_of(18, 3)
    expected, _ = answers_and_metrics("reserve", requests, flags)
    got, metrics = answers_and_metrics("demand", requests, flags)
    assert not [answer for answer in expected if "error" in answer]
    assert expected == got
    assert metrics["tgi_kv_preempted"] >= 5 and not metrics["tgi_queue_size"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--requests", type=int, default=100, help="in each arrangement and round, behind three times as many"
    )
    parser.add_argument("--kills", type=int, default=0, help="of shards, in each arrangement and round")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    num_wrong = 0
    for number in range(args.rounds):
        requests = requests_of(args.requests, number)
        expected: dict[
            tuple[str, ...], list[Any]
        ] = {}  # by the number of shards that sum: rounding is theirs, and nothing else's
        for flags in ARRANGEMENTS:
            summed = flags if "--num-shard" in flags else ()
            if summed not in expected:
                expected[summed], _ = answers_and_metrics("reserve", requests, summed, ROOM)
            num_wrong += _compare(expected[summed], requests, flags, args.kills)
    return bool(num_wrong)


def _compare(expected: Sequence[Any], requests: Sequence[Asked], flags: tuple[str, ...], num_kills: int) -> int:
    """Print how many answers are other ones where the cache is small, and what happened meanwhile."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        own = (*flags, folder) if "--prefix-cache-dir" in flags else flags
        got, metrics = answers_and_metrics("demand", requests, (*own, "--max-deaths", "99"), LONGEST, num_kills)
    pairs = enumerate(zip(expected, got, strict=True))
    wrong = [number for number, (one, other) in pairs if one != other or "error" in one]
    figures = {
        "arrangement": " ".join(flags) or "one shard",
        "wrong": wrong,
        "sent away": metrics["tgi_kv_preempted"],
        "computed again": metrics["tgi_kv_recomputed_tokens"],
        "recoveries": metrics["tgi_shards_recovery_count"],
        "blocks left": metrics["tgi_kv_blocks_total"] - metrics["tgi_kv_blocks_free"],
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(figures), flush=True)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
