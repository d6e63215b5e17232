"""How far a run is, on a terminal as one line that changes, elsewhere as a line for each layer."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

from server.quantising.layerwise import Progress
from server.quantising.sites import PLACES

WIDTH = 24  # of the bar, in characters


class Bar:
    """Told of everything that is done."""

    def __init__(self, stream: TextIO, *, is_terminal: bool) -> None:
        self._stream = stream
        self._is_terminal = is_terminal
        self._started = time.monotonic()
        self._errors: dict[str, float] = {}
        self._rounded = 0

    def __call__(self, progress: Progress) -> None:
        """Show it."""
        if not progress.place:
            line = f"measuring the model as it is: layer {progress.layer + 1} of {progress.num_layers}"
            self._show(line, (progress.layer + 1) / progress.num_layers, is_last=True)
            self._started = time.monotonic()  # what is left is told of what comes now
            return
        self._errors[progress.place] = progress.error
        self._rounded += progress.rounded
        done = progress.layer + (list(PLACES).index(progress.place) + 1) / len(PLACES)
        is_last = progress.place == [*PLACES][-1]
        self._show(self._line(progress, done), done / progress.num_layers, is_last=is_last)
        if is_last:
            self._errors = {}
            self._rounded = 0

    def _show(self, line: str, share: float, *, is_last: bool) -> None:
        """share: of the bar; is_last: whether nothing more is told of this layer."""
        if self._is_terminal:
            full, room = int(WIDTH * share), shutil.get_terminal_size().columns - WIDTH - 2
            shown = line if len(line) <= room else f"{line[: max(room - 1, 0)]}…"
            self._stream.write(f"\r{'█' * full}{'░' * (WIDTH - full)} {shown}\x1b[K")
        elif is_last:
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def _line(self, progress: Progress, done: float) -> str:
        passed = time.monotonic() - self._started
        left = f", {_clock(passed * (progress.num_layers / done - 1))} left"
        if progress.place == [*PLACES][-1] and not self._is_terminal:
            left = f" done after {_clock(passed)}"  # a line that stays
        errors = ", ".join(f"{place} {error:.2%}" for place, error in self._errors.items())
        few = f"; {self._rounded} matrices saw few tokens and are only rounded" if self._rounded else ""
        return f"layer {progress.layer + 1} of {progress.num_layers}{left}; square error of outputs: {errors}{few}"

    def end(self) -> None:
        """Leave the line that changes."""
        if self._is_terminal:
            self._stream.write("\n")


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
