"""Clients of a server whose model processes are killed and stopped: every stream must get its undisturbed tokens.

`python -m tests.system.survival --kills 50` runs what `make soak` begins with: the embedded model in float32 on two
ranks, 32 streams at a time (greedy, seeded, with stop sequences, penalties, candidates, log-probabilities of prompts),
a random rank killed at random moments. `--fault stop` sends SIGSTOP instead, `--model DIR` serves another model, and
any further flags go to the launcher. It prints one JSON object and ends with 1 if a request failed or got another
token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from tests.running import Server, body, events_of

WORDS = "the little fox went to the river and found a red ball under an old tree".split()
STREAMS = 32
RECOVERIES = "tgi_shards_recovery_count"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
LOGPROB_ERROR = 1e-3  # of log-probabilities of the same tokens, in float32


@dataclass(frozen=True)
class Answer:
    """All of an answer that may not change."""

    words: tuple[object, ...]  # text, finish reason, seed, and the ids of prompt, tokens and candidates
    logprobs: tuple[float, ...]  # of the same

    @classmethod
    def of(
        cls,
        text: str,
        details: dict[str, Any],
        prompt: Sequence[dict[str, Any]],
        tokens: Sequence[dict[str, Any]],
        top_tokens: Sequence[Sequence[dict[str, Any]]],
    ) -> Answer:
        """From the pieces of TGI's bodies; the prompt without its first token, which nothing predicted."""
        told = [*prompt, *tokens, *(token for candidates in top_tokens for token in candidates)]
        words = (text, details["finish_reason"], details["seed"], *(token["id"] for token in told))
        return cls(words, tuple(token["logprob"] for token in told))

    def is_as(self, other: Answer) -> bool:
        """Whether nothing differs but the last digits of a log-probability."""
        pairs = zip(self.logprobs, other.logprobs, strict=True) if self.words == other.words else [(math.inf, 0.0)]
        return all(one == two or abs(one - two) <= LOGPROB_ERROR for one, two in pairs)  # -inf: a warper removed it


def mixed_requests(
    count: int, rng: random.Random, most_tokens: int = 150, words: Sequence[str] = WORDS, most_words: int = 120
) -> list[dict[str, Any]]:
    """Requests that use what must survive."""
    kinds: list[dict[str, Any]] = [
        {},
        {"do_sample": True, "seed": 7, "temperature": 0.8},
        {"stop": ["river", " old tree"]},
        {"do_sample": True, "seed": 9, "top_k": 20, "top_p": 0.9, "typical_p": 0.95, "watermark": True},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"top_n_tokens": 3, "do_sample": True, "seed": 11, "repetition_penalty": 1.1},
        {"decoder_input_details": True, "do_sample": True, "seed": 13},
    ]
    return [
        body(
            " ".join(rng.choices(words, k=rng.randint(1, most_words))),
            max_new_tokens=rng.randint(20, most_tokens),
            details=True,
            **kinds[number % len(kinds)],
        )
        for number in range(count)
    ]


@dataclass
class Tally:
    """What the clients saw."""

    answers: int = 0
    failures: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)  # seconds: the longest gap of each stream


class Clients:
    """Streams that follow one another on STREAMS connections, each checked against the undisturbed answer."""

    def __init__(self, url: str, requests: Sequence[dict[str, Any]]) -> None:
        self.url = url
        self.requests = requests
        self.expected: list[Answer] = []
        self.tally = Tally()
        self.is_over = False

    async def learn(self, client: httpx2.AsyncClient) -> None:
        """Take the answers while nobody disturbs."""
        answers = await asyncio.gather(*(self._ask(client, request) for request in self.requests))
        self.expected = [answer for answer, _ in answers]

    async def go_on(self, client: httpx2.AsyncClient, rng: random.Random) -> None:
        """One stream after the other until `is_over`."""
        while not self.is_over:
            await self._one(client, rng)

    async def _one(self, client: httpx2.AsyncClient, rng: random.Random) -> None:
        number = rng.randrange(len(self.requests))
        try:
            answer, pause = await self._ask(client, self.requests[number])
        except (httpx2.HTTPError, ValueError, KeyError) as error:
            self.tally.failures.append(f"{type(error).__name__}: {error}")
            return
        self.tally.answers += 1
        if pause is not None:
            self.tally.pauses.append(pause)
        if not answer.is_as(self.expected[number]):
            self.tally.failures.append(f"request {number}: {answer} instead of {self.expected[number]}")

    async def _ask(self, client: httpx2.AsyncClient, request: dict[str, Any]) -> tuple[Answer, float | None]:
        """The answer, and of a stream the longest time in which nothing of it came, from when it was asked for.

        Raises ValueError for an error.
        """
        if request["parameters"].get("decoder_input_details"):
            return await self._ask_at_once(client, request), None
        events, pause, last = [], 0.0, time.monotonic()
        async with client.stream("POST", f"{self.url}/generate_stream", json=request) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data:"):
                    now = time.monotonic()
                    pause, last = max(pause, now - last), now
                    events += events_of([line])
                elif stream.status_code != 200:
                    raise ValueError(line)
        if "error" in events[-1]:
            raise ValueError(events[-1]["error"])
        final = events[-1]
        top_tokens = [event["top_tokens"] for event in events if "top_tokens" in event]
        return Answer.of(final["generated_text"], final["details"], [], [e["token"] for e in events], top_tokens), pause

    async def _ask_at_once(self, client: httpx2.AsyncClient, request: dict[str, Any]) -> Answer:
        answer = (await client.post(f"{self.url}/generate", json=request)).json()
        if "error" in answer:
            raise ValueError(answer["error"])
        details = answer["details"]
        prompt = details["prefill"]
        if len(prompt) < 1 or any(token["logprob"] is None for token in prompt[1:]):
            raise ValueError(f"prompt log-probabilities are missing: {prompt}")
        return Answer.of(answer["generated_text"], details, prompt[1:], details["tokens"], [])


