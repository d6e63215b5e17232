"""`lockstep-bench compare`: results side by side, as ratios to the first of them, and whether the systems differ.

Only what was measured on the same work can be compared: the `work` of every file must be equal, or the command says
which keys differ and stops. Whether systems differ is told by several starts of each; of one start there is an interval
for its own scatter, and no verdict. Which files are starts of one system is in `systems.py`, the statistics in
`intervals.py`, and how much to measure in docs/serving-benchmark.md.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from benchmark import intervals, page, plots
from benchmark.intervals import Interval, TooShort
from benchmark.report import BenchError, prepare_output, show, table, write_atomically
from benchmark.systems import ComparedMetric, ResultColumns, Row, System, read_systems

MATTERS = 1.1  # a ratio that is surely nearer to 1 is called the same
DIFFERS, SAME, UNKNOWN = "differs", "same", "cannot tell"
ONE_START = "one start of a system does not say how far its starts lie apart: measure several (five find 10 %)"
WIDE = "the interval holds 1 and more than 10 %: measure more starts, or longer ones"
NO_FIGURE = "a start has no figure, or 0: nothing succeeded there"


# --------------------------------------------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument(
        "results", type=Path, nargs="+", metavar="PATH",
        help="a result.json, or a folder with the result.json of each start of a system; the first is the baseline",
    )  # fmt: skip
    parser.add_argument("--name", nargs="+", default=[], help="names of the systems (default: from their paths)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for compare.md, compare.json and plots")


def run(args: argparse.Namespace) -> int:
    """Compare the systems and print the tables; 0. Raises BenchError."""
    systems = read_systems(args.results, args.name)
    prepare_output(args.output)
    if args.output is not None:
        plots.require_matplotlib()
    rows = compare(systems)
    text = markdown(systems, rows)
    answer = json.dumps(to_json(systems, rows), allow_nan=False)
    show(text, answer, args.output and args.output / "compare.json")
    if args.output is not None:
        _write(args.output, systems, text, answer)
    return 0


def _write(folder: Path, systems: Sequence[System], text: str, answer: str) -> None:
    try:
        write_atomically(folder / "compare.md", text + "\n")
        write_atomically(folder / "compare.json", answer + "\n")
    except OSError as error:
        raise BenchError(f"cannot write to {folder}: {error.strerror}; give another --output") from None
    title = f"{systems[0].result['command']}: {' beside '.join(system.name for system in systems)}"
    page.write(page.Page(title, [], _drawn(folder, systems), text), folder)


def _drawn(folder: Path, systems: Sequence[System]) -> list[plots.Picture]:
    """The systems' lines in the same panels, each of its first start. Raises BenchError."""
    rows = {system.name: system.result["rows"] for system in systems}
    named = [(system.result.get("model"), system.result.get("device")) for system in systems]
    about = "; ".join(dict.fromkeys(f"{model} on {device}" for model, device in named if model and device))
    about += "; first starts" if any(len(system.starts) > 1 for system in systems) else ""
    if systems[0].result["command"] == "serving":
        return plots.plot_serving(rows, folder, about)
    if systems[0].result["command"] == "latency":
        return [plots.plot_latency_systems(rows, folder / "latency.png", about)]
    return []


# ------------------------------------------------------------------------------------------------------ comparing


@dataclass(frozen=True)
class Figure:
    """What one system has of a metric, beside the base."""

    value: float | None  # of several starts the geometric mean
    ratio: float | None = None  # to the base's; None where there is none
    interval: Interval | None = None  # of the ratio, over starts
    within_start: Interval | None = None  # of the ratio of these two starts, which says nothing of others
    verdict: str | None = None  # None: the base
    reason: str = ""  # why the verdict is not known


def compare(systems: Sequence[System]) -> list[dict[str, Any]]:
    """One entry for each measure of each row that every start has, in the first one's order. Raises BenchError."""
    columns = systems[0].columns
    entries = []
    for row in systems[0].result["rows"]:
        rows = [found for system in systems if (found := system.rows(columns.about(row))) is not None]
        if len(rows) == len(systems):
            entries += [_entry(columns, metric, systems, rows) for metric in columns.metrics]
    if not entries:
        raise BenchError("the results have no row in common: a run stopped before any was finished")
    return entries


