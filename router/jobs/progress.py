"""How many lines of a job are done, how fast it goes and how long the rest will take, as a line for a person."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from host.progress import StatusLine, duration

LIVE_S = 0.5  # between two states of the line on a terminal
LOG_S = 30.0  # between two lines of a log
WINDOW_S = 300.0  # over which the rate is measured


class Progress(StatusLine):
    """Counts of one run. total: lines of the input, once they are counted."""

    def __init__(self, stream: TextIO, *, is_live: bool, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream, is_live=is_live)
        self.total = 0
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque()  # times, and how many lines were done then

    @property
    def period_s(self) -> float:
        """How often to call `report`."""
        return LIVE_S if self.is_live else LOG_S

    def note(self, num_done: int) -> None:
        """Remember how many lines are done now."""
        now = self._clock()
        self._samples.append((now, num_done))
        while now - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()

    def report(self, completed: int, failed: int, trouble: str = "") -> None:
        """Show the counts. trouble: why requests wait, if they do."""
        self.note(completed + failed)
        self.show(self.sentence(completed, failed, trouble))

    def sentence(self, completed: int, failed: int, trouble: str = "") -> str:
        """What is done and left and, once that can be measured, the rate and the time that is left."""
        done = completed + failed
        text = f"{done:,} of {self.total:,} lines, {failed:,} failed, {self.total - done:,} left"
        if rate := 0.0 if trouble and self._is_stuck() else self._rate():
            text += f", {rate:.1f} lines/s, {duration((self.total - done) / rate)} to go"
        return f"{text} ({trouble})" if trouble else text

    def _is_stuck(self) -> bool:
        """Whether nothing was done for LOG_S."""
        now, last = self._samples[-1]
        recent = [done for at, done in self._samples if now - at <= LOG_S]
        return recent == [last] * len(recent) and now - self._samples[0][0] >= LOG_S

    def _rate(self) -> float:
        """Lines per second within WINDOW_S; 0 where it is not known."""
        if len(self._samples) < 2 or self._samples[-1][0] <= self._samples[0][0]:
            return 0.0
        (began, first), (now, last) = self._samples[0], self._samples[-1]
        return (last - first) / (now - began)
