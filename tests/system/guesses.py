"""Answers with guesses beside those without, whatever is asked and whatever happens meanwhile.

`python -m tests.system.guesses --requests 2000` asks a server of the embedded model that guesses nothing, and then
servers that do, with every parameter, grammars, tools, stop sequences, several answers, log-probabilities and streams,
for two API keys in one batch. `--trouble kill stop router leave` has shards killed and stopped, routers killed and
clients leave or give up at deadlines while the latter answer; `--room 512` gives them a KV cache of so many tokens.
`--beside FOLDER` gives them a speculative model too, and any further flags go to all the launchers. It prints a JSON
object for each server and ends with 1 if an answer was another one.

What was lost with a router is asked for again: its connections die with it. Guesses are tried wherever there are any,
whatever they cost (`tests/faults/sitecustomize.py`); with `--measured` the server decides by what it measures.
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
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from tests.running import ROOT, Server, events_of
from tests.system.test_keys import keys_file
from tests.system.test_kv_demand import OF_ITS_OWN, TOOL, schema

KEYS = ("greedy", "modest")
KEY = {"authorization": f"Bearer {KEYS[0]}-secret"}
LONGEST, ROOM = 512, 16_384  # tokens of a request, and of a KV cache in which many run
FLAGS = (
    *("--max-total-tokens", str(LONGEST), "--max-input-length", "400", "--max-concurrent-requests", "9999"),
    *("--max-deaths", "9999", "--max-client-batch-size", "8"),
)
OWN = {*OF_ITS_OWN, "created_at", "completed_at", "item_id", "call_id"}
METHODS = ("ngram", "suffix", "auto", "draft")
COUNTED = (
    *("tgi_request_guessed_tokens", "tgi_request_right_guesses"),
    *("tgi_shards_recovery_count", "tgi_kv_preempted"),
)
PATIENCE = 300  # times that a request is asked again
PHRASES = (
    "The little fox walked along the river and found a ball. ",
    "Tom and Ben went to the park. They were very happy. ",
    '{"name": "fox", "kind": "owl"}, ',
    "One day the little girl saw a big dog. ",
)
PENALTIES = {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3}
ALL = PENALTIES | {"temperature": 1.1, "top_k": 60, "top_p": 0.95, "typical_p": 0.97, "min_p": 0.001}


@dataclass(frozen=True)
class Asked:
    """A request, and whose it is."""

    path: str
    body: dict[str, Any]
    key: str


def text_of(chance: random.Random) -> str:
    """One that mostly repeats itself: an answer soon does as well, or is cut off where it begins to."""
    if chance.random() < 0.3:
        return "".join(chance.sample(PHRASES, 2))
    return (chance.choice(PHRASES) * 4)[: chance.randint(60, 200)]


def parameters(number: int, chance: random.Random) -> dict[str, Any]:
    """Of a request to TGI's routes."""
    drawn: dict[str, Any] = {"do_sample": True, "seed": number}
    kinds: tuple[dict[str, Any], ...] = (
        {"ignore_eos": True},
        drawn | {"temperature": 0.4, "ignore_eos": True},
        drawn | ALL | {"watermark": True, "top_n_tokens": 4},
        drawn | {"bad_words": [" fox", " the river"], "logit_bias": {"614": 2.0, "17": -1.0}, "min_tokens": 8},
        PENALTIES | {"top_n_tokens": 3, "ignore_eos": True},
        drawn | {"stop": ["river", " happy", "\n"], "temperature": 0.7},
        {"grammar": {"type": "json", "value": schema(5, 30)}},
        drawn | {"grammar": {"type": "regex", "value": "(The (fox|owl) was (very )*(happy|sad)\\. ){1,5}"}},
    )
    return {"max_new_tokens": chance.randint(8, 60), "details": True} | kinds[number % len(kinds)]


