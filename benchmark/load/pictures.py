"""The pictures of a load: latency against throughput, times as distributions, and the server's batch and queue.

Rows go in as the JSON of `serving` or `simulate` holds them, so that pictures can be made again years later. What has
more lines than colours tell apart is drawn for some of its rows, which the picture says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark import plots
from benchmark.outcomes import QUANTILES, load_of, quantiles
from benchmark.report import Result

Row = Mapping[str, Any]

LATENCIES = {"ttft_ms": "Time to first token", "tpot_ms": "Time per output token"}
MOST_LINES = len(plots.COLOURS)
MOST_PANELS = 12
MOST_NAMED = 4
NO_BREAK = "\u00a0"  # a space at which no title is broken
LEAST_POINTS = 4  # of the server's counts, for a picture
SHORTEST_MS = 1e-3
BEGINNING = 10  # percents of a distribution that may lie left of the axis
LOOKS: Mapping[str, Mapping[str, str]] = {"p50": {}, "p99": {"linestyle": "--"}}


def draw(result: Result, folder: Path) -> list[plots.Picture]:
    """All pictures that the rows allow. Raises BenchError."""
    about = f"{result.context.model} on {result.context.machine}"
    rows = [row for row in result.rows if row["ttft_ms"] is not None]
    pictures = []
    watched = [row for row in rows if len(row.get("server_timeline") or ()) >= LEAST_POINTS]
    if len({load_of(row) for row in rows}) > 1:
        pictures.append(against_throughput(rows, folder / "pareto.png", f"{about}; {loads_of(rows)}"))
    if any("inter_token_quantiles_ms" in row for row in rows):
        pictures.append(distributions(rows, folder / "distributions.png", f"{about}; {loads_of(rows)}"))
    if watched:
        pictures.append(over_time(watched, folder / "server.png", f"{about}; {loads_of(watched)}"))
    return pictures


def against_throughput(rows: Sequence[Row], path: Path, about: str) -> plots.Picture:
    """First tokens and the others over the tokens that came in a second: a line for each pair of lengths."""
    by_lengths: dict[str, list[Row]] = {}  # streams and rates are lines of their own
    for row in rows:
        kind = "streams" if row["request_rate"] is None else "requests/s"
        by_lengths.setdefault(f"{_lengths(row)}, {kind}", []).append(row)
    chosen = _some(list(by_lengths))
    figure, panels = plots.figure_of(2, f"Latency against throughput{_said(chosen, by_lengths)}", about)
    for panel, (key, title) in zip(panels, LATENCIES.items(), strict=True):
        panel.set_title(title, fontsize=10)
        for style, lengths in enumerate(chosen):
            for name, look in LOOKS.items():
                points = [(row["output_tokens_per_second"], row[key][name]) for row in by_lengths[lengths] if row[key]]
                label = f"{lengths}: {name}"
                plots.draw_line(panel, style, label, points, **look)
            for row in by_lengths[lengths]:
                if row[key]:
                    place = (row["output_tokens_per_second"], row[key]["p50"])
                    panel.annotate(_load(row), place, xytext=(4, -11), textcoords="offset points", fontsize=7)
        _axes(panel, "Output tokens/s (numbers: streams or requests/s)", "ms", log_y=True)
    return plots.save(plots.with_legend(figure, panels), path)


def distributions(rows: Sequence[Row], path: Path, about: str) -> plots.Picture:
    """Which share of the first tokens, and of the gaps between tokens, came within which time."""
    chosen = _some(rows)
    title = f"Times as distributions{_said(chosen, rows)}"
    figure, panels = plots.figure_of(2, title, about, shared=True)
    for panel, name in zip(panels, ("Time to first token", "Gaps between tokens"), strict=True):
        panel.set_title(name, fontsize=10)
    shortest = math.inf
    for style, row in enumerate(chosen):
        found = (quantiles(row["samples"]["ttft_ms"]), row.get("inter_token_quantiles_ms") or [])
        for panel, times in zip(panels, found, strict=True):
            # Tokens that came in one piece have no gap between them, which no logarithmic axis can show.
            shortest = min([shortest, *(max(time, SHORTEST_MS) for time in times[BEGINNING:][:1])])
            look = {"color": plots.COLOURS[style], "linewidth": 1.8, "linestyle": ("-", "--", ":", "-.")[style % 4]}
            panel.plot(
                [max(time, SHORTEST_MS) for time in times], QUANTILES[: len(times)], label=_name(row, rows), **look
            )
    for panel in panels:
        panel.set_xscale("log")
        _axes(panel, "ms", "% came within")
        panel.set_ylim(0, 101)
        panel.set_xlim(left=shortest / 2)
    return plots.save(plots.with_legend(figure, panels), path)


def over_time(rows: Sequence[Row], path: Path, about: str) -> plots.Picture:
    """Requests that the server had in its batch and in its queue, row by row."""
    chosen = _some(rows, MOST_PANELS)
    title = f"The server's batch and queue{_said(chosen, rows)}"
    figure, panels = plots.figure_of(len(chosen), title, about, shared=True)
    for panel, row in zip(panels, chosen, strict=True):
        panel.set_title(_name(row, rows), fontsize=10)
        times = [point["at_s"] for point in row["server_timeline"]]
        for style, (key, label) in enumerate((("running", "In the batch"), ("waiting", "Waiting"))):
            look = {"color": plots.COLOURS[style], "linewidth": 1.8, "linestyle": ("-", "--")[style]}
            panel.step(times, [point[key] for point in row["server_timeline"]], where="post", label=label, **look)
        _axes(panel, "Seconds from the row's beginning", "Requests")
    panels[0].set_ylim(bottom=0)  # of all, once they know how high they are
    return plots.save(plots.with_legend(figure, panels), path)


def _axes(panel: Any, x_label: str, y_label: str, *, log_y: bool = False) -> None:
    panel.set_xlabel(x_label)
    panel.set_ylabel(y_label)
    panel.grid(visible=True, alpha=0.35)
    if log_y:
        plots.log_ticks(panel)
        panel.set_xlim(0, 1.08 * panel.get_xlim()[1])  # room for what stands beside the last point


def _some(items: Sequence[Any], most: int = MOST_LINES) -> list[Any]:
    """At most so many of them, evenly from the first to the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(n * (len(items) - 1) / (most - 1))] for n in range(most)]


