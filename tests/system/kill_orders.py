"""Kills in pairs and triples of what the launcher has started, in every order, under streams of two keys.

`python -m tests.system.kill_orders --times 200` serves the embedded model on two ranks, and `--pipeline-parallel 2` on
two stages of one. Victims are the router, both shards and the process that forks them; between two kills of an order
passes a random part of a second. Each stream must have the tokens of an undisturbed one. A router that dies takes its
connections with it: what is lost while a death is being mended is asked for again, and what fails at any other time is
a failure. It prints one JSON object and ends with 1 if there was one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from tests.running import Server, body, events_of

KEYS = ("one", "other")
STREAMS = 6  # of each key
REQUESTS = 12
VICTIMS = ("router", "fork server", "shard 0", "shard 1")
ORDERS = [order for num in (2, 3) for order in itertools.permutations(VICTIMS, num)]
MOST_BETWEEN_S = 1.0  # of two kills of an order
CALM_S = 1.0  # after each order, with the server as before
MENDED_S = 180.0  # from the last kill


@dataclass
class Seen:
    """What clients saw."""

    answers: int = 0
    asked_again: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass
class Outages:
    """When something was dead, by the monotonic clock."""

    spans: list[tuple[float, float]] = field(default_factory=list)

    def begin(self) -> None:
        """Something is about to be killed; the outage ends with `end`."""
        self.spans.append((time.monotonic(), math.inf))

    def end(self) -> None:
        """The server is as before."""
        begun, _ = self.spans[-1]
        self.spans[-1] = begun, time.monotonic()

    def overlap(self, begun: float) -> bool:
        """Whether any lay between then and now."""
        return any(end >= begun for _, end in self.spans)


def requests_of() -> list[dict[str, Any]]:
    """Greedy ones and seeded ones."""
    return [
        body(
            f"Once upon a time {number}",
            max_new_tokens=20 + 7 * number,
            do_sample=number % 2 == 1,
            seed=number,
            details=True,
        )
        for number in range(REQUESTS)
    ]


async def asked(client: httpx2.AsyncClient, url: str, key: str, request: dict[str, Any]) -> tuple[str, list[int]]:
    """Text and tokens of a stream. Raises ValueError and HTTPError."""
    lines = []
    headers = {"authorization": f"Bearer {key}-secret"}
    async with client.stream("POST", f"{url}/generate_stream", json=request, headers=headers) as stream:
        async for line in stream.aiter_lines():
            if stream.status_code != 200:
                raise ValueError(f"{stream.status_code} {line}")
            lines.append(line)
    events = events_of(lines)
    if "error" in events[-1]:
        raise ValueError(events[-1]["error"])
    return events[-1]["generated_text"], [event["token"]["id"] for event in events]


class Clients:
    """Streams of both keys, one after another, each held against the undisturbed answer."""

    def __init__(self, url: str, outages: Outages) -> None:
        self.seen = Seen()
        self.is_over = False
        self._url, self._outages = url, outages
        self._requests = requests_of()
        self._expected: list[tuple[str, list[int]]] = []

    async def learn(self, client: httpx2.AsyncClient) -> None:
        """Take the answers while nobody disturbs."""
        self._expected = [await asked(client, self._url, KEYS[0], request) for request in self._requests]

    async def go_on(self, client: httpx2.AsyncClient, key: str, chance: random.Random) -> None:
        """One stream after the other until `is_over`, and the last to its end."""
        while not self.is_over:
            number = chance.randrange(REQUESTS)
            while not await self._one(client, key, number):
                self.seen.asked_again += 1
                await asyncio.sleep(0.1)

    async def _one(self, client: httpx2.AsyncClient, key: str, number: int) -> bool:
        """Whether it need not be asked again."""
        begun = time.monotonic()
        try:
            answer = await asked(client, self._url, key, self._requests[number])
        except (httpx2.HTTPError, ValueError, IndexError) as error:
            if self._outages.overlap(begun):
                return False
            self.seen.failures.append(f"{type(error).__name__}: {error}")
            return True
        self.seen.answers += 1
        if answer != self._expected[number]:
            self.seen.failures.append(f"request {number}: {answer} instead of {self._expected[number]}")
        return True


def process_of(server: Server, victim: str) -> int | None:
    """Its process id, if it runs now."""
    for pid in server.children():
        with suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if victim == {"shard-0": "shard 0", "shard-1": "shard 1"}.get(name):
                return pid
            if (
                not name.startswith("shard-")
                and {"router": b"\0router\0", "fork server": b"\0server.fork_server"}.get(victim, b"\n")
                in command + b"\0"
            ):
                return pid
    return None


async def mended(server: Server) -> None:
    """Wait until everybody runs and the server answers."""
    async with asyncio.timeout(MENDED_S), httpx2.AsyncClient(timeout=30) as client:
        while True:
            with suppress(httpx2.HTTPError):
                shards = [process_of(server, victim) for victim in VICTIMS if victim != "fork server"]
                if None not in shards and (await client.get(f"{server.url}/health")).status_code == 200:
                    return
            await asyncio.sleep(0.05)


async def kill(server: Server, order: tuple[str, ...], outages: Outages, chance: random.Random) -> None:
    """Kill these one after another, and wait until all is as before."""
    outages.begin()
    for victim in order:
        pid = process_of(server, victim)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(chance.uniform(0, MOST_BETWEEN_S))
    await mended(server)
    outages.end()
    await asyncio.sleep(CALM_S)


async def survive(server: Server, times: int, chance: random.Random) -> tuple[Seen, list[float]]:
    """What clients saw of so many orders, each as often as the others, and how long each outage took."""
    outages = Outages()
    clients = Clients(server.url, outages)
    orders = [order for _ in range(-(-times // len(ORDERS))) for order in chance.sample(ORDERS, len(ORDERS))][:times]
    async with httpx2.AsyncClient(timeout=300, limits=httpx2.Limits(max_connections=None)) as client:
        await clients.learn(client)
        tasks = [
            asyncio.ensure_future(clients.go_on(client, key, random.Random(f"{key} {n}")))
            for key in KEYS
            for n in range(STREAMS)
        ]
        try:
            for order in orders:
                await kill(server, order, outages, chance)
        finally:
            clients.is_over = True
        await asyncio.gather(*tasks)
    return clients.seen, sorted(end - begun for begun, end in outages.spans)


def main() -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--pipeline-parallel", type=int, choices=(1, 2), default=1)
    parser.add_argument("--seed", type=int, default=1)
    args, flags = parser.parse_known_args()
    stages = args.pipeline_parallel
    with tempfile.TemporaryDirectory() as name:
        keys = Path(name) / "keys.json"
        keys.touch(mode=0o600)
        keys.write_text(json.dumps({"keys": [{"name": key, "key": f"{key}-secret"} for key in KEYS]}))
        split = ("--num-shard", str(2 // stages), "--pipeline-parallel", str(stages), "--max-deaths", "100000")
        with Server("--dtype", "float32", "--api-keys-file", str(keys), *split, *flags) as server:
            seen, outages = asyncio.run(survive(server, args.times, random.Random(args.seed)))
            is_up = server.process.poll() is None
    report = {
        "orders": args.times,
        "stages": stages,
        "answers": seen.answers,
        "asked again": seen.asked_again,
        "failures": len(seen.failures),
        "by kind": Counter(failure.split(":")[0] for failure in seen.failures),
        "the first": seen.failures[:5],
        "outage p50, max, s": [round(outages[len(outages) // 2], 1), round(outages[-1], 1)],
        "server is up": is_up,
    }
    print(json.dumps(report, indent=1))
    return 1 if seen.failures or not is_up else 0


if __name__ == "__main__":
    sys.exit(main())