def v1(number: int, text: str, chance: random.Random) -> tuple[str, dict[str, Any]]:
    """A request to the other routes."""
    asked: dict[str, Any] = {"model": "demo", "max_tokens": chance.randint(8, 50), "seed": number}
    asked["temperature"] = chance.choice((0, 0.3, 1.0))
    chat = asked | {"messages": [{"role": "user", "content": text}], "ignore_eos": True}
    once = chat | {"ignore_eos": False}
    completion = asked | {"prompt": text, "ignore_eos": True}
    lines = {"type": "json_schema", "json_schema": {"name": "note", "schema": schema(5, 20)}}
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/v1/chat/completions", chat | {"n": 2, "logprobs": True, "top_logprobs": 3}),
        ("/v1/chat/completions", chat | {"prediction": {"type": "content", "content": text}}),
        ("/v1/chat/completions", once | {"tools": [TOOL], "tool_choice": "required"}),
        ("/v1/chat/completions", once | {"tools": [TOOL], "tool_choice": "auto", "logprobs": True}),
        ("/v1/chat/completions", once | {"response_format": lines, "logprobs": True, "top_logprobs": 2}),
        ("/v1/completions", completion | {"logprobs": 3, "echo": True}),
        ("/v1/completions", completion | {"n": 2, "best_of": 3, "temperature": 0.9} | PENALTIES),
        ("/v1/completions", completion | {"stop": [" happy", ". "], "logprobs": 1, "speculate": number % 3}),
    )
    return kinds[number % len(kinds)]


