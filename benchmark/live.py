"""What one sees while `latency` runs: a live view on a terminal, plain lines elsewhere. Never on standard output.

The view is drawn between runs only. On a CPU it would otherwise compute beside the shards and measure itself, and a
redraw during a run would delay the next request. `rich` is imported only for a terminal, and plain lines do without it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from benchmark.progress import Remaining, Stage, left_in_words
from benchmark.report import percentile
from benchmark.steps import Times

if TYPE_CHECKING:
    from rich.console import RenderableType

HISTOGRAM_BINS = 8
BAR_WIDTH = 40
PROMPT_TOKENS_A_STEP = 100  # that take about as long as a step of decoding


class View(Protocol):
    """Shows the progress of `latency`, which tells it of every run; entered before the first one."""

    def begin(self, batch_size: int) -> None:
        """The runs of a batch size begin."""

    def finished(self, batch_size: int, times: Times) -> None:
        """One more run of the batch size is done, in these times."""

    def __enter__(self) -> View: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def stages(sequence_length: int, decode_length: int, batch_sizes: Sequence[int]) -> list[Stage]:
    """A stage for each batch size: its steps, prompts counted as the steps that take about as long."""
    prompt_steps = sequence_length / PROMPT_TOKENS_A_STEP
    return [Stage(f"batch size {size}", decode_length + size * prompt_steps) for size in batch_sizes]


def view(model: str, sequence_length: int, decode_length: int, batch_sizes: Sequence[int], num_runs: int) -> View:
    """The live view where standard error is a terminal and `rich` is installed, else plain lines."""
    title = f"{model}: {sequence_length} prompt tokens, {decode_length} generated"
    remaining = Remaining(stages(sequence_length, decode_length, batch_sizes))
    if sys.stderr.isatty():
        try:
            return LiveView(title, sequence_length, batch_sizes, num_runs, remaining)
        except ImportError:
            print("the live view needs the package rich: pip install 'lockstep[bench]'", file=sys.stderr)
    return PlainView(title, sequence_length, num_runs, remaining)


class PlainView(AbstractContextManager["PlainView"]):
    """One line when a batch size begins and one when it is done."""

    def __init__(self, title: str, sequence_length: int, num_runs: int, remaining: Remaining) -> None:
        self._title = title
        self._remaining = remaining
        self._sequence_length = sequence_length
        self._num_runs = num_runs
        self._started = 0.0
        self._runs: list[Times] = []

    def __enter__(self) -> PlainView:
        _say(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def begin(self, batch_size: int) -> None:
        """Print that the runs of a batch size begin."""
        self._runs, self._started = [], time.monotonic()
        self._remaining.begin()
        left = left_in_words(self._remaining) if self._remaining.current else ""
        _say(f"batch size {batch_size}: {self._num_runs} runs …{left and f' {left}'}")

    def finished(self, batch_size: int, times: Times) -> None:
        """Print the medians when this was the last run of the batch size."""
        self._runs.append(times)
        if len(self._runs) == self._num_runs:
            seconds = time.monotonic() - self._started
            _say(
                f"batch size {batch_size}: {_sentence(self._runs, batch_size, self._sequence_length)}, {seconds:.1f} s"
            )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _sentence(runs: Sequence[Times], batch_size: int, sequence_length: int) -> str:
    prefill, token = _medians(runs)
    return (
        f"prefill {1000 * prefill:.2f} ms ({batch_size * sequence_length / prefill:.0f} tokens/s), "
        f"decode {1000 * token:.2f} ms a token ({batch_size / token:.0f} tokens/s)"
    )


def _medians(runs: Sequence[Times]) -> tuple[float, float]:
    """(prefill, decode step) in seconds."""
    return (
        statistics.median(times.prefill for times in runs),
        statistics.median(times.decode / len(times.intervals) for times in runs),
    )


def histogram(samples: Sequence[float], bins: int = HISTOGRAM_BINS) -> list[tuple[float, float, int]]:
    """(from, to, count) of equal bins from the smallest sample to p90; the last bin has all that is larger, too.

    On a shared machine a few samples are far out: bins up to the largest would put all others into one.
    """
    ordered = sorted(samples)
    low, high = ordered[0], percentile(ordered, 90)
    width = (high - low) / bins or 1e-6
    counts = [0] * bins
    for sample in ordered:
        counts[min(int((sample - low) / width), bins - 1)] += 1
    return [(low + i * width, low + (i + 1) * width, count) for i, count in enumerate(counts)]


class LiveView(AbstractContextManager["LiveView"]):
    """Progress, the running batch size's histograms, and throughput against latency of all so far."""

    def __init__(
        self, title: str, sequence_length: int, batch_sizes: Sequence[int], num_runs: int, remaining: Remaining
    ) -> None:
        from rich.console import Console
        from rich.live import Live

        self._title = title
        self._sequence_length = sequence_length
        self._num_runs = num_runs
        self._runs: dict[int, list[Times]] = {batch_size: [] for batch_size in batch_sizes}
        self._current = batch_sizes[0]
        self._remaining = remaining
        self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)

    def __enter__(self) -> LiveView:
        self._live.start()
        self._draw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def begin(self, batch_size: int) -> None:
        """Show the batch size as the running one."""
        self._current = batch_size
        self._remaining.begin()
        self._draw()

    def finished(self, batch_size: int, times: Times) -> None:
        """Draw the run into the histograms and the chart."""
        self._runs[batch_size].append(times)
        self._remaining.advance(1 / self._num_runs)
        self._draw()

    def _draw(self) -> None:
        self._live.update(self._screen(), refresh=True)

    def _screen(self) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel

        parts = [self._progress(), self._histograms(), self._chart()]
        return Panel(Group(*(part for part in parts if part is not None)), title=self._title, border_style="cyan")

    def _progress(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        done, total = sum(len(runs) for runs in self._runs.values()), self._num_runs * len(self._runs)
        current = len(self._runs[self._current])
        grid = Table.grid(padding=(0, 2))
        counts = ", ".join(part for part in (f"{done} of {total} runs", left_in_words(self._remaining)) if part)
        grid.add_row("all", ProgressBar(total, done, width=BAR_WIDTH), counts)
        label = f"batch size {self._current}"
        grid.add_row(label, ProgressBar(self._num_runs, current, width=BAR_WIDTH), f"{current} of {self._num_runs}")
        return grid

    def _histograms(self) -> RenderableType | None:
        from rich.columns import Columns

        runs = self._runs[self._current]
        if not runs:
            return None
        steps = [1000 * interval for times in runs for interval in times.intervals]
        prefills = [1000 * times.prefill for times in runs]
        return Columns([_bars("prefill, ms", prefills), _bars("decode steps, ms", steps)], padding=(1, 4))

    def _chart(self) -> RenderableType | None:
        from rich.table import Table

        finished = {batch_size: _medians(runs) for batch_size, runs in self._runs.items() if runs}
        if not finished:
            return None
        best = max(batch_size / token for batch_size, (_, token) in finished.items())
        chart = Table(title="throughput and latency", title_justify="left", box=None, padding=(0, 2))
        for name in ("batch size", "prefill ms", "prompt tokens/s", "decode ms a token", "tokens/s"):
            chart.add_column(name, justify="right")
        chart.add_column("")
        for batch_size, (prefill, token) in finished.items():
            rates = (batch_size * self._sequence_length / prefill, batch_size / token)
            bar = "█" * max(1, round(20 * rates[1] / best))
            cells = (f"{1000 * prefill:.2f}", f"{rates[0]:.0f}", f"{1000 * token:.2f}", f"{rates[1]:.0f}")
            chart.add_row(str(batch_size), *cells, f"[green]{bar}[/]")
        return chart


def _bars(title: str, samples: Sequence[float]) -> RenderableType:
    from rich.table import Table

    bins = histogram(samples)
    most = max(count for _, _, count in bins)
    chart = Table(title=title, title_justify="left", box=None, show_header=False, padding=(0, 1))
    chart.add_column(justify="right")
    for index, (low, _, count) in enumerate(bins):
        sign = "≥ " if index == len(bins) - 1 else ""
        chart.add_row(f"{sign}{low:.2f}", f"[cyan]{'█' * round(20 * count / most)}[/] {count or ''}")
    return chart
