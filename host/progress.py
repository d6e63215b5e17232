"""How far a job is, for a person: a line that is redrawn in place on a terminal, and lines of their own in a log.

Left out: bars of several stages, which the benchmark draws with `rich`.
"""

from __future__ import annotations

import shutil
from typing import TextIO

CLEAR_TO_END = "\x1b[K"


class StatusLine:
    """The last line of `stream`. is_live: whether that is a terminal."""

    def __init__(self, stream: TextIO, *, is_live: bool) -> None:
        self.is_live = is_live
        self._stream = stream
        self._is_drawn = False

    def show(self, text: str) -> None:
        """Redraw the line, cut to the terminal's width; in a log, write one more."""
        if not self.is_live:
            print(text, file=self._stream, flush=True)
            return
        width = shutil.get_terminal_size().columns - 1  # a full line would wrap
        shown = text if len(text) <= width else f"{text[: width - 1]}…"
        print(f"\r{shown}{CLEAR_TO_END}", end="", file=self._stream, flush=True)
        self._is_drawn = True

    def say(self, line: str) -> None:
        """Write a line that stays, in place of the status line."""
        print(f"\r{CLEAR_TO_END}{line}" if self._is_drawn else line, file=self._stream, flush=True)
        self._is_drawn = False

    def end(self) -> None:
        """Leave the line as it is, and continue below it."""
        if self._is_drawn:
            print(file=self._stream, flush=True)
        self._is_drawn = False


def duration(seconds: float) -> str:
    """A time in its two largest units, such as `2 h 5 min`."""
    left = round(seconds)
    parts: list[str] = []
    for name, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or parts or name == "s":
            parts.append(f"{count} {name}")
    return " ".join(parts[:2])
