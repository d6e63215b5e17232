"""How far a job is, for a person: one line that stays in place on a terminal, and a line now and then in a log."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

LIVE_S = 0.5  # between two states of the line on a terminal
LOG_S = 30.0  # between two lines of a log
WINDOW_S = 300.0  # what the rate, and so the time that is left, is taken from


class Progress:
    """Counts of one run. total: lines of the input. is_live: whether `stream` is a terminal."""

    def __init__(
        self, total: int, stream: TextIO, *, is_live: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total = total
        self._stream = stream
        self._is_live = is_live
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()  # times, and how many lines were done then
        self._width = 0  # of what stands in the terminal's last line

    @property
    def period_s(self) -> float:
        """How often to call `show`."""
        return LIVE_S if self._is_live else LOG_S

    def begin(self, total: int) -> None:
        """The input has so many lines."""
        self._total = total

    def show_reading(self, share: float) -> None:
        """Say how much of the input was looked at, before anything is sent."""
        self._print(f"reading the input: {100 * share:.0f} %")

    def note(self, num_done: int) -> None:
        """Remember how many lines are done now."""
        now = self._clock()
        self._seen.append((now, num_done))
        while now - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()

    def show(self, completed: int, failed: int, trouble: str = "") -> None:
        """Say it. trouble: why requests wait, if they do."""
        self.note(completed + failed)
        self._print(self.sentence(completed, failed, trouble))

    def _print(self, text: str) -> None:
        if not self._is_live:
            print(text, file=self._stream, flush=True)
            return
        print(f"\r{text:<{self._width}}", end="", file=self._stream, flush=True)
        self._width = len(text)

    def say(self, line: str) -> None:
        """A line of its own, which stays."""
        print(f"\r{' ' * self._width}\r{line}" if self._width else line, file=self._stream, flush=True)
        self._width = 0

    def end_line(self) -> None:
        """Leave what stands there, and go on below it."""
        if self._width:
            print(file=self._stream, flush=True)
        self._width = 0

    def sentence(self, completed: int, failed: int, trouble: str = "") -> str:
        """What is done and left, how fast it goes and how long it will take, which nobody knows if nothing is done."""
        done = completed + failed
        text = f"{done:,} of {self._total:,} lines, {failed:,} failed, {self._total - done:,} left"
        rate = 0.0 if trouble and self._is_stuck() else self._rate()
        if trouble:
            trouble = f" ({trouble})"
        if not rate:
            return text + trouble
        return f"{text}, {rate:.1f} lines/s, {duration((self._total - done) / rate)} to go{trouble}"

    def _is_stuck(self) -> bool:
        """Whether nothing was done for as long as between two lines of a log."""
        now, last = self._seen[-1]
        return all(done == last for at, done in self._seen if now - at <= LOG_S) and now - self._seen[0][0] >= LOG_S

    def _rate(self) -> float:
        """Lines a second of late; 0 where nothing is known."""
        if len(self._seen) < 2 or self._seen[-1][0] <= self._seen[0][0]:
            return 0.0
        (began, first), (now, last) = self._seen[0], self._seen[-1]
        return (last - first) / (now - began)


def duration(seconds: float) -> str:
    """A time for people: the two largest of its units."""
    left = round(seconds)
    parts: list[str] = []
    for name, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or parts or name == "s":
            parts.append(f"{count} {name}")
    return " ".join(parts[:2])
