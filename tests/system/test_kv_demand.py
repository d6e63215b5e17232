"""A real server whose KV cache is far too small for what is asked: requests pause, and get what they would have alone.

`python -m tests.system.test_kv_demand --requests 100 --kills 3` is the same by hand, with more requests, each way of
cutting the model, and shards that are killed meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx2
import pytest

from tests.running import Server

TOKENS = 448
FLAGS = (
    "--dtype",
    "float32",
    "--max-total-tokens",
    "440",
    "--max-input-length",
    "300",
    "--max-concurrent-requests",
    "999",
    "--max-batch-total-tokens",
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "kind": {"enum": ["fox", "owl"]}},
    "required": ["name", "kind"],
}
TOOL = {"type": "function", "function": {"name": "note", "parameters": SCHEMA}}
Asked = tuple[str, dict[str, Any]]


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
    length = chance.randint(60, 180)
    own: dict[str, Any] = {"max_new_tokens": length, "details": True, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": text}], "model": "demo", "max_tokens": length, "seed": number}
    match number % 9:
        case 0:
            return "/generate", {"inputs": text, "parameters": own}
        case 1:
            own |= {"do_sample": True, "seed": number, "temperature": 0.9, "top_n_tokens": 3}
        case 2:
            own |= {"grammar": {"type": "json", "value": SCHEMA}, "ignore_eos": False}
        case 3:
            own |= {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "do_sample": True, "seed": number}
        case 4:
            own |= {"watermark": True, "do_sample": True, "seed": number}
        case 5:
            own |= {"decoder_input_details": True, "return_full_text": True}
        case 6:
            return "/v1/chat/completions", chat | {"n": 2, "logprobs": True, "top_logprobs": 2, "temperature": 0.8}
        case 7:
            return "/v1/chat/completions", chat | {"tools": [TOOL], "tool_choice": "required"}
        case _:
            asked = {"prompt": text, "model": "demo", "max_tokens": length, "logprobs": 2, "echo": True, "seed": number}
            return "/v1/completions", asked
    return "/generate", {"inputs": text, "parameters": own}


async def all_answers(server: Server, requests: Sequence[Asked], num_kills: int = 0) -> list[Any]:
    """All at once, with shards killed meanwhile."""
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        asking = [asyncio.create_task(client.post(path, json=asked)) for path, asked in requests]
        for number in range(num_kills):
            await asyncio.sleep(3)
            os.kill(server.shards()[-1 - number % 2], signal.SIGKILL)
        return [bare(answer.json()) for answer in await asyncio.gather(*asking)]


def bare(answer: Any) -> Any:
    """Without what is another one in every answer."""
    if isinstance(answer, list):
        return [bare(one) for one in answer]
    if not isinstance(answer, dict):
        return answer
    return {key: bare(value) for key, value in answer.items() if key not in ("id", "created", "prompt_tokens_details")}


def answers_and_pauses(
    kv_admission: str, requests: Sequence[Asked], flags: Sequence[str], num_kills: int = 0
) -> tuple[list[Any], dict[str, float]]:
    """What a server with a small cache answers, and its metrics."""
    with Server(*FLAGS, str(TOKENS), "--kv-admission", kv_admission, *flags) as server:
        return asyncio.run(all_answers(server, requests, num_kills)), server.metrics()


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
    expected, _ = answers_and_pauses("reserve", requests, flags)
    got, metrics = answers_and_pauses("demand", requests, flags)
    assert not [answer for answer in expected if "error" in answer]
    assert expected == got
    assert metrics["tgi_kv_preempted"] >= 5 and not metrics["tgi_queue_size"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--kills", type=int, default=0)
    args = parser.parse_args()
    requests = requests_of(args.requests, 5)
    failed = 0
    for flags in (
        (),
        ("--num-shard", "2"),
        ("--pipeline-parallel", "2"),
        ("--num-shard", "2", "--disable-prefix-caching"),
    ):
        began = time.monotonic()
        expected, _ = answers_and_pauses("reserve", requests, flags)
        got, metrics = answers_and_pauses(
            "demand", requests, (*flags, "--max-deaths", "99"), args.kills if flags else 0
        )
        wrong = [number for number, pair in enumerate(zip(expected, got, strict=True)) if pair[0] != pair[1]]
        failed += len(wrong)
        pauses = metrics["tgi_kv_preempted"], metrics["tgi_kv_recomputed_tokens"], metrics["tgi_shards_recovery_count"]
        print(
            flags,
            "wrong:",
            wrong,
            "sent away, computed again, recoveries:",
            pauses,
            f"{time.monotonic() - began:.0f} s",
        )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
