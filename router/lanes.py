"""Micro-batches of a model that is cut into pipeline stages: lanes, which take turns.

While one stage computes the step of one lane, the next stage computes that of another. A sequence stays in the lane
that admitted it; each lane admits its part of what waits, so that all are about as full. A model that is not cut has
one lane, whose steps follow each other as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic

from router.plan import S, StepPlan

MOST_UNDER_WAY = 2  # steps of a lane: one that is computed, and one that waits for its tokens


class Lane(Generic[S]):
    """One micro-batch."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.size = 0  # sequences in it
        self.under_way = 0  # steps that were planned and not answered
        self.steps_since_admission = 0
        self.before: StepPlan[S] | None = None  # its latest step that was not a repetition
        self.num_repeats = 0  # how many steps may be the same as that one, if nobody comes or leaves before its end

    def repeatable(self) -> StepPlan[S] | None:
        """Its step before, if the next one may be the same: that only decoded, and nobody leaves."""
        if (before := self.before) is None or not self.num_repeats:
            return None
        if any(entry.is_over or entry.cancelled for entry in before.decoding):
            return None
        return before

    def planned(self, plan: StepPlan[S]) -> None:
        """Its next step."""
        self.before, self.num_repeats = plan, plan.num_repeats(self.size)


class Lanes(Generic[S]):
    """All lanes of one scheduler, and whose turn it is."""

    def __init__(self, count: int) -> None:
        self.all: list[Lane[S]] = [Lane(number) for number in range(count)]
        self._turn = 0

    def __len__(self) -> int:
        return len(self.all)

    def turns(self) -> Iterator[Lane[S]]:
        """The lanes that may have another step, in turn. Whose step is taken says so by `taken`."""
        if len(self.all) == 1:  # how many steps it has under way, the batching loop bounds
            yield self.all[0]
            return
        for lane in self.all[self._turn :] + self.all[: self._turn]:
            if lane.under_way < MOST_UNDER_WAY:
                yield lane

    def taken(self, lane: Lane[S]) -> None:
        """A step of this lane is under way: it is the next one's turn."""
        lane.under_way += 1
        self._turn = (lane.number + 1) % len(self.all)

    def answered(self, plan: StepPlan[S]) -> None:
        """The oldest step under way, this one, has been answered."""
        self.all[plan.lane].under_way -= 1

    def places(self, lane: Lane[S], waiting: int) -> int | None:
        """How many may join a lane, of so many that wait, so that all are about as full; None: any number."""
        if len(self.all) == 1:
            return None
        total = waiting + sum(other.size for other in self.all)
        return max(0, -(-total // len(self.all)) - lane.size)

    def restart(self) -> None:
        """The shards have lost everything that was under way."""
        for lane in self.all:
            lane.under_way = 0
