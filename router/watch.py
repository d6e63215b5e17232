"""How long a step may take: the deadline after which shards that have not answered count as hung.

A step is late after ten times what the slowest steps of its size took, and never before `FLOOR_S`. Sizes are powers of
two of prompt tokens, because a step with a long chunk takes a hundred times as long as one that only decodes. The age
of a step counts the time that this process was awake: where the whole machine stood still, nobody is late.

Arithmetic alone. Who asks the shards when a step is late, and ends them, is `group.py`.
"""

from __future__ import annotations

import math
from collections import deque

FLOOR_S = 2.0
FACTOR = 10.0
TICK_S = 0.25  # how often whoever watches looks
MOST_S = 120.0  # for a step of a size that nothing is known of
SAMPLES = 256  # step times kept of each size


class StepWatch:
    """The steps under way, oldest first, and how long such steps took before.

    first_s: what the first step of each size may take, in seconds, until one is known.
    """

    def __init__(self, first_s: float = MOST_S / FACTOR) -> None:
        self._first_s = first_s
        self._sizes: deque[int] = deque()  # of the steps under way
        self._began_at = 0.0  # when the oldest could begin: it was sent, and the one before it answered
        self._asleep = 0.0  # of the time since, seconds that this process did not run
        self._seen_at = 0.0
        self._times: dict[int, deque[float]] = {}  # size -> seconds of its latest steps

    def sent(self, prompt_tokens: int, now: float) -> None:
        """A step with so many prompt tokens is under way."""
        if not self._sizes:
            self._begin(now)
        self._sizes.append(prompt_tokens.bit_length())

    def received(self, now: float) -> None:
        """The oldest step has been answered."""
        size = self._sizes.popleft()
        times = self._times.get(size)
        if times is None:
            times = self._times[size] = deque(maxlen=SAMPLES)
        times.append(now - self._began_at)
        self._begin(now)

    def lateness(self, now: float) -> float | None:
        """How old the oldest step is, in seconds, if that is more than it may be. To be called every TICK_S."""
        self._asleep += max(0.0, now - self._seen_at - 2 * TICK_S)
        self._seen_at = now
        if not self._sizes:
            return None
        age = now - self._began_at - self._asleep
        return age if age > FLOOR_S and age > self.deadline(self._sizes[0]) else None

    def deadline(self, size: int) -> float:
        """How many seconds a step of this size may take."""
        return max(FLOOR_S, FACTOR * self._usual(size))

    def _begin(self, now: float) -> None:
        self._began_at = self._seen_at = now
        self._asleep = 0.0

    def _usual(self, size: int) -> float:
        """The 99th percentile of this size, else of the next larger that is known, else of a smaller one scaled up."""
        if not self._times:
            return self._first_s
        known = min((other for other in self._times if other >= size), default=max(self._times))
        ordered = sorted(self._times[known])
        slowest = ordered[math.ceil(0.99 * len(ordered)) - 1]
        return min(slowest * 2.0 ** max(0, size - known), max(self._first_s, slowest))
