"""The pictures of a result, as PNG: loads, the published sweeps, and step times beside their floors.

Rows go in as the result's JSON holds them, so that a picture can be made again from a file years later. What has more
lines than colours tell apart is drawn for some of its rows, which the picture says. matplotlib is an optional
dependency and imported only when something is drawn, without its global state (`pyplot`) and without a display. No
styling options: whoever wants another picture has the numbers.
"""

from __future__ import annotations

import importlib
import io
import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.result import BenchError, Result, write_atomically
from benchmark.serving.outcomes import QUANTILES, load_of, quantiles

Row = Mapping[str, Any]

DOTS_PER_INCH = 120
PANEL_INCHES = (5.0, 3.6)
PANELS_ABREAST = 2
NARROW = 4.0  # a range of less than so much, from top to bottom, is drawn wider
LETTERS_PER_INCH = 9  # of a title
# Colours that people with any colour vision tell apart (Okabe and Ito 2008); markers say it again in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
AXES = {"output_length": "Output length (tokens)", "concurrency": "Concurrent requests", "request_rate": "Requests/s"}
STEP_TITLES = {"prefill": "Prefill", "decode_token": "Decode (token)"}


@dataclass(frozen=True)
class PlottedMetric:
    """One figure of a serving row and the picture that it makes."""

    key: str
    title: str
    axis: str  # with the unit
    filename: str


METRICS = (
    PlottedMetric("requests_per_second", "Throughput (requests/s)", "Requests/s", "throughput-req.png"),
    PlottedMetric(
        "output_tokens_per_second", "Throughput (output token/s)", "Output tokens/s", "throughput-token-out.png"
    ),
    PlottedMetric("latency_per_token_ms", "Average latency per token (ms)", "ms per token", "pertoken.png"),
    PlottedMetric(
        "latency_per_output_token_ms", "Average latency per output token (ms)", "ms per token", "per-out-token.png"
    ),
)


@dataclass(frozen=True)
class Picture:
    """One that was drawn. caption: what it says above the picture, for those who cannot see it."""

    path: Path
    caption: str


def wanted(output: Path | None) -> bool:
    """Whether plots go to `output`. A measurement is worth more than its picture: without matplotlib only a warning."""
    if output is None:
        return False
    try:
        require_matplotlib()
    except BenchError as error:
        print(f"warning: {error}", file=sys.stderr)
        return False
    return True


def require_matplotlib() -> None:
    """Import matplotlib. Raises BenchError where it is not installed."""
    _import("matplotlib")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise BenchError("plots need matplotlib: pip install 'lockstep[bench]'") from None


# -------------------------------------------------------------------------------------------------------------- serving


def plot_serving(systems: Mapping[str, Sequence[Row]], folder: Path, about: str = "") -> list[Picture]:
    """One PNG per measure, one panel per input length, one line per system. Raises BenchError.

    The x axis is the output length, or what else was varied where there is only one. Rows without a figure, because
    all of their requests failed, are left out. about: model, hardware and load, for the titles.
    """
    return [save(_serving_figure(systems, metric, about), folder / metric.filename) for metric in METRICS]


def _serving_figure(systems: Mapping[str, Sequence[Row]], metric: PlottedMetric, about: str) -> Any:
    everything = [row for rows in systems.values() for row in rows]
    axis = axis_of(everything)
    lines = _lines(systems, axis, several_loads=len({_load(row) for row in everything}) > 1)
    input_lengths = _values(everything, "input_length")
    figure, panels = figure_of(len(input_lengths), metric.title, about, shared=True)
    for panel, input_length in zip(panels, input_lengths, strict=True):
        panel.set_title(f"Input length {input_length} tokens", fontsize=10)
        for style, (label, rows) in enumerate(lines.items()):
            points = [row for row in rows if row["input_length"] == input_length and row[metric.key] is not None]
            draw_line(panel, style, label, [(row[axis], row[metric.key]) for row in points])
        _label(panel, AXES[axis], metric.axis, _values(everything, axis))
    _from_zero(panels)
    return with_legend(figure, panels)


def axis_of(rows: Sequence[Row]) -> str:
    """What the rows vary, apart from the input length. Rows that have none of it are not drawn."""
    return next((key for key in AXES if len(_values(rows, key)) > 1), "output_length")


def _lines(systems: Mapping[str, Sequence[Row]], axis: str, *, several_loads: bool) -> dict[str, list[Row]]:
    """Rows by the legend's text: the system, and its load where that is neither the axis nor the same everywhere."""
    lines: dict[str, list[Row]] = {}
    for system, rows in systems.items():
        for row in rows:
            label = f"{system}, {_load(row)}" if several_loads and axis == "output_length" else system
            if row[axis] is not None:
                lines.setdefault(label, []).append(row)
    return lines


def _load(row: Row) -> str:
    if row["request_rate"] is not None:
        return f"{row['request_rate']:g} requests/s"
    return f"{row['concurrency']} concurrent"


def _values(rows: Sequence[Row], key: str) -> list[Any]:
    return sorted({row[key] for row in rows if row[key] is not None})


