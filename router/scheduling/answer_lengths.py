"""How long an answer is expected to become, learnt from the answers before it.

A request says how many tokens it may get, not how many it will. For each API key and route a `History` counts how many
answers came as far as a length, and how many ended there by themselves: the ratio is the hazard of ending there, and
the product over lengths the share of answers that become longer (Kaplan and Meier 1958). So an answer that was cut off
where its client wanted, and one that still runs, count for what is known of them: they came so far. What has been seen
seldom is filled up by one answer whose end is as likely at any length up to what was asked for, which is all that the
request itself says; so the first requests of a key are expected to need a part of what they ask for.

What is expected is a quantile of the lengths that are still possible. Its level follows how often that was too little
(Gibbs and Candès 2021, arXiv 2106.00170): each answer that outgrows what was expected raises it, each that does not
lowers it a little, until a share of OUTGROWN does. Old answers fade. Plain arithmetic without clock and scheduler.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right

# Lengths in tokens at which answers are counted, four for each doubling: finer than answers of one kind differ.
BOUNDS = tuple(sorted({math.ceil(2 ** (place / 4)) for place in range(4 * 32)}))
MEMORY = 64  # answers that count at each length: with twice as many, each counts half
PRIOR = 1.0  # answers that the request's own word counts as
OUTGROWN = 0.5  # share of the answers that become longer than expected: as many end before, and make room for them
RATE = 0.02  # of the level, for each answer: fifty that are all too long take it from the middle to the end
LEAST_LEVEL, MOST_LEVEL = 0.4, 0.95
MOST_HISTORIES = 4096  # of the keys and routes that were last seen; one takes about 2 KiB


def bound_behind(written: int) -> int:
    """The next length at which an answer of so many tokens is counted."""
    return BOUNDS[bisect_right(BOUNDS, written)]


class History:
    """The answers of one key and route."""

    def __init__(self) -> None:
        self.level = 1 - OUTGROWN
        self._came = array("d", bytes(8 * len(BOUNDS)))  # answers that came as far as the bound before …
        self._ended = array("d", bytes(8 * len(BOUNDS)))  # … and of these, those that ended before this bound

    def expected(self, written: int, most: int) -> int:
        """How long an answer becomes that has so many tokens and may have `most`: more than it has, if it may."""
        if written >= most:
            return most
        goal, longer = 1 - self.level, 1.0
        place, low = bisect_right(BOUNDS, written), written
        while low < most:
            high = min(BOUNDS[place], most)
            width = BOUNDS[place] - (BOUNDS[place - 1] if place else 0)
            share = (high - low) / (most - low)
            hazard = (self._ended[place] * (high - low) / width + PRIOR * share) / (self._came[place] + PRIOR)
            left = longer * (1 - hazard)
            if left <= goal:
                return low + max(1, math.ceil((high - low) * (longer - goal) / (longer - left)))
            longer, low, place = left, high, place + 1
        return most

    def came(self, since: int, written: int) -> None:
        """An answer that had `since` tokens has `written` now."""
        place = bisect_right(BOUNDS, since)
        while BOUNDS[place] <= written:
            place += 1
            self._count(place)

    def began(self) -> None:
        """An answer has begun."""
        self._count(0)

    def _count(self, place: int) -> None:
        if self._came[place] >= MEMORY:
            self._came[place] /= 2
            self._ended[place] /= 2
        self._came[place] += 1

    def ended(self, written: int) -> None:
        """An answer has ended by itself behind so many tokens, of which `came` was told."""
        self._ended[bisect_right(BOUNDS, written)] += 1

    def judged(self, *, was_outgrown: bool) -> None:
        """An answer has become longer than was expected of it, or is over and has not."""
        self.level += RATE * (was_outgrown - OUTGROWN)
        self.level = min(MOST_LEVEL, max(LEAST_LEVEL, self.level))


class AnswerLengths:
    """The history of each key and route."""

    def __init__(self) -> None:
        self._histories: dict[tuple[str, str], History] = {}

    def of(self, owner: str, route: str) -> History:
        """That of this key and route: an empty one where they are new."""
        key = owner, route
        if (history := self._histories.pop(key, None)) is None:
            history = History()
            if len(self._histories) >= MOST_HISTORIES:
                del self._histories[next(iter(self._histories))]
        self._histories[key] = history
        return history
