"""Named actions that wait for their time, for a loop that sleeps until the next of them."""

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