def _entry(
    columns: ResultColumns, metric: ComparedMetric, systems: Sequence[System], rows: Sequence[Sequence[Row]]
) -> dict[str, Any]:
    figures = {
        system.name: asdict(
            figure_of(metric, rows[0], own) if system is not systems[0] else Figure(_value(metric, own))
        )
        for system, own in zip(systems, rows, strict=True)
    }
    about = dict(zip(columns.keys, columns.about(rows[0][0]), strict=True))
    return {**about, "measure": metric.key, "title": metric.title, "systems": figures}


def figure_of(metric: ComparedMetric, base: Sequence[Row], other: Sequence[Row]) -> Figure:
    """A metric of a system beside the base's, from the rows of either one's starts."""
    value, base_value = _value(metric, other), _value(metric, base)
    if not value or not base_value:
        ratio = value / base_value if base_value and value is not None else None
        return Figure(value, ratio, verdict=UNKNOWN, reason=NO_FIGURE)
    figure = Figure(value, value / base_value, verdict=UNKNOWN)
    if min(len(base), len(other)) == 1:
        return _of_one_start(figure, metric, base, other)
    try:
        interval = intervals.between_starts(_values(metric, base), _values(metric, other))
    except TooShort as error:
        return replace(figure, reason=str(error))
    verdict = _verdict(interval)
    return replace(figure, interval=interval, verdict=verdict, reason=WIDE if verdict == UNKNOWN else "")


def _of_one_start(figure: Figure, metric: ComparedMetric, base: Sequence[Row], other: Sequence[Row]) -> Figure:
    """The figure with the interval within a start of each, where there is one of each and enough of it."""
    if max(len(base), len(other)) > 1 or not metric.samples:
        return replace(figure, reason=ONE_START)
    samples = [metric.samples_of(row) for row in (base[0], other[0])]
    try:
        _check_samples(metric, base[0], other[0])
        within = intervals.within_a_start(*samples)
    except TooShort as error:
        return replace(figure, reason=f"{ONE_START}; of this one there is no interval, because {error}")
    return replace(figure, within_start=within, reason=ONE_START)


def _check_samples(metric: ComparedMetric, *rows: Row) -> None:
    """Raises TooShort for a row whose samples are not of its figure, as in results of older versions."""
    for row in rows:
        samples, value = metric.samples_of(row), metric.value(row)
        if not samples or value is None or not math.isclose(fmean(samples), value, rel_tol=1e-6):
            raise TooShort("an older version measured it, whose samples have another mean")


def _value(metric: ComparedMetric, rows: Sequence[Row]) -> float | None:
    """The geometric mean of the starts' figures; None where one has none, 0 where one is 0."""
    found = _values(metric, rows)
    if len(found) < len(rows):
        return None
    return geometric_mean(found) if all(found) else 0.0


def _values(metric: ComparedMetric, rows: Sequence[Row]) -> list[float]:
    return [value for row in rows if (value := metric.value(row)) is not None]


def _verdict(interval: Interval) -> str:
    if interval.low > 1 or interval.high < 1:
        return DIFFERS
    return SAME if 1 / MATTERS < interval.low and interval.high < MATTERS else UNKNOWN


@dataclass(frozen=True)
class UnequalTokens:
    """A row of which two systems did not produce the same number of tokens: its times and rates decide nothing."""

    about: str
    base: str
    base_tokens: int
    other: str
    other_tokens: int

    def __str__(self) -> str:
        fewer, more = sorted(
            [(self.base_tokens, self.base), (self.other_tokens, self.other)], key=lambda counted: counted[0]
        )
        return (
            f"**{self.about}: {fewer[1]} produced {fewer[0]} tokens and {more[1]} {more[0]}: "
            f"{100 * (1 - fewer[0] / more[0]):.1f} % are missing.** What {fewer[1]} is better at here is no win: "
            "compare where both answers are whole."
        )


def unequal_tokens(systems: Sequence[System]) -> list[UnequalTokens]:
    """The rows of which a system did not produce as many tokens as the first one."""
    columns = systems[0].columns
    base, found = systems[0], []
    for row in base.result["rows"]:
        about = columns.about(row)
        for other in systems[1:]:
            mine, theirs = _tokens(base, about), _tokens(other, about)
            if mine is not None and theirs is not None and mine != theirs:
                found.append(UnequalTokens(_named(columns, about), base.name, mine, other.name, theirs))
    return found


