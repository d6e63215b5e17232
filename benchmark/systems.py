"""Result files as systems to compare: which figures their rows have, which files are starts of one system, and whether
all of them were measured on the same work.

A file is a system of one start; a folder is one system, and every `result.json` below it a start. How systems were set
up (dtype, shards, device) may differ: that is what one compares. The starts of one may not. What the figures say beside
each other is in `compare.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.report import BenchError

Row = Mapping[str, Any]

RESULT_FILE = "result.json"
SETUP = ("model", "device", "dtype", "num_shard", "quantize", "commit")  # the same in every start of a system, and
OWN_ARGUMENTS = ("output", "url")  # what was said on the command line, but for these


@dataclass(frozen=True)
class ComparedMetric:
    """One figure of a row that results are compared by."""

    key: str
    title: str
    samples: tuple[str, ...] = ()  # where the row keeps what the figure is the mean of; (): one figure a run

    def value(self, row: Row) -> float | None:
        """The figure that the row has; None where every request of the row failed."""
        value = row.get(self.key)
        number: float | None = value["mean"] if isinstance(value, Mapping) else value
        return number

    def samples_of(self, row: Row) -> list[float]:
        """What the row's figure is the mean of, in the order of time; empty where it does not say."""
        found: Any = row if self.samples else {}
        for key in self.samples:
            found = found.get(key, {})
        return list(found)


@dataclass(frozen=True)
class ResultColumns:
    """What the rows of one command say: what each is about, and the figures to compare."""

    keys: Mapping[str, str]  # what a row is about, with the column's title
    metrics: Sequence[ComparedMetric]
    tokens: str = ""  # the key of how many tokens were produced; empty where it follows from the work

    def about(self, row: Row) -> tuple[Any, ...]:
        """What a row is about: its values of the keys, None where it has no such key."""
        return tuple(row.get(key) for key in self.keys)


def _sampled(key: str, title: str) -> ComparedMetric:
    return ComparedMetric(key, title, ("samples", key))


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
            _sampled("requests_per_second", "Throughput (requests/s)"),
            _sampled("output_tokens_per_second", "Throughput (output token/s)"),
            _sampled("latency_per_token_ms", "Average latency per token (ms)"),
            _sampled("latency_per_output_token_ms", "Average latency per output token (ms)"),
            _sampled("ttft_ms", "Average TTFT (ms)"),
            _sampled("tpot_ms", "Average TPOT (ms)"),
            _sampled("e2e_ms", "Average end-to-end time (ms)"),
        ),
    ),
    "offline": ResultColumns(
        tokens="tokens",
        keys={"step": "Step"},
        metrics=(
            ComparedMetric("latency_s", "Latency (s)"),
            _sampled("tokens_per_second", "Throughput (token/s)"),
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
