"""One row of `simulate`: a load under one setting, run through a fleet, or through fleets until one is large enough.

The smallest fleet that keeps up is found by doubling sizes until one is enough, and then halving between that and the
last that was not; which sizes are tried depends on the load alone, and so does what is found.

A run that is too short, or whose queue grows, says how far a backlog has got, and not what a fleet can do. So a run is
judged by what its arrivals find outstanding, which for arrivals at random is the mean over time (Wolff 1982): behind a
first quarter, in which the fleet fills, means of equal stretches must lie on a level line. Left out: how long a run
has to be for a percentile to be exact.
"""

from __future__ import annotations

import argparse
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmark.fleet import traffic
from benchmark.fleet.fleet import LEAST_REQUESTS, Fleet, Pool, conditions_of, least_replicas, prefixed
from benchmark.fleet.prediction import figures, times
from benchmark.fleet.replica import Tally
from benchmark.fleet.traffic import NEVER, Case, OpenLoop, Request, Traffic
from benchmark.result import BenchError
from benchmark.terminal import Progress

REPLICAS = "replicas"
REQUESTS_PER_REPLICA = 1000  # so that the beginning and the end of a run, which are unlike the rest, weigh little
MOST_PER_REPLICA = 5_000  # requests, until which it must be clear whether the fleet keeps up


@dataclass(frozen=True)
class Setting:
    """The values of one combination, and the pools that so many replicas make."""

    values: Mapping[str, Any]
    pools: Callable[[int], Sequence[Pool]]


@dataclass(frozen=True)
class Run:
    """Runs one load. trace: in place of a load that is drawn."""

    args: argparse.Namespace
    case: Case
    trace: Sequence[Request] | None

    def row(self, setting: Setting, view: Progress) -> dict[str, Any]:
        """The row under one setting, or that of the fewest replicas that keep the objectives. Raises BenchError."""
        if self.args.fewest_replicas is None:
            pools = setting.pools(setting.values[REPLICAS])
            count = self.num_requests(sum(pool.num_replicas for pool in pools))
            tally, verdict = self._run(pools, count, view.advance, until_clear=False)
            if not tally.e2e:
                raise BenchError(
                    f"none of {tally.num_requests} requests was answered, {tally.num_refused} were refused: give more "
                    "--replicas or a larger --max-concurrent-requests"
                )
            return self._row(setting, pools, tally, verdict)
        least = least_replicas(self.args)
        share = 1 / num_runs(least, self.args.fewest_replicas)

        def with_replicas(count: int) -> Trial:
            trial = self._trial({**setting.values, REPLICAS: count}, setting)
            view.advance(share)
            print(f"{REPLICAS} {count}: {trial.problem or 'enough'}", file=sys.stderr)
            return trial

        return fewest_replicas(with_replicas, least, self.args.fewest_replicas, self._objectives)

    def num_requests(self, num_replicas: int) -> int:
        """How many requests a run has, where it does not go on until something is clear."""
        if self.trace is not None:
            return len(self.trace)
        return self.case.num_requests or REQUESTS_PER_REPLICA * num_replicas

    @property
    def _objectives(self) -> Objectives:
        return self.args.ttft_objective, self.args.tpot_objective

    def _trial(self, values: Mapping[str, Any], setting: Setting) -> Trial:
        """A fleet of so many replicas under the load, until it is clear whether it keeps up."""
        pools = setting.pools(values[REPLICAS])
        most = len(self.trace) if self.trace else self.case.num_requests or MOST_PER_REPLICA * values[REPLICAS]
        tally, verdict = self._run(pools, most, lambda share: None, until_clear=self.trace is None)
        if not tally.e2e:
            return Trial({}, "none of its requests was answered")
        row = self._row(Setting(values, setting.pools), pools, tally, verdict)
        if missed := missed_objectives(row, self._objectives):
            return Trial(row, missed if verdict.word == OPEN else self._overload(verdict) or missed)
        overload = self._overload(verdict)
        if overload and verdict.word == OPEN and self.case.num_requests:
            raise BenchError(f"of {values[REPLICAS]} replicas, {overload}: leave --num-requests out, or raise it")
        return Trial(row, overload)

    def _overload(self, verdict: Verdict) -> str:
        """Why a run shows no capacity. A trace is what it is: that its load changes says nothing of the fleet."""
        is_whole = self.trace is not None and verdict.num_requests >= LEAST_REQUESTS and verdict.word == OPEN
        return "" if is_whole else verdict.problem

    def _run(
        self, pools: Sequence[Pool], count: int, advance: Callable[[float], None], *, until_clear: bool
    ) -> tuple[Tally, Verdict]:
        args = self.args
        if self.trace is not None:
            drawn: traffic.Traffic = OpenLoop(iter(self.trace))
        elif until_clear:
            drawn = traffic.in_blocks(self.case, args, count)
        else:
            drawn = traffic.draw(self.case, args, count)
        tally = Tally()

        def is_missed() -> bool:
            return bool(missed_objectives(times(tally), self._objectives))

        watched = Watched(prefixed(drawn, args), count, advance, is_missed if until_clear else None)
        Fleet(watched, pools, conditions_of(args), args.dispatch, tally).run()
        return tally, watched.verdict

    def _row(self, setting: Setting, pools: Sequence[Pool], tally: Tally, verdict: Verdict) -> dict[str, Any]:
        """What the row is about, the limits, and the figures."""
        limits = pools[0].limits
        settled = {name: getattr(limits, name, value) for name, value in setting.values.items()}
        found = figures(tally, sum(pool.num_replicas for pool in pools), self._objectives)
        return {**traffic.about(self.case), "settings": settled, **found, "queue": verdict.word}


