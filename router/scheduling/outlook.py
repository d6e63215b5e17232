"""What the running sequences will take of the KV cache at most, if each ends where it is expected to.

Sequences grow by a token with each step and give everything back at their ends, so the most that they take together
is at one of these ends, and it is less than the sum of their lengths: some are gone before others are long. What is
admitted as long as that peak fits (Gong et al. 2025, "Past-Future Scheduler", arXiv 2507.10150) keeps the cache full
without running out of it. A sequence's tokens less the time are the same from step to step, and so is the peak: it
changes only when a sequence comes, leaves, or is expected to end elsewhere.

Time is in steps. Plain arithmetic: nothing here knows a request.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate, count
from operator import add, mul
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K")


class Course(NamedTuple):
    """How a sequence goes on: it ends at the time `end`, and until then has `base` more tokens than steps were made."""

    end: float
    base: float


class Outlook(Generic[K]):
    """The courses of the sequences that run."""

    def __init__(self) -> None:
        self.now = 0.0
        self.version = 0  # another one whenever a sequence has come or left
        self._courses: dict[K, Course] = {}
        self._ends: list[float] = []  # ascending …
        self._bases: list[float] = []  # … and the base of each

    def course(self, tokens: int, left: int) -> Course:
        """That of a sequence with so many tokens, of which so many more are expected."""
        return Course(self.now + left, tokens - self.now)

    def set(self, key: K, course: Course) -> None:
        """The sequence with this name goes on so from now on."""
        if (before := self._courses.get(key)) is None:
            self.version += 1
        else:
            _take(self._ends, self._bases, before)
        self._courses[key] = course
        _insert(self._ends, self._bases, course)

    def remove(self, key: K) -> None:
        """It has left, if it was there."""
        if (course := self._courses.pop(key, None)) is not None:
            self.version += 1
            _take(self._ends, self._bases, course)

    def overdue(self) -> list[K]:
        """Those that should have ended by now: they made fewer steps than there were."""
        if not self._ends or self._ends[0] > self.now:
            return []
        return [key for key, course in self._courses.items() if course.end <= self.now]

    def peak(self, joining: Sequence[Course] = (), leaving: Collection[K] = ()) -> float:
        """The most tokens that there will be at once, with and without these."""
        ends, bases = self._ends, self._bases
        if joining or leaving:
            ends, bases = ends.copy(), bases.copy()
            for key in leaving:
                _take(ends, bases, self._courses[key])
            for course in joining:
                _insert(ends, bases, course)
        grown = map(mul, count(1), reversed(ends))  # by those that have not ended before each end, the latest first
        return max(map(add, accumulate(reversed(bases)), grown), default=0.0)


def _insert(ends: list[float], bases: list[float], course: Course) -> None:
    place = bisect_right(ends, course.end)
    ends.insert(place, course.end)
    bases.insert(place, course.base)


def _take(ends: list[float], bases: list[float], course: Course) -> None:
    place = bases.index(course.base, bisect_left(ends, course.end))
    del ends[place], bases[place]