# -------------------------------------------------------------------------------------------------------------- latency


def plot_latency(rows: Sequence[Row], path: Path, about: str = "") -> Picture:
    """Mean step times of one result over the batch size, with the floors. Raises BenchError."""
    return plot_latency_systems({"Measured (mean)": rows}, path, about)


def plot_latency_systems(systems: Mapping[str, Sequence[Row]], path: Path, about: str = "") -> Picture:
    """Mean step times in ms over the batch size, prefill and decode apart; floors dashed. Raises BenchError.

    about: model, hardware and load, for the title.
    """
    everything = [row for rows in systems.values() for row in rows]
    steps = [step for step in STEP_TITLES if any(row["step"] == step for row in everything)]
    figure, panels = figure_of(len(steps), "Time of one step, and the least that the device could need", about)
    for panel, step in zip(panels, steps, strict=True):
        panel.set_title(STEP_TITLES[step], fontsize=10)
        for style, (name, rows) in enumerate(systems.items()):
            mine = [row for row in rows if row["step"] == step]
            draw_line(panel, style, name, [(row["batch_size"], row["mean_ms"]) for row in mine])
            floors = [(row["batch_size"], row["floor_ms"]) for row in mine if row["floor_ms"] is not None]
            label = "Floor" if len(systems) == 1 else f"{name}, floor"
            draw_line(panel, style, label, floors, linestyle="--", marker="")
        _label(panel, "Batch size (sequences)", "Time (ms)", _values(everything, "batch_size"))
    return save(with_legend(figure, panels), path)


# -------------------------------------------------------------------------------------------------------------- drawing