# ---------------------------------------------------------------------------------------------------------------- sizes


OBJECTIVES = ("TTFT", "TPOT")
Objectives = tuple[float | None, float | None]  # of TTFT and TPOT in ms, at p99; None: any


@dataclass(frozen=True)
class Trial:
    """A fleet under the load. problem: why it is too small, for people; empty where it is not."""

    row: Mapping[str, Any]
    problem: str


def missed_objectives(row: Mapping[str, Any], objectives: Objectives) -> str:
    """Which objectives a row does not keep at p99, for people; empty where it keeps them."""
    pairs = ((name, row[f"{name.lower()}_ms"], most) for name, most in zip(OBJECTIVES, objectives, strict=True))
    found = ((name, (times or {"p99": 0.0})["p99"], most) for name, times, most in pairs if most is not None)
    return ", ".join(f"{name} p99 {p99:.0f} ms" for name, p99, most in found if p99 > most)


def num_runs(least: int, most: int) -> int:
    """How many fleets are tried at most."""
    doublings = ((most - 1) // least).bit_length()
    return 1 + 2 * doublings


def fewest_replicas(simulate: Callable[[int], Trial], least: int, most: int, objectives: Objectives) -> dict[str, Any]:
    """The row of the fewest replicas, at least `least`, that are enough, with all that were tried.

    Raises BenchError where `most` are not.
    """
    tried: dict[int, Trial] = {}

    def is_enough(count: int) -> bool:
        tried[count] = simulate(count)
        return not tried[count].problem

    high = least
    while not is_enough(high):
        if high >= most:
            raise BenchError(f"a fleet of {high} does not keep {wanted(objectives)}: {tried[high].problem}; {REMEDY}")
        high *= 2
    low = high // 2 + 1 if high > least else high
    while low < high:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle + 1
    if high > most:
        raise BenchError(f"{wanted(objectives)} need {high} replicas: {REMEDY}")
    return {**tried[high].row, "tried": {str(count): trial.problem for count, trial in sorted(tried.items())}}


REMEDY = "raise --fewest-replicas or the objectives"


def wanted(objectives: Objectives) -> str:
    """The objectives, for people."""
    return " and ".join(f"{name} p99 <= {ms:g} ms" for name, ms in zip(OBJECTIVES, objectives, strict=True) if ms)


# ----------------------------------------------------------------------------------------------------------- steadiness


STEADY, GROWS, OPEN, REFUSES = "steady", "grows", "open", "refuses"
STRETCHES = 10  # whose means are compared
FILLING = 0.25  # of the run, in which the fleet fills
LEAST_ROUNDS = 10  # requests for each that is outstanding: as many times as long as a request takes
LEVEL = 0.25  # drift over the stretches, as a share of their mean, below which a run is steady, its error included
RISING = 0.5  # and above which it grows; a queue that grows from the start has 1.2


@dataclass(frozen=True)
class Verdict:
    """What a run's arrivals have found. word: one of the above; `open` where more of them are needed."""

    word: str
    num_requests: int
    first: float = 0.0  # outstanding, mean of the first stretch behind the filling …
    last: float = 0.0  # … and of the last

    @property
    def problem(self) -> str:
        """Why the run shows no capacity, for people; empty where it does."""
        if self.word == STEADY:
            return ""
        if self.word == REFUSES:
            return "a request was refused"
        if self.word == GROWS:
            return f"the queue grows, from {self.first:.0f} requests outstanding to {self.last:.0f}"
        went = f"{self.first:.0f} requests outstanding to {self.last:.0f}"
        return f"{self.num_requests} requests are too few to tell whether the queue grows, which went from {went}"


def judged(outstanding: array[int]) -> Verdict:
    """From what each arrival found outstanding, in their order. Drift is that of a straight line, with 2 σ of it."""
    count = len(outstanding)
    seen = np.asarray(outstanding)[int(FILLING * count) :]
    if len(seen) < STRETCHES:
        return Verdict(OPEN, count)
    means = np.array([part.mean() for part in np.array_split(seen, STRETCHES)])
    first, last, mean = float(means[0]), float(means[-1]), float(means.mean())
    at = np.arange(STRETCHES) - (STRETCHES - 1) / 2
    slope = float(at @ means / (at @ at))
    rest = means - mean - slope * at
    error = STRETCHES * float(np.sqrt(rest @ rest / (STRETCHES - 2) / (at @ at)))
    drift, level = STRETCHES * slope, max(mean, 1.0)
    word = OPEN
    if count >= max(LEAST_REQUESTS, LEAST_ROUNDS * first) and drift - 2 * error > RISING * level:
        word = GROWS  # and has filled before
    elif count >= max(LEAST_REQUESTS, LEAST_ROUNDS * mean) and abs(drift) + 2 * error <= LEVEL * level:
        word = STEADY
    return Verdict(word, count, first, last)


class Watched:
    """Traffic of which is noted what each request finds outstanding; each hundredth of it is told to somebody.

    is_missed: whether what was answered so far keeps no objectives. Where it is given, no more requests come once it is
    clear whether the fleet is large enough, which it is not where one was refused or they are missed.
    """

    def __init__(
        self,
        traffic: Traffic,
        count: int,
        advance: Callable[[float], None],
        is_missed: Callable[[], bool] | None = None,
    ) -> None:
        self._traffic = traffic
        self._advance = advance
        self._is_missed = is_missed
        self._count, self._each = count, max(1, count // 100)
        self._over = 0
        self._outstanding = 0
        self._seen: array[int] = array("q")
        self._next_look = LEAST_REQUESTS
        self._is_clear = self._has_refused = False

    def next_at(self) -> float:
        """When the next request comes, in virtual seconds; NEVER when none is due."""
        return NEVER if self._is_clear else self._traffic.next_at()

    def take(self) -> Request:
        """The next request, which `next_at` has announced."""
        self._seen.append(self._outstanding)
        self._outstanding += 1
        if self._is_missed is not None and len(self._seen) >= self._next_look:
            self._is_clear = self.verdict.word != OPEN or self._is_missed()
            self._next_look += self._next_look // 2
        return self._traffic.take()

    def ended(self, now: float) -> None:
        """Note that a request was answered at `now`."""
        self._traffic.ended(now)
        self._one_over()

    def refused(self, now: float) -> None:
        """Note that a request was refused at `now`."""
        self._traffic.refused(now)
        self._has_refused = True
        self._is_clear = self._is_missed is not None
        self._one_over()

    @property
    def verdict(self) -> Verdict:
        """Of all that came so far."""
        return Verdict(REFUSES, len(self._seen)) if self._has_refused else judged(self._seen)

    def _one_over(self) -> None:
        self._outstanding -= 1
        self._over += 1
        if self._over % self._each == 0:
            self._advance(self._each / self._count)
