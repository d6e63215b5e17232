"""`lockstep-bench compare`: results side by side, as ratios to the first of them, with how sure they are.

Only what was measured on the same work can be compared: the `work` of every file must be equal, or the command says
which keys differ and stops. How the systems were set up (dtype, shards, device) may differ: that is what one compares.

Intervals are percentile bootstraps (Efron 1979) of the ratio of means. They cover the scatter between the requests or
runs of one measurement, not that between two measurements of the same thing: only measuring twice shows that.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmark import page, plots
from benchmark.report import BenchError, prepare_output, show, table, write_atomically
from benchmark.stretches import STRETCHES

Row = Mapping[str, Any]

RESAMPLES = 2000  # the ends of a 95 % interval then rest on 50 resamples each
CONFIDENCE = 95.0
SEED = 0


@dataclass(frozen=True)
class ComparedMetric:
    """One figure of a row that results are compared by."""

    key: str
    title: str
    samples: tuple[str, ...] = ()  # where the row keeps what the figure is the mean of; (): one figure a run


@dataclass(frozen=True)
class ResultColumns:
    """What the rows of one command say: what each is about, and the figures to compare."""

    keys: Mapping[str, str]  # what a row is about, with the column's title
    metrics: Sequence[ComparedMetric]
    tokens: str = ""  # the key of how many tokens were produced; empty where it follows from the work


RESULT_COLUMNS: Mapping[str, ResultColumns] = {
    "latency": ResultColumns(
        keys={"step": "Step", "batch_size": "Batch Size"},
        metrics=(ComparedMetric("mean_ms", "Average (ms)", ("samples_ms",)),),
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
            ComparedMetric("requests_per_second", "Throughput (requests/s)", ("samples", "requests_per_second")),
            ComparedMetric(
                "output_tokens_per_second", "Throughput (output token/s)", ("samples", "output_tokens_per_second")
            ),
            ComparedMetric(
                "latency_per_token_ms", "Average latency per token (ms)", ("samples", "latency_per_token_ms")
            ),
            ComparedMetric(
                "latency_per_output_token_ms",
                "Average latency per output token (ms)",
                ("samples", "latency_per_output_token_ms"),
            ),
            ComparedMetric("ttft_ms", "Average TTFT (ms)", ("samples", "ttft_ms")),
            ComparedMetric("tpot_ms", "Average TPOT (ms)", ("samples", "tpot_ms")),
            ComparedMetric("e2e_ms", "Average end-to-end time (ms)", ("samples", "e2e_ms")),
        ),
    ),
    "offline": ResultColumns(
        tokens="tokens",
        keys={"step": "Step"},
        metrics=(
            ComparedMetric("latency_s", "Latency (s)"),
            ComparedMetric("tokens_per_second", "Throughput (token/s)", ("samples", "tokens_per_second")),
        ),
    ),
}


@dataclass(frozen=True)
class System:
    """One result file, and what its system is called in the comparison."""

    name: str
    path: Path
    result: Mapping[str, Any]

    def row(self, columns: ResultColumns, about: tuple[Any, ...]) -> Row | None:
        """The row about these values of the layout's keys; None if the run did not get that far."""
        return next((row for row in self.result["rows"] if about_of(row, columns) == about), None)


def about_of(row: Row, columns: ResultColumns) -> tuple[Any, ...]:
    """What a row is about: its values of the columns' keys, None where it has no such key."""
    return tuple(row.get(key) for key in columns.keys)


# --------------------------------------------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument(
        "results", type=Path, nargs="+", metavar="FILE", help="result.json files; the first is the base"
    )
    parser.add_argument("--name", nargs="+", default=[], help="what to call them (default: from their paths)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for compare.md, compare.json and plots")


