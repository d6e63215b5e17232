"""How long a process that should give signs of life has given none, in time in which this process could have seen them.

Where this process itself ran late, because the machine was suspended or starved or somebody had stopped it, the others
may have had no time either: that time does not count.
"""

from __future__ import annotations

TICK_S = 1.0  # between two looks, at most
SILENCE_S = 10.0  # after which whoever should give signs of life counts as stuck


class Pulse:
    """The silence of one process. To be looked at every TICK_S."""

    def __init__(self, now: float) -> None:
        self._silence = 0.0
        self._seen_at = now

    def sign(self) -> None:
        """It has given a sign of life."""
        self._silence = 0.0

    def is_silent(self, now: float) -> bool:
        """Whether none has come for SILENCE_S."""
        passed, self._seen_at = now - self._seen_at, now
        if passed <= 2 * TICK_S:
            self._silence += passed
        return self._silence >= SILENCE_S
