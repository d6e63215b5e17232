"""A server under more than it can do: an open loop at three times its capacity, and what comes of it.

`python -m tests.system.overload [--seconds 60] [--times 3] [--rounds 2] [-- LAUNCHER FLAGS]` starts a server, estimates
its capacity in a closed loop of `--streams` streams, and then sends requests at random moments (Poisson), each over a
connection of its own, whatever becomes of the others: in turns at the capacity and at `--times` as many a second. It
reports the tokens a second of requests that were answered to their end, at both rates; how long refused ones waited for
their 429; all other outcomes; and the router's memory. The last line is JSON. Figures are in docs/results/router.md.

The peak is that of an open loop, because there requests come one by one; a closed loop's come together, and so do their
prompts, which is cheaper.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean, median

import uvloop

from benchmark.serving.http_client import HttpClient, Reply, TgiApi
from tests.running import Server
from tests.system.router_cost import cpu_seconds

RAMP_S = 10.0  # until the batch and the queue are full; not counted
PAGE_KB = 4


@dataclass
class Load:
    """Requests that were sent from `start` to `stop`, and what the server took."""

    replies: list[Reply]
    start: float
    stop: float
    memory_kb: list[int]  # the router's, once a second
    cpu_s: float  # of all processes of the server, after the ramp
    router_cpu_s: float  # of which the router's

    @property
    def tokens_per_second(self) -> float:
        """Of requests that were answered to their end, after the ramp."""
        return self._num_tokens / (self.stop - self.start - RAMP_S)

    @property
    def tokens_per_cpu_second(self) -> float:
        """The same for each second of the server's CPU time, which other work on the machine touches less."""
        return self._num_tokens / self.cpu_s

    @property
    def mean_length(self) -> float:
        """Tokens of an answer; a model may end it early."""
        return mean(len(reply.token_times) for reply in self.replies if reply.error is None)

    @property
    def _num_tokens(self) -> int:
        since = self.start + RAMP_S
        good = [reply for reply in self.replies if reply.error is None]
        return sum(since <= at < self.stop for reply in good for at in reply.token_times)

    def latencies_ms(self, error: str) -> list[float]:
        """Of replies with this error, in ascending order."""
        return sorted(1000 * (reply.ended_at - reply.sent_at) for reply in self.replies if reply.error == error)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="of each load")
    parser.add_argument("--rounds", type=int, default=2, help="of both open loops")
    parser.add_argument("--streams", type=int, default=128, help="of the closed loop")
    parser.add_argument("--times", type=float, default=3, help="the capacity")
    parser.add_argument("--prompt", default="Once upon a time there was a little fox")
    parser.add_argument("--output-length", type=int, default=100, help="tokens")
    parser.add_argument("flags", nargs="*", help="of the launcher")
    args = parser.parse_args(argv)
    with Server(*args.flags) as server:
        uvloop.run(measure(args, server))


async def measure(args: argparse.Namespace, server: Server) -> None:
    """The closed loop, then both rates in turns."""
    client = Client(server, args.prompt, args.output_length)
    closed = await client.closed_loop(args.streams, args.seconds)
    capacity = closed.tokens_per_second / closed.mean_length
    print(f"closed loop: {closed.tokens_per_second:.0f} tokens/s, {capacity:.2f} requests/s", flush=True)
    peaks, loads = [], []
    for _ in range(args.rounds):
        for times, found in ((1.0, peaks), (args.times, loads)):
            found.append(await client.open_loop(times * capacity, args.seconds))
            rate, efficiency = found[-1].tokens_per_second, found[-1].tokens_per_cpu_second
            share = found[-1].router_cpu_s / found[-1].cpu_s
            print(
                f"{times:g} times: {rate:.0f} tokens/s, {efficiency:.0f} tokens a CPU second, of which the router "
                f"took {share:.0%}",
                flush=True,
            )
    refused = sorted(wait for load in loads for wait in load.latencies_ms("429"))
    peak, goodput = (median(load.tokens_per_second for load in found) for found in (peaks, loads))
    memory = [kb for load in (*peaks, *loads) for kb in load.memory_kb]
    figures = {
        "closed_tokens_per_second": round(closed.tokens_per_second, 1),
        "peak_tokens_per_second": round(peak, 1),
        "goodput_tokens_per_second": round(goodput, 1),
        "goodput_share": round(goodput / peak, 3),
        "goodput_share_by_cpu_time": round(
            median(load.tokens_per_cpu_second for load in loads) / median(p.tokens_per_cpu_second for p in peaks), 3
        ),
        "requests_per_second": round(sum(len(load.replies) for load in loads) / (args.rounds * args.seconds), 1),
        "outcomes": dict(Counter(reply.error or "ok" for load in loads for reply in load.replies)),
        "refusal_ms": {f"p{p}": round(percentile(refused, p), 1) for p in (50, 90, 99)} if refused else None,
        "router_mb": {"least": round(min(memory) / 1024, 1), "most": round(max(memory) / 1024, 1)},
    }
    for name, value in figures.items():
        print(f"{name}: {value}")
    print(json.dumps(figures))


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank of sorted values."""
    return values[max(0, math.ceil(len(values) * percent / 100) - 1)]


class Client:
    """Sends the same request again and again."""

    def __init__(self, server: Server, prompt: str, output_length: int) -> None:
        self._http = HttpClient(server.url, timeout_s=600)
        self._api = TgiApi()
        self._prompt = prompt
        self._output_length = output_length
        self._server = server
        self._router = server.router()

    async def _send(self, replies: list[Reply]) -> None:
        replies.append(await self._http.stream(self._api, self._prompt, self._output_length))

    async def closed_loop(self, streams: int, seconds: float) -> Load:
        """Each stream sends when its last request was answered."""
        replies: list[Reply] = []
        start = time.perf_counter()

        async def stream() -> None:
            while time.perf_counter() < start + seconds:
                await self._send(replies)

        watching = asyncio.create_task(self._watch(seconds))
        await asyncio.gather(*(stream() for _ in range(streams)))
        return Load(replies, start, start + seconds, *await watching)

    async def open_loop(self, rate: float, seconds: float) -> Load:
        """Requests at random moments, and then wait for the last answers."""
        random, replies = Random(0), list[Reply]()
        watching = asyncio.create_task(self._watch(seconds))
        start = at = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            while (at := at + random.expovariate(rate)) < start + seconds:
                await asyncio.sleep(at - time.perf_counter())
                tasks.create_task(self._send(replies))
        return Load(replies, start, start + seconds, *await watching)

    async def _watch(self, seconds: float) -> tuple[list[int], float, float]:
        """The router's memory once a second, and the CPU time of all processes and of the router, after the ramp."""
        found = []
        await asyncio.sleep(RAMP_S)
        before = self._cpu_s()
        for _ in range(int(seconds - RAMP_S)):
            found.append(int(Path(f"/proc/{self._router}/statm").read_text().split()[1]) * PAGE_KB)
            await asyncio.sleep(1)
        after = self._cpu_s()
        return found, after[0] - before[0], after[1] - before[1]

    def _cpu_s(self) -> tuple[float, float]:
        return sum(map(cpu_seconds, self._server.children())), cpu_seconds(self._router)


if __name__ == "__main__":
    main()