def _tokens(system: System, about: tuple[Any, ...]) -> int | None:
    """How many tokens a start produced, on average; None where a row is missing or does not tell."""
    counts = [_tokens_of(row, system.columns) for row in system.rows(about) or []]
    known = [count for count in counts if count is not None]
    return round(fmean(known)) if known and len(known) == len(counts) else None


def _tokens_of(row: Row, columns: ResultColumns) -> int | None:
    """How many tokens a row's start produced. Of older results it follows from the rate and the time."""
    if not columns.tokens:
        return None
    if columns.tokens in row:
        return int(row[columns.tokens])
    rate, seconds = row.get("output_tokens_per_second"), row.get("seconds")
    return None if rate is None or seconds is None else round(rate * seconds)


def _named(columns: ResultColumns, about: tuple[Any, ...]) -> str:
    titles = zip(columns.keys.values(), about, strict=True)
    return ", ".join(f"{title} {value}" for title, value in titles if value is not None)


# --------------------------------------------------------------------------------------------------------- report


def to_json(systems: Sequence[System], rows: Sequence[Row]) -> dict[str, Any]:
    """The whole comparison as one JSON object."""
    files = [
        {"name": system.name, "path": str(system.path), "starts": [str(start.path) for start in system.starts]}
        for system in systems
    ]
    unequal = [asdict(one) for one in unequal_tokens(systems)]
    return {
        "command": "compare",
        "of": systems[0].result["command"],
        "systems": files,
        "unequal_tokens": unequal,
        "rows": list(rows),
    }


def markdown(systems: Sequence[System], rows: Sequence[Row]) -> str:
    """One table for each metric, and what to know about it."""
    columns = systems[0].columns
    shown = {key: title for key, title in columns.keys.items() if any(row[key] is not None for row in rows)}
    base, *others = [system.name for system in systems]
    headers = [*shown.values(), base, *(part for name in others for part in (name, f"{name} / {base}"))]
    parts = []
    for metric in columns.metrics:
        cells = [_cells(row, shown) for row in rows if row["measure"] == metric.key]
        parts += [f"## {metric.title}", table(headers, cells, centred=True)]
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in _notes(systems, rows))])


def _cells(row: Row, shown: Mapping[str, str]) -> list[str]:
    base, *others = row["systems"].values()
    about = ["-" if row[key] is None else str(row[key]) for key in shown]
    return [*about, _number(base["value"]), *(text for one in others for text in (_number(one["value"]), _ratio(one)))]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _ratio(figure: Row) -> str:
    if figure["ratio"] is None:
        return "-"
    span, place = (figure["interval"], "") if figure["interval"] else (figure["within_start"], " within one start")
    around = f" ({span[0]:.3f} to {span[1]:.3f}{place})" if span else ""
    return f"{figure['ratio']:.3f}{around}: {figure['verdict']}"


def _notes(systems: Sequence[System], rows: Sequence[Row]) -> Iterator[str]:
    columns = systems[0].columns
    yield from map(str, unequal_tokens(systems))
    yield (
        f"In brackets: {100 * intervals.CONFIDENCE:g} % intervals of the ratio. {DIFFERS}: 1 is outside. {SAME}: all "
        f"of it is within {100 * (MATTERS - 1):.0f} % of 1. Of equal systems one ratio in twenty is said to differ."
    )
    figures = [figure for row in rows for figure in row["systems"].values()]
    for reason in dict.fromkeys(figure["reason"] for figure in figures if figure["reason"]):
        count = sum(figure["reason"] == reason for figure in figures)
        yield f"{UNKNOWN.capitalize()}, {count} {'ratio' if count == 1 else 'ratios'}: {reason}."
    compared = {tuple(row[key] for key in columns.keys) for row in rows}
    for system in systems:
        yield from _notes_of(system, compared)


def _notes_of(system: System, compared: set[tuple[Any, ...]]) -> Iterator[str]:
    described = ", ".join(str(system.result.get(key)) for key in ("model", "device", "dtype", "commit", "date"))
    starts = f"{len(system.starts)} starts, their geometric means; the first: " if len(system.starts) > 1 else ""
    yield f"{system.name}: {starts}{described}, from {system.path}."
    own = [row for start in system.starts for row in start.result["rows"]]
    if left_out := len({system.columns.about(row) for row in own} - compared):
        yield f"{system.name} has {left_out} more rows that not every result has."
    if errors := sum(row.get("errors") or 0 for row in own):
        yield f"{system.name} had {errors} failed requests, which are in no figure here."
