"""Named actions that wait for their time, for a loop that sleeps until the next of them.

How long a process that should give signs of life has given none, in time in which this process could have seen them.

Where this process itself ran late, because the machine was suspended or starved or somebody had stopped it, the others
may have had no time either: that time does not count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Timers:
    """The actions, by name; one that is set again is put off."""

    _due: dict[str, tuple[float, Callable[[], None]]] = field(default_factory=dict)

    def set(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        """Do it in so many seconds."""
        self._due[name] = (time.monotonic() + seconds, action)

    def cancel(self, *names: str) -> None:
        """Do them no more."""
        for name in names:
            self._due.pop(name, None)

    def __contains__(self, name: str) -> bool:
        return name in self._due

    @property
    def patience(self) -> float:
        """Seconds until the next action; infinity where none waits."""
        return min((at for at, _ in self._due.values()), default=math.inf) - time.monotonic()

    def run(self) -> None:
        """Do what is due, but not what that sets for now."""
        now = time.monotonic()
        for name, (at, action) in list(self._due.items()):
            if at <= now and self._due.get(name) == (at, action):
                del self._due[name]
                action()


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
