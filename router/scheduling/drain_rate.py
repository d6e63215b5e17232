"""How quickly requests leave the server, measured, so that a client that is refused learns when to come again.

The rate is that of the last requests that ended, since the server was last idle: of many, or of a few where those went
more quickly, because a server with little to do ends little. Left out: what is still to come of those that run, which
is not known before their end tokens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

WINDOW = 64  # ends: enough to even out answers of unlike lengths, few enough to follow a change of load
FEW = 8  # enough to say how quickly it goes now
LEAST_S, MOST_S = 1, 60  # of an answer: a header in whole seconds, and no client should stay away for ever


class DrainRate:
    """Counts requests that are in the server, and those that end with their longest possible tokens."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_inside = 0
        self._since = 0.0  # the first of `_ends` is counted from here
        self._ends: deque[tuple[float, int]] = deque()

    def began(self) -> None:
        """A request has come in."""
        if not self._num_inside:
            self._since = self._clock()
            self._ends.clear()
        self._num_inside += 1

    def ended(self, tokens: int) -> None:
        """A request that reserved so many tokens is gone."""
        self._num_inside -= 1
        self._ends.append((self._clock(), tokens))
        if len(self._ends) > WINDOW:
            self._since, _ = self._ends.popleft()

    def seconds_for_requests(self, count: int) -> int:
        """Whole seconds until so many requests will have ended, from LEAST_S to MOST_S; LEAST_S if nothing is known."""
        return self._seconds(count, [(at, 1) for at, _ in self._ends])

    def seconds_for_tokens(self, tokens: int) -> int:
        """The same for so many reserved tokens."""
        return self._seconds(tokens, list(self._ends))

    def _seconds(self, wanted: int, ends: Sequence[tuple[float, int]]) -> int:
        """By all of the ends or by the last few, whichever were quicker: some may be of a time with less to do."""
        if not ends:
            return LEAST_S
        spans = [(self._since, ends)]
        if len(ends) > FEW:
            spans.append((ends[-FEW - 1][0], ends[-FEW:]))
        now = self._clock()
        return whole_seconds(min(wanted * (now - since) / sum(amount for _, amount in last) for since, last in spans))


def whole_seconds(seconds: float) -> int:
    """For `Retry-After`."""
    return min(MOST_S, max(LEAST_S, math.ceil(seconds)))
