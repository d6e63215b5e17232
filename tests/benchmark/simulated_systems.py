"""Systems whose true ratio is known, measured again and again: how often `compare` errs, and what it finds.

`python -m tests.benchmark.simulated_systems` prints the tables of docs/results/benchmarks.md. A start is 3 %
faster or slower than its system, in deviations, and every request 10 % than its start. What is compared goes through
the rows of `serving`; no server, no clock.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmark.commands.compare import DIFFERS, RESULT_COLUMNS, Figure, Row, between_starts, figure_of
from benchmark.result import table
from benchmark.serving.datasets import Lengths
from benchmark.serving.http_client import Reply
from benchmark.serving.outcomes import Load, Objectives, Outcome, row_of

METRICS = {metric.key: metric for metric in RESULT_COLUMNS["serving"].metrics}
STARTS = 5  # what docs/benchmarking.md recommends: starts of either system,
REQUESTS = 1000  # requests of each in a closed loop,
OPEN_REQUESTS = 5000  # and in an open one
BETWEEN_STARTS = 0.03  # standard deviation of the logarithm of a start's speed
BETWEEN_REQUESTS = 0.1  # and of a request's, within its start
STREAMS = 16
TOKENS_OF_AN_EVENT = 4
Floats = np.ndarray[Any, np.dtype[np.float64]]
Random = np.random.Generator


@dataclass(frozen=True)
class Queue:
    """An open loop at one server, M/M/1: mean times from arrival to end."""

    load: float  # of the base's server
    same_work: bool = True  # the same arrivals and sizes for all starts of both systems, as `compare` demands
    metric: str = "e2e_ms"

    def pairs(self, count: int, starts: int, requests: int, slower: float, spread: float, seed: int) -> list[Pair]:
        """Rows of `count` pairs, of which the other is `slower` times as slow."""
        random, shape = np.random.default_rng(seed), (count, 2, starts)
        work = (count, 1, 1) if self.same_work else shape
        paces = np.exp(random.normal(0.0, spread, shape)) * np.array([1.0, slower])[:, None]
        waited, times = np.zeros(shape), np.empty((requests, *shape))
        for one in times:
            needed = self.load * paces * random.exponential(size=work)
            needed = needed * np.exp(random.normal(0.0, BETWEEN_REQUESTS, shape))
            one[...] = waited + needed
            waited = np.maximum(0.0, one - random.exponential(size=work))
        return [tuple([_row(times[:, p, s, k]) for k in range(starts)] for s in (0, 1)) for p in range(count)]


@dataclass(frozen=True)
class Streams:
    """A closed loop of 16 streams whose tokens come four at a time, and never wait for each other."""

    metric: str = "output_tokens_per_second"

    def pairs(self, count: int, starts: int, requests: int, slower: float, spread: float, seed: int) -> list[Pair]:
        """Rows of `count` pairs, of which the other is `slower` times as slow."""
        random, found = np.random.default_rng(seed), []
        for _ in range(count):
            tokens = TOKENS_OF_AN_EVENT * random.integers(1, 4, requests)
            found.append(
                tuple(
                    [_streamed(tokens, pace * np.exp(random.normal(0.0, spread)), random) for _ in range(starts)]
                    for pace in (1.0, slower)
                )
            )
        return found


Pair = tuple[Sequence[Row], ...]  # the rows of the base's starts, and of the other's
System = Queue | Streams


def _row(times: Floats) -> Row:
    return {"e2e_ms": {"mean": float(times.mean())}, "samples": {"e2e_ms": times}}


def _streamed(tokens: Floats, pace: float, random: Random) -> Row:
    free, outcomes = [0.0] * STREAMS, []
    paces = pace * np.exp(random.normal(0.0, BETWEEN_REQUESTS, len(tokens)))
    for wanted, own in zip(tokens.tolist(), paces.tolist(), strict=True):
        began = heapq.heappop(free)
        times = [began + own * (k + 1) for k in range(wanted // TOKENS_OF_AN_EVENT)]
        heapq.heappush(free, times[-1])
        outcomes.append(Outcome(Lengths(8, wanted), began, Reply(began, times[-1], times, wanted)))
    return row_of(Lengths(8, 8), Load(concurrency=STREAMS), outcomes, Objectives())


def figures(
    system: System,
    count: int,
    *,
    starts: int = STARTS,
    requests: int = REQUESTS,
    slower: float = 1.0,
    spread: float = BETWEEN_STARTS,
    seed: int = 1,
) -> list[Figure]:
    """What `compare` says of the other system of each pair."""
    pairs = system.pairs(count, starts, requests, slower, spread, seed)
    return [figure_of(METRICS[system.metric], *pair) for pair in pairs]


def share(found: Sequence[Figure], holds: Callable[[Figure], bool]) -> float:
    """Of how many figures something holds."""
    return sum(map(holds, found)) / len(found)


def differs(figure: Figure) -> bool:
    """Whether the systems are said to differ."""
    return figure.verdict == DIFFERS


# --------------------------------------------------------------------------------------------------------- tables


def between_table(count: int) -> str:
    """Systems with the recommended number of starts: how many differ, where they are equal and where one is slower."""
    queues = [(f"queue, load {load:g}, same work", Queue(load), REQUESTS) for load in (0.5, 0.8, 0.9)]
    queues += [
        (f"queue, load {load:g}, other work in every start", Queue(load, same_work=False), requests)
        for load in (0.5, 0.8, 0.9)
        for requests in (REQUESTS, OPEN_REQUESTS)
    ]
    cells = []
    for name, system, requests in [*queues, ("16 streams", Streams(), 150)]:
        found = [figures(system, count, requests=requests, slower=slower) for slower in (1.0, 1.1)]
        cells.append([name, requests, *(_percent(share(one, differs)) for one in found)])
        print(f"{name}, {requests} requests", file=sys.stderr)
    return table(("System", "Requests", "Equal, said to differ (%)", "A tenth slower, found (%)"), cells)


def starts_table(count: int) -> str:
    """How many starts find a tenth in 80 of 100 pairs, by how far starts lie apart."""
    cells = []
    for spread in (0.01, 0.02, 0.03, 0.05, 0.08):
        for starts in range(2, 30):
            random = np.random.default_rng(starts)
            logs = random.normal(0.0, spread, (2, count, starts))
            lows = [between_starts(*np.exp(pair)).low for pair in zip(logs[0], logs[1] + np.log(1.1), strict=True)]
            if (found := sum(low > 1 for low in lows) / count) >= 0.8:
                cells.append([_percent(spread), starts, _percent(found)])
                break
    return table(("Between starts (%)", "Starts of either", "Found (%)"), cells)


def _percent(part: float) -> str:
    return f"{100 * part:.1f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=500)
    for made in (between_table, starts_table):
        print(made(parser.parse_args().pairs), flush=True)
        print()