def requests_of(count: int, seed: int) -> list[Asked]:
    """Of every kind; of those that can be, every second is a stream."""
    chance = random.Random(seed)
    found = []
    for number in range(count):
        text, kind = text_of(chance), number // 2
        if number % 2:
            path, body = v1(kind, text, chance)
            streams = kind // 8 % 2 and not {"best_of", "echo"} & body.keys()
            body |= {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
        else:
            body = {"inputs": text, "parameters": parameters(kind, chance)}
            path = "/generate_stream" if kind // 8 % 2 else "/generate"
        found.append(Asked(path, body, KEYS[chance.random() < 0.5]))
    return found


def bare(answer: Any) -> Any:
    """Without what is another one in every answer."""
    if isinstance(answer, list):
        return [bare(one) for one in answer]
    if not isinstance(answer, dict):
        return answer
    return {key: bare(value) for key, value in answer.items() if key not in OWN}


def joined(events: list[dict[str, Any]]) -> Any:
    """A stream's events; texts, log-probabilities and arguments put together where several tokens may share one."""
    if not events or "choices" not in events[-1]:
        return [bare(event) for event in events]
    found: dict[str, Any] = {}
    for event in events:
        for choice in event["choices"]:
            _put_together(found, bare(choice | choice.pop("delta", {})), str(choice["index"]))
    return [found, *(bare(event["usage"]) for event in events if event.get("usage"))]


def _put_together(found: dict[str, Any], part: Any, at: str) -> None:
    """Add a part of an answer to what stands at this place, by its kind."""
    if isinstance(part, dict):
        for key, value in part.items():
            _put_together(found, value, f"{at}.{key}")
    elif isinstance(part, list) and at.endswith("tool_calls"):
        for call in part:
            _put_together(found, call, f"{at}.{call['index']}")
    elif isinstance(part, str | list) and not at.endswith(("role", "finish_reason", "type")):
        found[at] = found.get(at, type(part)()) + part
    elif part is not None:
        found[at] = part


class Lost(Exception):
    """The server could not answer now: the router was killed, or the next one is not ready."""


@dataclass
class Clients:
    """Ask for all, so many at a time."""

    url: str
    at_once: int
    answers: dict[int, Any] = field(default_factory=dict)
    asked_again: int = 0

    async def all_answers(self, requests: Sequence[Asked]) -> list[Any]:
        """In their order."""
        turns = asyncio.Semaphore(self.at_once)

        async def one(number: int, asked: Asked) -> None:
            async with turns:
                for _ in range(PATIENCE):
                    try:
                        self.answers[number] = await ask(client, asked)
                        return
                    except (httpx2.HTTPError, Lost):
                        self.asked_again += 1
                        await asyncio.sleep(1)
                raise AssertionError(f"request {number} was lost {PATIENCE} times")

        async with client_of(self.url) as client, asyncio.TaskGroup() as group:
            for number, asked in enumerate(requests):
                group.create_task(one(number, asked))
        return [self.answers[number] for number in range(len(requests))]


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[httpx2.AsyncClient]:
    """With room for every connection."""
    async with httpx2.AsyncClient(base_url=url, timeout=900, limits=httpx2.Limits(max_connections=None)) as client:
        yield client


async def ask(client: httpx2.AsyncClient, asked: Asked, **headers: str) -> Any:
    """The answer, or the error. Raises Lost, HTTPError."""
    headers |= {"authorization": f"Bearer {asked.key}-secret"}
    if not (asked.path.endswith("_stream") or asked.body.get("stream")):
        answer = await client.post(asked.path, json=asked.body, headers=headers)
        if answer.status_code in (502, 503):
            raise Lost(answer.text)
        return bare(answer.json())
    async with client.stream("POST", asked.path, json=asked.body, headers=headers) as stream:
        lines = [line async for line in stream.aiter_lines()]
    if stream.status_code in (502, 503):
        raise Lost(lines)
    if stream.status_code != 200:
        return {"error": lines}
    events = events_of([line for line in lines if line != "data: [DONE]"])
    if not events or "error" in events[-1]:
        raise Lost(lines[-1:])
    return joined(events)


# What happens to a server. Those that end processes are waited for until the server is as before, now and then two at
# once; clients leave all the time.
Trouble = Callable[[Server, random.Random], Awaitable[None]]


async def kill(server: Server, chance: random.Random) -> None:
    """A shard dies."""
    with suppress(ProcessLookupError):
        os.kill(chance.choice(await asyncio.to_thread(server.shards)), signal.SIGKILL)


async def stop(server: Server, chance: random.Random) -> None:
    """A shard stands still for a while, and is replaced where that is too long."""
    pid = chance.choice(await asyncio.to_thread(server.shards))
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(chance.choice((0.3, 1.0, 2.0, 6.0)))
        os.kill(pid, signal.SIGCONT)


async def kill_router(server: Server, chance: random.Random) -> None:
    """The router dies, and with it all connections."""
    await asyncio.sleep(chance.uniform(0, 1))
    with suppress(ProcessLookupError, StopIteration):
        os.kill(server.router(), signal.SIGKILL)


TROUBLES: dict[str, Trouble] = {"kill": kill, "stop": stop, "router": kill_router}
LEAVE = "leave"


async def disturb(
    server: Server, names: Sequence[str], chance: random.Random, counts: Counter[str], answers: Mapping[int, Any]
) -> None:
    """All of these in a row once there is an answer, and then some at random, for ever, now and then.

    counts: what happened, and what dead routers had counted.
    """
    at_once = len(names)
    while not answers:
        await asyncio.sleep(0.02)
    while True:
        happening, at_once = chance.sample(names, at_once), min(len(names), chance.choice((1, 1, 2)))
        for name in happening:
            if name == "router":
                with suppress(httpx2.HTTPError):
                    metrics = await asyncio.to_thread(metrics_of, server)
                    counts.update({key: int(metrics[key]) for key in COUNTED})
            counts[name] += 1
            await TROUBLES[name](server, chance)
        async with client_of(server.url) as client:
            for _ in range(5 * PATIENCE):
                with suppress(httpx2.HTTPError):
                    if (await client.get("/health", headers=KEY)).status_code == 200:
                        break
                await asyncio.sleep(0.1)
        await asyncio.sleep(chance.uniform(1, 4))


async def leave(server: Server, chance: random.Random) -> None:
    """Clients leave in the middle of their answers, or have a deadline there, for ever."""
    while True:
        await asyncio.sleep(chance.uniform(0.05, 0.3))
        asked = requests_of(64, chance.randrange(99))[chance.randrange(64)]
        seconds = chance.uniform(0.05, 1.0)
        with suppress(httpx2.HTTPError, Lost, TimeoutError):
            async with client_of(server.url) as client:
                if chance.random() < 0.5:
                    await ask(client, asked, **{"x-request-timeout-ms": str(int(1000 * seconds))})
                else:
                    await asyncio.wait_for(ask(client, asked), seconds)


async def answers_amid(
    server: Server, requests: Sequence[Asked], troubles: Sequence[str], at_once: int, seed: int
) -> tuple[list[Any], Counter[str]]:
    """The answers, and what else happened."""
    clients, chance, counts = Clients(server.url, at_once), random.Random(seed), Counter[str]()
    going_on = [asyncio.create_task(leave(server, chance))] if LEAVE in troubles else []
    if others := [name for name in troubles if name != LEAVE]:
        going_on.append(asyncio.create_task(disturb(server, others, chance, counts, clients.answers)))
    try:
        answers = await clients.all_answers(requests)
    finally:
        for task in going_on:
            task.cancel()
        ended = await asyncio.gather(*going_on, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error
    return answers, counts + Counter({"asked again": clients.asked_again})


def is_left(metrics: dict[str, float]) -> float:
    """What a server without requests should have none of."""
    held = metrics["tgi_kv_blocks_total"] - metrics["tgi_kv_blocks_free"]
    return metrics["tgi_queue_size"] + metrics["tgi_batch_current_size"] + held


def metrics_of(server: Server) -> dict[str, float]:
    """All of them, as they are read with a key."""
    text = httpx2.get(f"{server.url}/metrics", headers=KEY, timeout=60).text
    rows = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in rows}


def metrics_at_rest(server: Server) -> dict[str, float]:
    """All, as soon as nothing is left of who was there, or after half a minute."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with suppress(httpx2.TransportError):  # the last trouble may have been the router's death
            if not is_left(metrics := metrics_of(server)):
                return metrics
        time.sleep(0.2)
    return metrics_of(server)


def guessing(folder: Path, number: int) -> dict[str, str]:
    """The environment of a server that guesses so much wherever it can; the number stands in a file in this folder."""
    (folder / "number").write_text(str(number))
    return {"PYTHONPATH": f"{ROOT / 'tests' / 'faults'}:{ROOT}", "LOCKSTEP_TEST_GUESSES": str(folder / "number")}


def served(
    requests: Sequence[Asked],
    *flags: str,
    troubles: Sequence[str] = (),
    at_once: int = 24,
    seed: int = 0,
    is_measured: bool = False,
) -> tuple[list[Any], dict[str, float]]:
    """What a server of its own answers, and its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        keys = ("--api-keys-file", str(keys_file(Path(folder), *KEYS)))
        env = {} if is_measured else guessing(Path(folder), 8)
        with Server(*FLAGS, *keys, *flags, env=env) as server:
            answers, counts = asyncio.run(answers_amid(server, requests, troubles, at_once, seed))
            metrics = Counter(metrics_at_rest(server))
            metrics.update(counts)
            return answers, metrics


def tokens_in(answer: Any) -> list[Any]:
    """All of an answer but for numbers that are rounded."""
    if isinstance(answer, dict):
        return [tokens_in(value) for key, value in answer.items()]
    return (
        [tokens_in(one) for one in answer]
        if isinstance(answer, list)
        else []
        if isinstance(answer, float)
        else [answer]
    )


def compare(expected: Sequence[Any], got: Sequence[Any], metrics: dict[str, float]) -> dict[str, Any]:
    """What to tell of a server."""
    pairs = list(enumerate(zip(expected, got, strict=True)))
    wrong = [number for number, (one, other) in pairs if one != other]
    return {
        "answers": len(got),
        "others": len(wrong),
        "of these with other tokens": sum(tokens_in(expected[number]) != tokens_in(got[number]) for number in wrong),
        "the first": wrong[:9],
        **{key.removeprefix("tgi_"): metrics[key] for key in COUNTED},
        **{key: metrics[key] for key in (*TROUBLES, "asked again")},
        "left": is_left(metrics),
    }


def main() -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS[:2])
    parser.add_argument("--beside", help="speculative model of the servers that guess")
    parser.add_argument("--stages", type=int, nargs="+", default=[1], help="of the servers that guess")
    parser.add_argument("--trouble", nargs="*", choices=(*TROUBLES, LEAVE), default=[])
    parser.add_argument("--measured", action="store_true", help="guess where that pays")
    parser.add_argument("--room", type=int, default=ROOM, help="tokens of the KV cache of the servers that guess")
    args, flags = parser.parse_known_args()
    requests = requests_of(args.requests, args.seed)
    expected, _ = served(requests, "--max-batch-total-tokens", str(ROOM), *flags, at_once=args.at_once)
    num_errors = sum("error" in answer for answer in expected)
    print(json.dumps({"without guesses": len(expected), "errors": num_errors}), flush=True)
    servers = [(stages, method) for stages in args.stages for method in args.methods]
    num_wrong = sum(_wrong(args, flags, requests, expected, *server) for server in servers)
    return bool(num_errors + num_wrong)


def _wrong(
    args: argparse.Namespace,
    flags: Sequence[str],
    requests: Sequence[Asked],
    expected: Sequence[Any],
    stages: int,
    method: str,
) -> int:
    """Print what comes of a server that guesses; how much of that is wrong."""
    began = time.monotonic()
    own = ["--speculate", "8", "--speculative-method", method, "--pipeline-parallel", str(stages)]
    if args.beside:
        own += ["--speculative-model", args.beside]
    got, metrics = served(
        requests,
        *("--max-batch-total-tokens", str(args.room), *own, *flags),
        troubles=args.trouble,
        at_once=args.at_once,
        seed=args.seed,
        is_measured=args.measured,
    )
    told = compare(expected, got, metrics)
    seconds = round(time.monotonic() - began)
    print(json.dumps({"method": method, "stages": stages} | told | {"seconds": seconds}), flush=True)
    for number in told["the first"][:3]:
        print(json.dumps([requests[number].body, expected[number], got[number]])[:4000], flush=True)
    return int(told["others"] + bool(told["left"]))


if __name__ == "__main__":
    sys.exit(main())
