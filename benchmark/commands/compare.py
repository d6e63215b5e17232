"""`lockstep-bench compare`: results side by side, as ratios to the first of them, and whether the systems differ.

A file is a system of one start; a folder is one system, and every `result.json` below it a start. Only what was
measured on the same work can be compared: the `work` of every file must be equal, or the command says which keys differ
and stops. How systems were set up (dtype, shards, device) may differ: that is what one compares; the starts of one may
not. Whether systems differ is told by several starts of each; of one start there is an interval for its own scatter,
and no verdict. How much to measure is in docs/benchmarking.md.

Two starts of the same system differ by more than their own scatter shows (memory lands elsewhere, clocks and neighbours
are others), so only the scatter between starts says whether systems differ: `between_starts`, by Welch's t-interval
(Biometrika 34, 1947) of the logarithms, which holds for few starts.

Left out: percentiles other than means of samples, intervals within one start, in which requests that queue behind each
other are no independent samples, and corrections for looking at many ratios at once. How often intervals err is held by
`tests/benchmark/commands/test_intervals.py`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple

import numpy as np

from benchmark.report import pictures, publishing
from benchmark.result import BenchError, prepare_output, show, table, write_atomically

MATTERS = 1.1  # a ratio that is surely nearer to 1 is called the same
DIFFERS, SAME, UNKNOWN = "differs", "same", "cannot tell"
ONE_START = "one start of a system does not say how far its starts lie apart: measure several (five find 10 %)"
WIDE = "the interval holds 1 and more than 10 %: measure more starts, or longer ones"
NO_FIGURE = "a start has no figure, or 0: nothing succeeded there"


# --------------------------------------------------------------------------------------------------------- command line


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
        pictures.require_matplotlib()
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
    publishing.write_page(publishing.Page(title, [], _drawn(folder, systems), text), folder)


def _drawn(folder: Path, systems: Sequence[System]) -> list[pictures.Picture]:
    """The systems' lines in the same panels, each of its first start. Raises BenchError."""
    rows = {system.name: system.result["rows"] for system in systems}
    named = [(system.result.get("model"), system.result.get("device")) for system in systems]
    about = "; ".join(dict.fromkeys(f"{model} on {device}" for model, device in named if model and device))
    about += "; first starts" if any(len(system.starts) > 1 for system in systems) else ""
    if systems[0].result["command"] == "serving":
        return pictures.plot_serving(rows, folder, about)
    if systems[0].result["command"] == "latency":
        return [pictures.plot_latency_systems(rows, folder / "latency.png", about)]
    return []


# ------------------------------------------------------------------------------------------------------------ comparing


@dataclass(frozen=True)
class Figure:
    """What one system has of a metric, beside the base."""

    value: float | None  # of several starts the geometric mean
    ratio: float | None = None  # to the base's; None where there is none
    interval: Interval | None = None  # of the ratio, over starts
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
        return replace(figure, reason=ONE_START)
    try:
        interval = between_starts(_values(metric, base), _values(metric, other))
    except TooShort as error:
        return replace(figure, reason=str(error))
    verdict = _verdict(interval)
    return replace(figure, interval=interval, verdict=verdict, reason=WIDE if verdict == UNKNOWN else "")


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


# --------------------------------------------------------------------------------------------------------------- report


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
    span = figure["interval"]
    around = f" ({span[0]:.3f} to {span[1]:.3f})" if span else ""
    return f"{figure['ratio']:.3f}{around}: {figure['verdict']}"