Disturb = Callable[[Server], Awaitable[None]]


def signals(number: signal.Signals, times: int, rng: random.Random, most_s: float = 3.0) -> Disturb:
    """Send it to a random rank at random moments, and wait each time for the recovery."""

    async def disturb(server: Server) -> None:
        for _ in range(times):
            await asyncio.sleep(rng.uniform(0.05, most_s))
            count = await recoveries(server)
            os.kill(rng.choice(server.shards()), number)
            await recovery_after(server, count)

    return disturb


async def recoveries(server: Server) -> float:
    """How often lost shards were replaced."""
    return (await asyncio.to_thread(server.metrics)).get(RECOVERIES, 0)


async def recovery_after(server: Server, count: float) -> None:
    """Wait until there were more recoveries than `count`."""
    async with asyncio.timeout(120):
        while await recoveries(server) <= count:
            await asyncio.sleep(0.05)


async def answers_of(server: Server, requests: Sequence[dict[str, Any]]) -> list[Answer]:
    """What an undisturbed server answers."""
    clients = Clients(server.url, requests)
    async with httpx2.AsyncClient(timeout=300, limits=httpx2.Limits(max_connections=None)) as client:
        await clients.learn(client)
    return clients.expected


async def survive(
    server: Server,
    disturb: Disturb,
    *,
    streams: int = STREAMS,
    requests: Sequence[dict[str, Any]] = (),
    expected: Sequence[Answer] = (),
) -> Tally:
    """Disturb the server while streams of `requests`, or of twice as many mixed ones, run; what the clients saw.

    expected: their answers, by default those that the server itself gives before.
    """
    clients = Clients(server.url, requests or mixed_requests(2 * streams, random.Random(5)))
    clients.expected = [*expected]
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(timeout=300, limits=limits) as client:
        if not clients.expected:
            await clients.learn(client)
        tasks = [asyncio.create_task(clients.go_on(client, random.Random(n))) for n in range(streams)]
        try:
            await disturb(server)
        finally:
            clients.is_over = True
            await asyncio.gather(*tasks)
    return clients.tally


def main() -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--most-seconds", type=float, default=3.0, help="between a recovery and the next kill")
    parser.add_argument("--fault", choices=SIGNALS, default="kill")
    parser.add_argument("--model", default=None)
    parser.add_argument("--seed", type=int, default=1)
    args, flags = parser.parse_known_args()
    model = [] if args.model is None else ["--model-id", args.model]
    with Server("--dtype", "float32", "--num-shard", "2", *model, *flags) as server:
        disturb = signals(SIGNALS[args.fault], args.kills, random.Random(args.seed), args.most_seconds)
        tally = asyncio.run(survive(server, disturb))
        metrics = server.metrics()
    pauses = sorted(tally.pauses)
    print(
        json.dumps(
            {
                "answers": tally.answers,
                "failures": tally.failures[:10],
                "recoveries": metrics[RECOVERIES],
                "lost_seconds": metrics["tgi_shards_recovery_seconds"],
                "pause_p50_s": statistics.median(pauses),
                "pause_p99_s": pauses[int(0.99 * len(pauses))],
                "pause_max_s": pauses[-1],
            },
            indent=1,
        )
    )
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