def _said(chosen: Sequence[Any], all_of_them: Sequence[Any] | Mapping[str, Any]) -> str:
    return "" if len(chosen) == len(all_of_them) else f" ({len(chosen)} of {len(all_of_them)} rows)"


def _lengths(row: Row) -> str:
    return f"{row['input_length']:g} in {row['output_length']:g} out"


def _load(row: Row) -> str:
    return f"{row['concurrency']}" if row["request_rate"] is None else f"{row['request_rate']:.3g}/s"


def _name(row: Row, rows: Sequence[Row]) -> str:
    """What tells a row from the others: its lengths, its load, or both."""
    several = len({_lengths(one) for one in rows}) > 1
    return f"{_lengths(row)}; {load_of(row)}" if several else str(load_of(row))


def loads_of(rows: Sequence[Row]) -> str:
    """What was sent, in a few words: the lengths, and the loads."""
    lengths = list(dict.fromkeys(_lengths(row) for row in rows))
    streams = list(dict.fromkeys(str(row["concurrency"]) for row in rows if row["request_rate"] is None))
    others = list(dict.fromkeys(str(load_of(row)) for row in rows if row["request_rate"] is not None))
    named = [f"{', '.join(streams)} concurrent"] if streams else []
    parts = [_listed(lengths, "pairs of lengths"), *named, *([_listed(others, "rates")] if others else [])]
    return "; ".join(part.replace(" ", NO_BREAK).replace(f",{NO_BREAK}", ", ") for part in parts)


def _listed(names: Sequence[str], what: str) -> str:
    return f"{len(names)} {what}" if len(names) > MOST_NAMED else ", ".join(names)