def _notes(systems: Sequence[System], rows: Sequence[Row]) -> Iterator[str]:
    columns = systems[0].columns
    yield from map(str, unequal_tokens(systems))
    yield (
        f"In brackets: {100 * CONFIDENCE:g} % intervals of the ratio. {DIFFERS}: 1 is outside. {SAME}: all "
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


# -------------------------------------------------------------------------------------------------------------- systems


Row = Mapping[str, Any]

RESULT_FILE = "result.json"
SETUP = ("model", "device", "dtype", "num_shard", "quantize", "commit")  # the same in every start of a system, and
OWN_ARGUMENTS = ("output", "url")  # what was said on the command line, but for these


@dataclass(frozen=True)
class ComparedMetric:
    """One figure of a row that results are compared by."""

    key: str
    title: str

    def value(self, row: Row) -> float | None:
        """The figure that the row has; None where every request of the row failed."""
        value = row.get(self.key)
        number: float | None = value["mean"] if isinstance(value, Mapping) else value
        return number


@dataclass(frozen=True)
class ResultColumns:
    """What the rows of one command say: what each is about, and the figures to compare."""

    keys: Mapping[str, str]  # what a row is about, with the column's title
    metrics: Sequence[ComparedMetric]
    tokens: str = ""  # the key of how many tokens were produced; empty where it follows from the work

    def about(self, row: Row) -> tuple[Any, ...]:
        """What a row is about: its values of the keys, None where it has no such key."""
        return tuple(row.get(key) for key in self.keys)


RESULT_COLUMNS: Mapping[str, ResultColumns] = {
    "latency": ResultColumns(
        keys={"step": "Step", "batch_size": "Batch Size"}, metrics=(ComparedMetric("mean_ms", "Average (ms)"),)
    ),
    "serving": ResultColumns(
        tokens="output_tokens",
        keys={
            "input_length": "Input Length",
            "output_length": "Output Length",
            "concurrency": "Concurrency",
            "request_rate": "Request Rate",
        },
        metrics=(
            ComparedMetric("requests_per_second", "Throughput (requests/s)"),
            ComparedMetric("output_tokens_per_second", "Throughput (output token/s)"),
            ComparedMetric("latency_per_token_ms", "Average latency per token (ms)"),
            ComparedMetric("latency_per_output_token_ms", "Average latency per output token (ms)"),
            ComparedMetric("ttft_ms", "Average TTFT (ms)"),
            ComparedMetric("tpot_ms", "Average TPOT (ms)"),
            ComparedMetric("e2e_ms", "Average end-to-end time (ms)"),
        ),
    ),
    "offline": ResultColumns(
        tokens="tokens",
        keys={"step": "Step"},
        metrics=(
            ComparedMetric("latency_s", "Latency (s)"),
            ComparedMetric("tokens_per_second", "Throughput (token/s)"),
        ),
    ),
}


@dataclass(frozen=True)
class Start:
    """One result file."""

    path: Path
    result: Mapping[str, Any]

    @property
    def work(self) -> dict[str, Any]:
        """What was measured, and by which command."""
        return {"command": self.result["command"], **self.result["work"]}


@dataclass(frozen=True)
class System:
    """What a system is called in the comparison, and the results of its starts, at least one."""

    name: str
    path: Path
    starts: Sequence[Start]

    @property
    def result(self) -> Mapping[str, Any]:
        """The first start's: what is said there of the system holds for all."""
        return self.starts[0].result

    @property
    def columns(self) -> ResultColumns:
        """What its rows say."""
        return RESULT_COLUMNS[self.result["command"]]

    def rows(self, about: tuple[Any, ...]) -> list[Row] | None:
        """Every start's row about these values of the keys; None if one did not get that far."""
        rows = [
            next((row for row in start.result["rows"] if self.columns.about(row) == about), None)
            for start in self.starts
        ]
        found = [row for row in rows if row is not None]
        return found if len(found) == len(rows) else None


def read_systems(paths: Sequence[Path], names: Sequence[str]) -> list[System]:
    """The files and folders with their names. Raises BenchError for anything but two or more, of the same work."""
    if len(paths) < 2:
        raise BenchError(
            f"one result has nothing to be compared with: give two or more {RESULT_FILE} files, or folders of them"
        )
    if names and len(names) != len(paths):
        raise BenchError(f"--name has {len(names)} names for {len(paths)} results: give one for each")
    found = list(names) or _names(paths)
    if len(set(found)) != len(found):
        raise BenchError(f"the results would have the same name ({', '.join(found)}): tell them apart by --name")
    systems = [System(name, path, _starts(path)) for name, path in zip(found, paths, strict=True)]
    _check_same_work(systems)
    return systems


def _names(paths: Sequence[Path]) -> list[str]:
    """The folder's name, or the file's without its end; that of the folder around where all are called alike."""
    names = [_name(path.absolute()) for path in paths]
    return names if len(set(names)) == len(names) else [path.absolute().parent.name for path in paths]


def _name(path: Path) -> str:
    if path.is_dir():
        return path.name
    return path.parent.name if path.name == RESULT_FILE else path.stem


def _starts(path: Path) -> list[Start]:
    """The starts of a system. Raises BenchError where there are none, or not all of one system."""
    files = sorted(path.rglob(RESULT_FILE)) if path.is_dir() else [path]
    if not files:
        raise BenchError(f"there is no {RESULT_FILE} below {path}: measure with --output {path / '1'}")
    starts = [Start(file, read_result(file)) for file in files]
    for other in starts[1:]:
        if pairs := _differing(_setup(starts[0]), _setup(other)):
            raise BenchError(
                f"{starts[0].path} and {other.path} are no starts of one system: {pairs}; give them as two systems"
            )
    return starts


def _setup(start: Start) -> dict[str, Any]:
    said = start.result.get("arguments", {})
    return {key: start.result.get(key) for key in SETUP} | {
        key: value for key, value in said.items() if key not in OWN_ARGUMENTS
    }


def read_result(path: Path) -> Mapping[str, Any]:
    """The JSON of one result file. Raises BenchError when it is not a result that can be compared."""
    try:
        result = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read {path}: {error}") from None
    except ValueError:
        result = None
    wanted = {"command", "work", "rows"}
    if not isinstance(result, dict) or not wanted <= result.keys() or result["command"] not in RESULT_COLUMNS:
        raise BenchError(
            f"{path} is not a result of lockstep-bench {', '.join(RESULT_COLUMNS)}: give the {RESULT_FILE} files"
        )
    if isinstance(counts := result.get("num_shard"), list):
        raise BenchError(
            f"{path} has {len(counts)} numbers of shards, {' '.join(map(str, counts))}: measure each into a folder of "
            "its own to compare it"
        )
    return result


def _check_same_work(systems: Sequence[System]) -> None:
    """Refuse results of different work: raises BenchError naming what differs from the first one."""
    base, *others = (start for system in systems for start in system.starts)
    for other in others:
        if pairs := _differing(base.work, other.work):
            raise BenchError(f"{base.path} and {other.path} were not measured on the same work: {pairs}")


def _differing(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    return "; ".join(_pairs(mine, theirs))


def _pairs(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    """`key is this and that` of every key that differs."""
    for key in sorted({*mine, *theirs}):
        if mine.get(key) != theirs.get(key):
            yield f"{key} is {mine.get(key)} and {theirs.get(key)}"


# ------------------------------------------------------------------------------------------------------------ intervals


CONFIDENCE = 0.95


class Interval(NamedTuple):
    """Where a ratio is with a probability of `CONFIDENCE`."""

    low: float
    high: float

    @classmethod
    def around(cls, log_ratio: float, deviation: float, freedom: float) -> Interval:
        """Student's interval of a ratio whose logarithm has this standard error, of so many degrees of freedom."""
        reach = t_quantile(freedom) * deviation
        return cls(math.exp(log_ratio - reach), math.exp(log_ratio + reach))


class TooShort(ValueError):
    """There is too little to say how sure a ratio is; the message says what is missing."""


def t_quantile(freedom: float) -> float:
    """What Student's t of at least one degree of freedom does not exceed, in either direction, in 95 of 100 cases.

    With t = sqrt(freedom) tan(a), the density of a is in proportion to cos(a) ** (freedom - 1).
    """
    angles = np.linspace(0.0, math.pi / 2, 4001)
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate(([0.0], np.cumsum(density[1:] + density[:-1])))
    return math.sqrt(freedom) * math.tan(float(np.interp(CONFIDENCE, below / below[-1], angles)))


def between_starts(base: Sequence[float], other: Sequence[float]) -> Interval:
    """Interval of other / base from the figure of each start of either, above zero. Raises TooShort."""
    if min(len(base), len(other)) < 2:
        raise TooShort("one start does not say how far two starts of the same system differ")
    logs = [np.log(np.asarray(figures, dtype=np.float64)) for figures in (base, other)]
    variances = [float(one.var(ddof=1)) / len(one) for one in logs]
    if not (total := sum(variances)):
        raise TooShort("all starts have the same figure to the last digit: are they copies of one?")
    parts = [variance**2 / (len(one) - 1) for variance, one in zip(variances, logs, strict=True)]
    return Interval.around(float(logs[1].mean() - logs[0].mean()), math.sqrt(total), total**2 / sum(parts))