def run(args: argparse.Namespace) -> int:
    """Compare the result files and print the tables; 0. Raises BenchError."""
    systems = read_systems(args.results, args.name)
    check_same_work(systems)
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
    """The systems' lines in the same panels. Raises BenchError."""
    rows = {system.name: system.result["rows"] for system in systems}
    named = [(system.result.get("model"), system.result.get("device")) for system in systems]
    about = "; ".join(dict.fromkeys(f"{model} on {device}" for model, device in named if model and device))
    if systems[0].result["command"] == "serving":
        return plots.plot_serving(rows, folder, about)
    if systems[0].result["command"] == "latency":
        return [plots.plot_latency_systems(rows, folder / "latency.png", about)]
    return []


# -------------------------------------------------------------------------------------------------------- reading


def read_systems(paths: Sequence[Path], names: Sequence[str]) -> list[System]:
    """The result files with their names. Raises BenchError for anything but two or more results."""
    if len(paths) < 2:
        raise BenchError("one result has nothing to be compared with: give two or more result.json files")
    if names and len(names) != len(paths):
        raise BenchError(f"--name has {len(names)} names for {len(paths)} files: give one for each")
    found = list(names) or _names(paths)
    if len(set(found)) != len(found):
        raise BenchError(f"the results would have the same name ({', '.join(found)}): tell them apart by --name")
    return [System(name, path, read_result(path)) for name, path in zip(found, paths, strict=True)]


def _names(paths: Sequence[Path]) -> list[str]:
    """The folder's name where all files are called alike, as `result.json` is, else the file's."""
    stems = [path.stem for path in paths]
    return stems if len(set(stems)) == len(stems) else [path.absolute().parent.name for path in paths]


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
            f"{path} is not a result of lockstep-bench {', '.join(RESULT_COLUMNS)}: give the result.json files"
        )
    if isinstance(counts := result.get("num_shard"), list):
        raise BenchError(
            f"{path} has {len(counts)} numbers of shards, {' '.join(map(str, counts))}: measure each into a folder of "
            "its own to compare it"
        )
    return result


def check_same_work(systems: Sequence[System]) -> None:
    """Refuse results of different work: raises BenchError naming what differs from the first one."""
    base, *others = systems
    for other in others:
        mine, theirs = _work(base), _work(other)
        differing = [key for key in sorted({*mine, *theirs}) if mine.get(key) != theirs.get(key)]
        if differing:
            pairs = "; ".join(f"{key} is {mine.get(key)} and {theirs.get(key)}" for key in differing)
            raise BenchError(f"{base.path} and {other.path} were not measured on the same work: {pairs}")


def _work(system: System) -> dict[str, Any]:
    return {"command": system.result["command"], **system.result["work"]}


# ------------------------------------------------------------------------------------------------------ comparing


def compare(systems: Sequence[System]) -> list[dict[str, Any]]:
    """One entry for each measure of each row that every system has, in the first system's order."""
    columns = RESULT_COLUMNS[systems[0].result["command"]]
    entries = []
    for row in systems[0].result["rows"]:
        rows = [system.row(columns, about_of(row, columns)) for system in systems]
        present = [row for row in rows if row is not None]
        if len(present) == len(systems):
            entries += [_entry(columns, metric, systems, present) for metric in columns.metrics]
    if not entries:
        raise BenchError("the results have no row in common: both runs stopped before any was finished")
    return entries


def _entry(
    columns: ResultColumns, metric: ComparedMetric, systems: Sequence[System], rows: Sequence[Row]
) -> dict[str, Any]:
    values = [_value(row, metric) for row in rows]
    samples = [_samples(row, metric) for row in rows]
    figures = {
        system.name: {
            "value": value,
            "ratio": value / values[0] if value is not None and values[0] else None,
            "interval": bootstrap_ratio(samples[0], own) if system is not systems[0] else None,
        }
        for system, value, own in zip(systems, values, samples, strict=True)
    }
    about = dict(zip(columns.keys, about_of(rows[0], columns), strict=True))
    return {**about, "measure": metric.key, "title": metric.title, "systems": figures}


