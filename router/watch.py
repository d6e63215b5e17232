"""How long a step may take: the deadline after which shards that answer, but do not finish it, count as hung.

A step is late after ten times what the slowest steps of its size took, and never before `FLOOR_S`. Sizes are powers of
two of the tokens computed, because a step with a long chunk takes a hundred times as long as one that decodes; of a
size that has not come yet, the next larger one says how long, or a smaller one in proportion. The age of a step counts
the time that this process was awake: where the whole machine stood still, nobody is late. Nor is a step late whose
weights still come from a disk, however slowly.

Arithmetic alone. Who asks the shards for a sign of life, and has them ended, is `group.py`.
"""

from __future__ import annotations

import math
from collections import deque

FLOOR_S = 2.0
FACTOR = 10.0
TICK_S = 0.25  # how often whoever watches looks
MOST_S = 600.0  # for a step of a size that has not come yet, or the first of all
READ_S = 10.0  # a disk that brings nothing for so long is stuck
SAMPLES = 256  # step times kept of each size


class StepWatch:
    """The steps under way, oldest first, and how long such steps took before."""

    def __init__(self, before: StepWatch | None = None) -> None:
        """before: of the shards in whose place others are; steps take what they took."""
        self.num_answered = 0
        self._sizes: deque[int] = deque()  # of the steps under way
        self._began_at = 0.0  # when the oldest could begin: it was sent, and the one before it answered
        self._asleep = 0.0  # of the time since, seconds that this process did not run
        self._seen_at = 0.0
        self._read_bytes = 0  # by the shards, when somebody last asked
        self._read_at: float | None = None  # when that was found to have grown
        # Size -> seconds of its latest steps.
        self._times: dict[int, deque[float]] = before._times if before is not None else {}

    def sent(self, tokens: int, now: float) -> None:
        """A step that computes so many tokens, of prompts and of sequences that decode, is under way."""
        if not self._sizes:
            self._begin(now)
        self._sizes.append(tokens.bit_length())

    def received(self, now: float) -> None:
        """The oldest step has been answered."""
        self.num_answered += 1
        size = self._sizes.popleft()
        times = self._times.get(size)
        if times is None:
            times = self._times[size] = deque(maxlen=SAMPLES)
        times.append(now - self._began_at)
        self._begin(now)

    def age(self, now: float) -> float:
        """Seconds that the oldest step has been under way; 0 where none is. To be called every TICK_S."""
        self._asleep += max(0.0, now - self._seen_at - 2 * TICK_S)
        self._seen_at = now
        return now - self._began_at - self._asleep if self._sizes else 0.0

    def is_late(self, age: float) -> bool:
        """Whether the oldest step may not be so old."""
        return bool(self._sizes) and age > self._deadline(self._sizes[0])

    def is_reading(self, read_bytes: int, now: float) -> bool:
        """Whether weights have come from a disk of late. read_bytes: since the shards' start. For a late step."""
        if read_bytes != self._read_bytes:
            self._read_bytes, self._read_at = read_bytes, now
        return self._read_at is not None and now - self._read_at < READ_S

    def _deadline(self, size: int) -> float:
        if size in self._times:
            return max(FLOOR_S, FACTOR * self._slowest(size))
        larger = min((other for other in self._times if other > size), default=None)
        if larger is not None:
            return max(FLOOR_S, FACTOR * self._slowest(larger))
        if not self._times:
            return MOST_S
        known = max(self._times)
        return min(max(FLOOR_S, FACTOR * self._slowest(known) * 2.0 ** (size - known)), MOST_S)

    def _slowest(self, size: int) -> float:
        """The 99th percentile of the latest steps of a size."""
        ordered = sorted(self._times[size])
        return ordered[math.ceil(0.99 * len(ordered)) - 1]

    def _begin(self, now: float) -> None:
        self._began_at = self._seen_at = now
        self._asleep = 0.0
