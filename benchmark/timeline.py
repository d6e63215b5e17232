"""The picture of what link and compute did when: two lanes for each run, the whole of it and three of its steps.

Spans go in as the shards told them, steps as the benchmark saw them, all in seconds of the same clock. Left out: layers
that stay on the device, whose time is between the others'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark import plots
from server.offload.times import Span

LANES = ("link", "compute")
ZOOMED_STEPS = 3


@dataclass(frozen=True)
class Timeline:
    """One run: its name, when it began and ended, when its steps ended, and what the shards did."""

    name: str
    began_s: float
    ended_s: float
    step_ends_s: Sequence[float]
    reads: Sequence[Span]
    computed: Sequence[Span]

    @property
    def middle(self) -> tuple[float, float]:
        """From the beginning to the end of some steps in the middle of the run."""
        ends = [self.began_s, *self.step_ends_s]
        first = max((len(ends) - 1 - ZOOMED_STEPS) // 2, 0)
        return ends[first], ends[min(first + ZOOMED_STEPS, len(ends) - 1)]


def draw(timelines: Sequence[Timeline], path: Path) -> plots.Picture:
    """Write the picture. Raises BenchError."""
    figure, panels = plots.grid(len(timelines), 2, "What link and compute did when")
    for timeline, (whole, zoomed) in zip(timelines, panels, strict=True):
        _lanes(whole, timeline, timeline.began_s, timeline.ended_s)
        _lanes(zoomed, timeline, *timeline.middle)
        whole.set_title(timeline.name, fontsize=10)
        zoomed.set_title(f"{timeline.name}, {ZOOMED_STEPS} steps in the middle", fontsize=10)
    return plots.save(figure, path)


def _lanes(panel: Any, timeline: Timeline, since: float, until: float) -> None:
    """Bars of what lies between two moments, which become those of the axis."""
    for height, spans in enumerate((timeline.reads, timeline.computed)):
        bars = [
            (max(span.began_s, since) - timeline.began_s, min(span.ended_s, until) - max(span.began_s, since))
            for span in spans
            if span.ended_s > since and span.began_s < until
        ]
        panel.broken_barh(bars, (height + 0.1, 0.8), color=plots.COLOURS[height], edgecolor="white", linewidth=0.2)
    for end in timeline.step_ends_s:
        if since <= end <= until:
            panel.axvline(end - timeline.began_s, color=plots.COLOURS[-1], linewidth=0.4)
    panel.set_yticks([0.5, 1.5], labels=LANES)
    panel.set_ylim(0, len(LANES))
    panel.set_xlim(since - timeline.began_s, max(until, since + 1e-3) - timeline.began_s)
    panel.set_xlabel("Seconds from the run's beginning; lines are the steps' ends")