def figure_of(count: int, title: str, about: str = "", *, shared: bool = False) -> tuple[Any, list[Any]]:
    """A figure with `count` panels in rows of two. about: below the title, in lines that fit. shared: the axes are."""
    columns = min(count, PANELS_ABREAST)
    lines = math.ceil(count / columns)
    size = (PANEL_INCHES[0] * max(columns, 1.2), PANEL_INCHES[1] * lines + 0.8)
    figure = _import("matplotlib.figure").Figure(figsize=size, dpi=DOTS_PER_INCH, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    figure.suptitle("\n".join([title, *textwrap.wrap(about, int(LETTERS_PER_INCH * size[0]))]))
    panels: list[Any] = []
    for number in range(count):
        first = panels[0] if shared and panels else None
        panels.append(figure.add_subplot(lines, columns, number + 1, sharex=first, sharey=first))
    return figure, panels


def draw_line(panel: Any, style: int, label: str, points: Sequence[tuple[float, float]], **changes: Any) -> None:
    """One line; the same `style` looks the same in every panel."""
    look = {"color": COLOURS[style % len(COLOURS)], "marker": MARKERS[style % len(MARKERS)], "linewidth": 1.8} | changes
    if points:
        ordered = sorted(points)
        panel.plot([x for x, _ in ordered], [y for _, y in ordered], label=label, markersize=5, **look)


def _label(panel: Any, x_label: str, y_label: str, ticks: Sequence[float]) -> None:
    """Axes with units. Lengths and batch sizes double from one to the next, so that their axis is logarithmic."""
    panel.set_xlabel(x_label)
    panel.set_ylabel(y_label)
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    _from_zero([panel])
    panel.grid(visible=True, alpha=0.35)


def _from_zero(panels: Sequence[Any]) -> None:
    """Vertical axes from 0 to the highest of all panels, with room for its marker."""
    highest = max([1e-9, *(panel.dataLim.ymax for panel in panels if math.isfinite(panel.dataLim.ymax))])
    for panel in panels:
        panel.set_ylim(0, 1.08 * highest)


def log_ticks(panel: Any) -> None:
    """A logarithmic y axis with 1, 2 and 5 of each power of ten written as numbers."""
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(_import("matplotlib.ticker").LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.minorticks_off()
    low, high = panel.get_ylim()
    if high < NARROW * low:  # what hardly differs is to look so
        panel.set_ylim(low / 2, 2 * high)


def with_legend(figure: Any, panels: Sequence[Any]) -> Any:
    """One legend below all panels."""
    found: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=min(len(found), 3))
    return figure


def save(figure: Any, path: Path) -> Picture:
    """Drawn in memory first: a picture is on the disk whole or not at all."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    try:
        write_atomically(path, drawn.getvalue())
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}; give another --output or free some space") from None
    title, *about = figure.get_suptitle().splitlines()
    return Picture(path, ": ".join(" ".join(part.split()) for part in (title, " ".join(about)) if part))


# ---------------------------------------------------------------------------------------------------------------- loads


LATENCIES = {"ttft_ms": "Time to first token", "tpot_ms": "Time per output token"}
MOST_LINES = len(COLOURS)
MOST_PANELS = 12
MOST_NAMED = 4
NO_BREAK = "\u00a0"  # a space at which no title is broken
LEAST_POINTS = 4  # of the server's counts, for a picture
SHORTEST_MS = 1e-3
BEGINNING = 10  # percents of a distribution that may lie left of the axis
LOOKS: Mapping[str, Mapping[str, str]] = {"p50": {}, "p99": {"linestyle": "--"}}


def draw_load(result: Result, folder: Path) -> list[Picture]:
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


def against_throughput(rows: Sequence[Row], path: Path, about: str) -> Picture:
    """First tokens and the others over the tokens that came in a second: a line for each pair of lengths."""
    by_lengths: dict[str, list[Row]] = {}  # streams and rates are lines of their own
    for row in rows:
        kind = "streams" if row["request_rate"] is None else "requests/s"
        by_lengths.setdefault(f"{_lengths(row)}, {kind}", []).append(row)
    chosen = _some(list(by_lengths))
    figure, panels = figure_of(2, f"Latency against throughput{_how_many(chosen, by_lengths)}", about)
    for panel, (key, title) in zip(panels, LATENCIES.items(), strict=True):
        panel.set_title(title, fontsize=10)
        for style, lengths in enumerate(chosen):
            for name, look in LOOKS.items():
                points = [(row["output_tokens_per_second"], row[key][name]) for row in by_lengths[lengths] if row[key]]
                label = f"{lengths}: {name}"
                draw_line(panel, style, label, points, **look)
            for row in by_lengths[lengths]:
                if row[key]:
                    place = (row["output_tokens_per_second"], row[key]["p50"])
                    panel.annotate(_load_label(row), place, xytext=(4, -11), textcoords="offset points", fontsize=7)
        _axes(panel, "Output tokens/s (numbers: streams or requests/s)", "ms", log_y=True)
    return save(with_legend(figure, panels), path)


def distributions(rows: Sequence[Row], path: Path, about: str) -> Picture:
    """Which share of the first tokens, and of the gaps between tokens, came within which time."""
    chosen = _some(rows)
    title = f"Times as distributions{_how_many(chosen, rows)}"
    figure, panels = figure_of(2, title, about, shared=True)
    for panel, name in zip(panels, ("Time to first token", "Gaps between tokens"), strict=True):
        panel.set_title(name, fontsize=10)
    shortest = math.inf
    for style, row in enumerate(chosen):
        found = (quantiles(row["samples"]["ttft_ms"]), row.get("inter_token_quantiles_ms") or [])
        for panel, times in zip(panels, found, strict=True):
            # Tokens that came in one piece have no gap between them, which no logarithmic axis can show.
            shortest = min([shortest, *(max(time, SHORTEST_MS) for time in times[BEGINNING:][:1])])
            look = {"color": COLOURS[style], "linewidth": 1.8, "linestyle": ("-", "--", ":", "-.")[style % 4]}
            panel.plot(
                [max(time, SHORTEST_MS) for time in times], QUANTILES[: len(times)], label=_row_label(row, rows), **look
            )
    for panel in panels:
        panel.set_xscale("log")
        _axes(panel, "ms", "% came within")
        panel.set_ylim(0, 101)
        panel.set_xlim(left=shortest / 2)
    return save(with_legend(figure, panels), path)


def over_time(rows: Sequence[Row], path: Path, about: str) -> Picture:
    """Requests that the server had in its batch and in its queue, row by row."""
    chosen = _some(rows, MOST_PANELS)
    title = f"The server's batch and queue{_how_many(chosen, rows)}"
    figure, panels = figure_of(len(chosen), title, about, shared=True)
    for panel, row in zip(panels, chosen, strict=True):
        panel.set_title(_row_label(row, rows), fontsize=10)
        times = [point["at_s"] for point in row["server_timeline"]]
        for style, (key, label) in enumerate((("running", "In the batch"), ("waiting", "Waiting"))):
            look = {"color": COLOURS[style], "linewidth": 1.8, "linestyle": ("-", "--")[style]}
            panel.step(times, [point[key] for point in row["server_timeline"]], where="post", label=label, **look)
        _axes(panel, "Seconds from the row's beginning", "Requests")
    panels[0].set_ylim(bottom=0)  # of all, once they know how high they are
    return save(with_legend(figure, panels), path)


def _axes(panel: Any, x_label: str, y_label: str, *, log_y: bool = False) -> None:
    panel.set_xlabel(x_label)
    panel.set_ylabel(y_label)
    panel.grid(visible=True, alpha=0.35)
    if log_y:
        log_ticks(panel)
        panel.set_xlim(0, 1.08 * panel.get_xlim()[1])  # room for what stands beside the last point


def _some(items: Sequence[Any], most: int = MOST_LINES) -> list[Any]:
    """At most so many of them, evenly from the first to the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(n * (len(items) - 1) / (most - 1))] for n in range(most)]


def _how_many(chosen: Sequence[Any], all_of_them: Sequence[Any] | Mapping[str, Any]) -> str:
    return "" if len(chosen) == len(all_of_them) else f" ({len(chosen)} of {len(all_of_them)} rows)"


def _lengths(row: Row) -> str:
    return f"{row['input_length']:g} in {row['output_length']:g} out"


def _load_label(row: Row) -> str:
    return f"{row['concurrency']}" if row["request_rate"] is None else f"{row['request_rate']:.3g}/s"


def _row_label(row: Row, rows: Sequence[Row]) -> str:
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
