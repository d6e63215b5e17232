"""How far a command is and about how long it will still take: a bar on a terminal, plain lines elsewhere.

A command is a list of stages, each so much work; what is left follows from what the finished part took, but for stages
whose length is known before. Never on standard output, and on a terminal not more than once a second: to draw takes a
few milliseconds of a core that may be measuring. `rich` is imported only there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

BAR_WIDTH = 40
REDRAW_S = 1.0

T = TypeVar("T")
Clock = Callable[[], float]


@dataclass(frozen=True)
class Stage:
    """A part of a command."""

    name: str
    work: float = 1.0  # in any unit that all stages have
    seconds: float | None = None  # how long it takes, where that is known before


class Remaining:
    """What is left of a command's stages."""

    def __init__(self, stages: Sequence[Stage], clock: Clock = time.monotonic) -> None:
        self.stages = list(stages)
        self.current = -1  # index of the stage under way
        self.share = 0.0  # of it that is done
        self._clock = clock
        self._began_at = clock()
        self._stage_at = self._began_at
        self._spent = 0.0  # seconds in finished stages whose length was not known, …
        self._done = 0.0  # … and their work

    @property
    def elapsed(self) -> float:
        """Seconds since the command began."""
        return self._clock() - self._began_at

    def begin(self) -> Stage:
        """The next stage begins, so the one before it is over."""
        self.finish()
        self.current += 1
        if self.current == len(self.stages):  # more of them than were expected
            self.stages.append(Stage(""))
        self.share, self._stage_at = 0.0, self._clock()
        return self.stages[self.current]

    def finish(self) -> None:
        """The stage under way, if there is one, is over."""
        if 0 <= self.current < len(self.stages) and self.share < 1:
            stage = self.stages[self.current]
            if stage.seconds is None:
                self._spent += self._clock() - self._stage_at
                self._done += stage.work
            self.share = 1.0

    def expect(self, following: Sequence[Stage]) -> None:
        """These follow the stage under way, instead of what was expected."""
        self.stages[self.current + 1 :] = following

    def advance(self, share: float) -> None:
        """So much more of the stage under way is done. It ends when the next one begins."""
        self.share = min(self.share + share, 0.999)

    @property
    def seconds_left(self) -> float | None:
        """An estimate; None before anything is done that tells."""
        seconds = work = 0.0
        for stage in self.stages[max(self.current + (self.share == 1), 0) :]:
            if stage.seconds is None:
                work += stage.work
            else:
                seconds += stage.seconds
        spent, done = self._spent, self._done
        if 0 <= self.current and self.share < 1:
            stage, took = self.stages[self.current], self._clock() - self._stage_at
            if stage.seconds is None:
                spent, done, work = spent + took, done + self.share * stage.work, work - self.share * stage.work
            else:
                seconds -= min(took, stage.seconds)
        if work <= 0:
            return seconds
        return seconds + work * spent / done if done else None

    @property
    def share_done(self) -> float:
        """Of the whole command, from 0 to 1, by time as far as that is known."""
        left = self.seconds_left
        return 0.0 if left is None else self.elapsed / max(self.elapsed + left, 1e-9)


def words(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def left_in_words(remaining: Remaining) -> str:
    """`about 3 min left`; empty before that can be known."""
    left = remaining.seconds_left
    return "" if left is None else f"about {words(left)} left"


class Progress:
    """Tells people where a command is. Its caller says when a stage begins, and how much of it is done."""

    def __init__(self, remaining: Remaining) -> None:
        self._remaining = remaining

    def begin(self) -> Stage:
        """The next stage begins."""
        stage = self._remaining.begin()
        parts = [f"{self._remaining.current + 1} of {len(self._remaining.stages)}", stage.name]
        if self._remaining.current and (left := left_in_words(self._remaining)):
            parts.append(left)
        if len(self._remaining.stages) > 1:
            self._say(": ".join(parts[:2]) + "".join(f", {part}" for part in parts[2:]))
        return stage

    def advance(self, share: float) -> None:
        """So much of the stage is done besides, from 0 to 1."""
        self._remaining.advance(share)

    def expect(self, following: Sequence[Stage]) -> None:
        """These stages follow the one under way, instead of what was expected."""
        self._remaining.expect(following)

    def each(self, things: Iterable[T]) -> Iterator[T]:
        """The things, of which each is a stage."""
        for thing in things:
            self.begin()
            yield thing

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class LiveProgress(Progress):
    """The same as a bar that is drawn anew."""

    def __init__(self, remaining: Remaining, title: str) -> None:
        super().__init__(remaining)
        from rich.console import Console
        from rich.live import Live

        self._title = title
        self._drawn_at = 0.0
        self.live: Live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)

    def begin(self) -> Stage:
        """The next stage begins."""
        stage = self._remaining.begin()
        self._draw()
        return stage

    def advance(self, share: float) -> None:
        """So much of the stage is done besides, from 0 to 1."""
        super().advance(share)
        if time.monotonic() - self._drawn_at > REDRAW_S:
            self._draw()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        self.live.update(self._screen(), refresh=True)

    def _screen(self) -> RenderableType:
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        remaining = self._remaining
        stage = remaining.stages[max(remaining.current, 0)]
        grid = Table.grid(padding=(0, 2))
        times = ", ".join(part for part in (f"{words(remaining.elapsed)} gone", left_in_words(remaining)) if part)
        grid.add_row(ProgressBar(1.0, remaining.share_done, width=BAR_WIDTH), Text(times))
        grid.add_row(
            ProgressBar(1.0, remaining.share, width=BAR_WIDTH),
            Text(f"{max(remaining.current, 0) + 1} of {len(remaining.stages)}: {stage.name}"),
        )
        return Panel(grid, title=Text(self._title), border_style="cyan")


@contextmanager
def shown(title: str, stages: Sequence[Stage]) -> Iterator[Progress]:
    """Shows the progress of a command while the block runs: a bar where standard error is a terminal."""
    remaining = Remaining(stages)
    if not sys.stderr.isatty():
        yield Progress(remaining)
        return
    try:
        view = LiveProgress(remaining, title)
    except ImportError:
        print("the live view needs the package rich: pip install 'lockstep[bench]'", file=sys.stderr)
        yield Progress(remaining)
        return
    with view.live:
        yield view
