"""Timers for a loop that sleeps until the next one is due, and a watchdog for a process that gives signs of life.

The watchdog does not count time in which this process itself ran late, because the machine was suspended or overloaded
or this process was stopped: then the watched process may have had no time either.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

TICK_S = 1.0  # between two looks at a watchdog, at most
SILENCE_S = 10.0  # after which a process that should give signs of life counts as hung


@dataclass
class Timers:
    """Actions by name; one that is set again is postponed."""

    _due: dict[str, tuple[float, Callable[[], None]]] = field(default_factory=dict)

    def set(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        """Run the action in so many seconds."""
        self._due[name] = (time.monotonic() + seconds, action)

    def cancel(self, *names: str) -> None:
        for name in names:
            self._due.pop(name, None)

    def __contains__(self, name: str) -> bool:
        return name in self._due

    @property
    def patience(self) -> float:
        """Seconds until the next action; infinity without one."""
        return min((at for at, _ in self._due.values()), default=math.inf) - time.monotonic()

    def run(self) -> None:
        """Run the actions that are due, but not those that they set."""
        now = time.monotonic()
        for name, (at, action) in list(self._due.items()):
            if at <= now and self._due.get(name) == (at, action):
                del self._due[name]
                action()


class Watchdog:
    """The silence of one process. `is_silent` is to be called every TICK_S."""

    def __init__(self, now: float) -> None:
        self._silence = 0.0
        self._seen_at = now

    def reset(self) -> None:
        """The process has given a sign of life."""
        self._silence = 0.0

    def is_silent(self, now: float) -> bool:
        """Whether no sign has come for SILENCE_S."""
        passed, self._seen_at = now - self._seen_at, now
        if passed <= 2 * TICK_S:
            self._silence += passed
        return self._silence >= SILENCE_S
