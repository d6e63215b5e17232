"""What a terminal shows while a command runs: how far it is, what it found, and about how long it will still take.

A bar where standard error is a terminal, drawn by `rich`; plain lines elsewhere, and without that package. Never on
standard output, and drawn not more than once a second: that takes a few milliseconds of a core that may be measuring.
A command is a list of stages, each so much work; what is left follows from what the finished part took.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

REDRAW_S = 1.0

T = TypeVar("T")


@dataclass(frozen=True)
class Stage:
    """A part of a command."""

    name: str
    work: float = 1.0  # in any unit that all stages have


class Progress:
    """Tells people in lines where a command is. Its caller says when a stage begins, and how much of it is done."""

    def __init__(self, stages: Sequence[Stage], clock: Callable[[], float] = time.monotonic) -> None:
        self.stages = list(stages)
        self.current = -1  # index of the stage under way
        self.share = 0.0  # of it that is done
        self._clock = clock
        self._began_at = clock()

    @property
    def share_done(self) -> float:
        """Of the whole command, from 0 to 1."""
        done = [stage.work for stage in self.stages[: max(self.current, 0)]]
        under_way = self.share * self.stages[self.current].work if self.current >= 0 else 0.0
        return (sum(done) + under_way) / sum(stage.work for stage in self.stages)

    @property
    def left(self) -> str:
        """`about 3 min left`; empty before anything is done that tells."""
        share = self.share_done if self.current >= 0 else 0.0
        return f"about {words((self._clock() - self._began_at) * (1 - share) / share)} left" if share else ""

    def begin(self) -> Stage:
        """The next stage begins, so the one before it is over."""
        self.current += 1
        if self.current == len(self.stages):  # more of them than were expected
            self.stages.append(Stage(""))
        self.share = 0.0
        self._begun()
        return self.stages[self.current]

    def advance(self, share: float) -> None:
        """So much of the stage is done besides, from 0 to 1. It ends when the next one begins."""
        self.share = min(self.share + share, 0.999)

    def each(self, things: Iterable[T]) -> Iterator[T]:
        """The things, of which each is a stage."""
        for thing in things:
            self.begin()
            yield thing

    def say(self, line: str) -> None:
        """Something that is found; it stays where it is."""
        print(line, file=sys.stderr, flush=True)

    def _begun(self) -> None:
        if len(self.stages) > 1:
            self.say(", ".join(part for part in (self.place, self.left) if part))

    @property
    def place(self) -> str:
        """`2 of 5: the second`."""
        return f"{self.current + 1} of {len(self.stages)}: {self.stages[self.current].name}"


class LiveProgress(Progress):
    """The same as two bars, of the command and of its stage."""

    def __init__(self, title: str, stages: Sequence[Stage]) -> None:
        super().__init__(stages)
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        columns = (BarColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self.bars: Bars = Bars(
            *columns,
            TextColumn("{task.fields[left]}"),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
        )
        self._whole = self.bars.add_task(title, total=1.0, left="")
        self._stage = self.bars.add_task("", total=1.0, left="", start=False)
        self._drawn_at = 0.0

    def advance(self, share: float) -> None:
        """So much of the stage is done besides, from 0 to 1."""
        super().advance(share)
        if time.monotonic() - self._drawn_at > REDRAW_S:
            self._draw()

    def say(self, line: str) -> None:
        """Something that is found; it stays above the bars."""
        self.bars.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _begun(self) -> None:
        self.bars.reset(self._stage, total=1.0)
        self._draw()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        self.bars.update(self._whole, completed=self.share_done, left=self.left)
        self.bars.update(self._stage, completed=self.share, description=self.place)
        self.bars.refresh()


def words(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


@contextmanager
def shown(title: str, stages: Sequence[Stage]) -> Iterator[Progress]:
    """Shows the progress of a command while the block runs: bars where standard error is a terminal."""
    if not sys.stderr.isatty():
        yield Progress(stages)
        return
    try:
        view = LiveProgress(title, stages)
    except ImportError:
        print("bars need the package rich: pip install 'lockstep[bench]'", file=sys.stderr)
        yield Progress(stages)
        return
    with view.bars:
        yield view
