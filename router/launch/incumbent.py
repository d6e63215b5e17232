"""The router that runs now, and when another has to take its place.

A router that serves shows every second that its event loop turns. One that is silent for `SILENCE_S`, stopped or stuck,
is killed, which is a death like another. While one loads it may block as long as it likes, within what the shards may
take, because reading a large tokenizer is one long call. Left out: what it is told to serve (`seat.py`).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from router.launch.logs import Log
from router.launch.processes import Child
from router.launch.pulse import SILENCE_S, TICK_S, Pulse
from router.launch.restarts import Restarts
from router.launch.terminal import printable
from router.launch.timers import Timers


class Incumbent:
    """One router after the other. Its timers are "router", "pulse" and "drain"."""

    def __init__(
        self, timers: Timers, log: Log, *, drain_seconds: float, stop_seconds: float, most_deaths: int
    ) -> None:
        self.child: Child | None = None
        self.is_ready = False
        self.is_leaving = False  # because somebody asked for another in its place
        self.deaths = Restarts(most_deaths)
        self._timers = timers
        self._log = log
        self._drain_seconds = drain_seconds
        self._patience = drain_seconds + stop_seconds
        self._pulse: Pulse | None = None
        self._num_records = 0  # that had come from it at the last look

    @property
    def is_running(self) -> bool:
        """Whether there is one."""
        return self.child is not None and self.child.is_running

    def began(self, child: Child) -> None:
        """It has been started."""
        self.child, self.is_ready = child, False

    def expect(self, seconds: float, is_waiting: Callable[[], bool]) -> None:
        """Kill it where it is not ready in so many seconds, which begin anew as long as it waits for shards."""

        def look() -> None:
            if is_waiting():
                self._timers.set("router", seconds, look)
            else:
                self._kill(f"it was not ready after {seconds:g} s and was killed")

        self._timers.set("router", seconds, look)

    def ready(self) -> None:
        """It serves."""
        self.is_ready = True
        self._timers.cancel("router")

    def beat(self) -> None:
        """It shows that its event loop turns; from the first time on it has to."""
        if self._pulse is None:
            self._pulse = Pulse(time.monotonic())
            self._timers.set("pulse", TICK_S, self._look)

    def leave(self) -> None:
        """Let it finish its requests and end."""
        assert self.child is not None, "it is there"
        self.child.signal(signal.SIGTERM)
        late = f"it had not finished its requests after {self._drain_seconds:g} s and was killed"
        self._timers.set("drain", self._patience, lambda: self._kill(late))

    def lost(self) -> tuple[str, float | None]:
        """It has ended: why, and in how many seconds another may be started; None: it has died too often."""
        assert self.child is not None, "it has just ended"
        child, self.child, self._pulse = self.child, None, None
        self._timers.cancel("router", "pulse", "drain")
        sentence = f"router stopped: {printable(child.cause)}"
        if self.is_leaving:
            self.is_leaving = False
            if child.process.returncode:
                self._log.warn(f"{sentence}; another takes its place")
            return sentence, 0.0
        delay = self.deaths.delay(time.monotonic())
        if delay is not None:
            soon = f" in {delay:g} s" if delay else ""
            self._log.warn(f"{sentence}; it is started again{soon}, without the requests that it had")
        return sentence, delay

    def _look(self) -> None:
        """Whatever it says is a sign of life: a beat is left out where other records wait to be read."""
        assert self.child is not None and self._pulse is not None, "its end cancels this"
        if self.child.num_records != self._num_records:
            self._num_records = self.child.num_records
            self._pulse.sign()
        if self._pulse.is_silent(time.monotonic()):
            self._kill(f"it gave no sign of life for {SILENCE_S:g} s and was killed")
        else:
            self._timers.set("pulse", TICK_S, self._look)

    def _kill(self, why: str) -> None:
        if self.child is not None:
            self.child.critical = why
            self.child.signal(signal.SIGKILL)
