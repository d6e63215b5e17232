"""Whether a fleet keeps up with its load: how many requests it has outstanding, from one stretch of a run to the next.

A run that is too short, or whose queue grows, says how far a backlog has got, and not what a fleet can do. So a run is
judged by what its arrivals find outstanding, which for arrivals at random is the mean over time (Wolff 1982): behind a
first quarter, in which the fleet fills, means of equal stretches must lie on a level line. Left out: how long a run
has to be for a percentile to be exact.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmark.traffic import NEVER, Request, Traffic

STEADY, GROWS, OPEN, REFUSES = "steady", "grows", "open", "refuses"
STRETCHES = 10  # whose means are compared
FILLING = 0.25  # of the run, in which the fleet fills
LEAST_REQUESTS = 2000  # of which a p99 leaves 20
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
