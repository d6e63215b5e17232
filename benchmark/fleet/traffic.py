"""Which requests a simulated fleet gets, and when: the cases of a run, arrival times, traces, open and closed loops.

Lengths and Poisson times are drawn as `serving/workload.py` draws them, from a seed of the same form, so that the same
seed is the same work. Prompts are lengths only. What becomes of the requests is not here but in `fleet.py`.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Protocol

from benchmark.serving import workload
from benchmark.serving.datasets import BLOCK_TOKENS, Lengths, traced_requests
from benchmark.serving.outcomes import Load, loads

NEVER = math.inf
BLOCK = 1000  # requests that are drawn together where nobody knows how many there will be
REFUSAL_SECONDS = 0.005  # from a request to its refusal at the client: a round trip and some HTTP


class Request(NamedTuple):
    """What a client asks for, and what it will get."""

    arrives_at: float  # seconds; 0 in a closed loop, which sends when a stream is free
    input_length: int
    output_length: int
    max_new_tokens: int  # asked for and reserved; above output_length where an end token comes first
    hashes: tuple[int, ...] = ()  # what it begins with: a name for each `hash_tokens` of them, in order …
    hash_tokens: int = 0  # … where each name also stands for all before it


@dataclass(frozen=True)
class Case:
    """One load with its lengths: what a row is about, whatever the settings."""

    mean: Lengths
    distribution: str  # of workload.DISTRIBUTIONS, a file of lengths, or "trace"
    load: Load | None  # None: a trace, which has its own times
    num_requests: int


# ---------------------------------------------------------------------------------------------------------------- cases


def cases(args: argparse.Namespace, trace: Sequence[Request] | None) -> list[Case]:
    """The work that the arguments ask for: a trace, or every load with every pair of lengths."""
    if trace is not None:
        lengths = [Lengths(one.input_length, one.output_length) for one in trace]
        return [Case(workload.mean_lengths(lengths), "trace", None, len(trace))]
    kind = args.length_distribution
    if kind in workload.DISTRIBUTIONS:
        means = [Lengths(*pair) for pair in product(args.input_length, args.output_length)]
    else:
        means = [workload.mean_lengths(workload.read_lengths(Path(kind)))]
    wanted = product(means, loads(args.concurrency, args.request_rate))
    return [Case(mean, kind, load, args.num_requests or 0) for mean, load in wanted]


def cases_of(serving: Mapping[str, Any]) -> list[Case]:
    """The loads and lengths of a serving run, row by row."""
    return [
        Case(
            Lengths(row["input_length"], row["output_length"]),
            row["length_distribution"],
            Load(row["concurrency"], row["request_rate"]),
            row["requests"],
        )
        for row in serving["rows"]
    ]


def about(case: Case) -> dict[str, Any]:
    """What a row says of its work."""
    return {
        "input_length": case.mean.input_length,
        "output_length": case.mean.output_length,
        "length_distribution": case.distribution,
        "concurrency": case.load and case.load.concurrency,
        "request_rate": case.load and case.load.request_rate,
    }


def longest(cases: Sequence[Case], trace: Sequence[Request] | None) -> tuple[int, int]:
    """Longest prompt and answer, as `serving` sets up a server for them."""
    if trace is not None:
        return max(one.input_length for one in trace), max(one.max_new_tokens for one in trace)
    found = workload.longest_drawn(cases[0].distribution, workload.longest_of([case.mean for case in cases]))
    return found.input_length, found.output_length


# ------------------------------------------------------------------------------------------------------------- arrivals


def draw(case: Case, args: argparse.Namespace, count: int) -> Traffic:
    """The requests of a row, drawn from one seed in the order in which `serving` draws them, so that the same seed is
    the same work where its warm-ups draw nothing before."""
    return _sent(case, _drawn(case, args, count, f"{args.seed} {case.mean} {case.load}"))


def in_blocks(case: Case, args: argparse.Namespace, most: int) -> Traffic:
    """The same load, of as many requests as are taken, `most` at most: how many that are changes none of them."""

    def requests() -> Iterator[Request]:
        before = 0.0
        for block in itertools.count():
            last = 0.0
            for one in _drawn(case, args, BLOCK, f"{args.seed} {case.mean} {case.load}, block {block}"):
                last = one.arrives_at
                yield one._replace(arrives_at=before + last)
            before += last

    return _sent(case, islice(requests(), most))


def _sent(case: Case, requests: Iterator[Request]) -> Traffic:
    assert case.load is not None, "a trace is its own traffic"
    return OpenLoop(requests) if case.load.concurrency is None else ClosedLoop(requests, case.load.concurrency)


def _drawn(case: Case, args: argparse.Namespace, count: int, seed: str) -> Iterator[Request]:
    assert case.load is not None, "a trace is its own traffic"
    random = Random(seed)
    if case.distribution in workload.DISTRIBUTIONS:
        lengths = workload.draw_lengths(case.distribution, case.mean, count, random)
    else:
        lengths = random.choices(workload.read_lengths(Path(case.distribution)), k=count)
    rate = case.load.request_rate
    load = replace(case.load, burstiness=args.burstiness)
    times = [0.0] * count if rate is None else workload.arrival_times(load, count, None, random)
    asked = args.max_new_tokens or 0
    return (
        Request(at, one.input_length, one.output_length, max(one.output_length, asked))
        for at, one in zip(times, lengths, strict=True)
    )


# --------------------------------------------------------------------------------------------------------------- traces


def read_trace(path: Path) -> list[Request]:
    """The requests of a trace in the order of their arrival. Raises BenchError that names the line."""
    return [
        Request(
            one.arrives_s,
            one.lengths.input_length,
            one.lengths.output_length,
            one.max_new_tokens or one.lengths.output_length,
            tuple(one.blocks),
            BLOCK_TOKENS if one.blocks else 0,
        )
        for one in traced_requests(path)
    ]


# ---------------------------------------------------------------------------------------------------------------- loops


class Traffic(Protocol):
    """Where a simulation gets its requests from, and when."""

    def next_at(self) -> float:
        """When the next request comes, in virtual seconds; NEVER when none is due."""

    def take(self) -> Request:
        """The next request, which `next_at` has announced."""

    def ended(self, now: float) -> None:
        """Note that a request was answered at `now`."""

    def refused(self, now: float) -> None:
        """Note that a request was refused at `now`."""


class OpenLoop:
    """Requests that come at their own times, in ascending order, whatever became of the others."""

    def __init__(self, requests: Iterator[Request]) -> None:
        self._requests = requests
        self._next = next(requests, None)

    def next_at(self) -> float:
        """When the next request comes, in virtual seconds; NEVER when none is due."""
        return NEVER if self._next is None else self._next.arrives_at

    def take(self) -> Request:
        """The next request, which `next_at` has announced."""
        taken, self._next = self._next, next(self._requests, None)
        assert taken is not None, "next_at has said that there is one"
        return taken

    def ended(self, now: float) -> None:
        """Nothing follows from it: the next request comes at its own time."""

    def refused(self, now: float) -> None:
        """Nothing follows from it either."""


class ClosedLoop:
    """Streams that each send the next request as soon as their last one has ended.

    A stream that is refused sends its next request when the refusal has reached it.
    """

    def __init__(self, requests: Iterator[Request], concurrency: int, refusal_s: float = REFUSAL_SECONDS) -> None:
        self._requests = requests
        self._next = next(requests, None)
        self._free = [0.0] * concurrency  # a heap: since when each idle stream is, or from when on
        self._refusal_s = refusal_s

    def next_at(self) -> float:
        """When the next request comes, in virtual seconds; NEVER when none is due."""
        return self._free[0] if self._free and self._next is not None else NEVER

    def take(self) -> Request:
        """The next request, which `next_at` has announced."""
        taken, self._next = self._next, next(self._requests, None)
        assert taken is not None, "next_at has said that there is one"
        return taken._replace(arrives_at=heapq.heappop(self._free))

    def ended(self, now: float) -> None:
        """The stream of the request that ended may send again from `now` on."""
        heapq.heappush(self._free, now)

    def refused(self, now: float) -> None:
        """The stream may send again when its client knows."""
        heapq.heappush(self._free, now + self._refusal_s)