def _value(row: Row, metric: ComparedMetric) -> float | None:
    """The figure that the row has for the metric; None where every request of the row failed."""
    value = row.get(metric.key)
    number: float | None = value["mean"] if isinstance(value, Mapping) else value
    return number


def _samples(row: Row, metric: ComparedMetric) -> list[float]:
    found: Any = row if metric.samples else []
    for key in metric.samples:
        found = found.get(key, {})
    return list(found)


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
    columns = RESULT_COLUMNS[systems[0].result["command"]]
    base, found = systems[0], []
    for row in base.result["rows"]:
        about = about_of(row, columns)
        for other in systems[1:]:
            mine, theirs = _tokens(row, columns), _tokens(other.row(columns, about), columns)
            if mine is not None and theirs is not None and mine != theirs:
                found.append(UnequalTokens(_named(columns, about), base.name, mine, other.name, theirs))
    return found


def _tokens(row: Row | None, columns: ResultColumns) -> int | None:
    """How many tokens a row's system produced; None where the row is missing or does not tell.

    Of older results it follows from the rate and the time.
    """
    if row is None or not columns.tokens:
        return None
    if columns.tokens in row:
        return int(row[columns.tokens])
    rate, seconds = row.get("output_tokens_per_second"), row.get("seconds")
    return None if rate is None or seconds is None else round(rate * seconds)


def _named(columns: ResultColumns, about: tuple[Any, ...]) -> str:
    titles = zip(columns.keys.values(), about, strict=True)
    return ", ".join(f"{title} {value}" for title, value in titles if value is not None)


def bootstrap_ratio(base: Sequence[float], other: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of mean(other) / mean(base), both resampled; None with fewer than two samples of either."""
    if min(len(base), len(other)) < 2:
        return None
    random = np.random.default_rng(SEED)
    ratios = _resampled_means(other, random) / _resampled_means(base, random)
    tail = (100 - CONFIDENCE) / 2
    low, high = np.percentile(ratios, [tail, 100 - tail])
    return float(low), float(high)


def _resampled_means(samples: Sequence[float], random: np.random.Generator) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[RESAMPLES]; one at a time, because all indexes at once can be gigabytes."""
    values = np.asarray(samples, dtype=np.float64)
    return np.array([values[random.integers(len(values), size=len(values))].mean() for _ in range(RESAMPLES)])


# --------------------------------------------------------------------------------------------------------- report


def to_json(systems: Sequence[System], rows: Sequence[Row]) -> dict[str, Any]:
    """The whole comparison as one JSON object."""
    files = [{"name": system.name, "path": str(system.path)} for system in systems]
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
    columns = RESULT_COLUMNS[systems[0].result["command"]]
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


def _ratio(figure: Mapping[str, Any]) -> str:
    if figure["ratio"] is None:
        return "-"
    interval = figure["interval"]
    return f"{figure['ratio']:.3f}" + (f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval else "")


def _notes(systems: Sequence[System], rows: Sequence[Row]) -> list[str]:
    columns = RESULT_COLUMNS[systems[0].result["command"]]
    notes = [
        *map(str, unequal_tokens(systems)),
        f"In brackets: {CONFIDENCE:g} % bootstrap interval of the ratio of means, {RESAMPLES} resamples, seed {SEED}. "
        "It covers the scatter within these measurements, not that between repeated ones. A throughput is the mean of "
        f"those in {STRETCHES} equal stretches of its run. A figure of which a run has only one has no interval.",
    ]
    compared = {tuple(row[key] for key in columns.keys) for row in rows}
    for system in systems:
        own = system.result["rows"]
        described = ", ".join(str(system.result.get(key)) for key in ("model", "device", "dtype", "commit", "date"))
        notes.append(f"{system.name}: {described}, from {system.path}.")
        if left_out := sum(about_of(row, columns) not in compared for row in own):
            notes.append(f"{system.name} has {left_out} more rows that not every result has.")
        if errors := sum(row.get("errors") or 0 for row in own):
            notes.append(f"{system.name} had {errors} failed requests, which are in no figure here.")
    return notes
