"""The cells of a race: who runs which shape in which format at which size, and the file of what came of each.

The file has a JSON object a line, written as soon as a cell has ended. So a race that is broken off has said something,
and one that is started again goes on behind the cells that it finds. Left out: how a cell is run (`systems.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from benchmark import options
from benchmark.result import BenchError

STEPS, SERVED = "steps", "served"


class Format(NamedTuple):
    """How weights are stored: bits of most of them, and what Lockstep calls the nearest that it has."""

    bits: int
    quantize: str | None


FORMATS: Mapping[str, Format] = {
    "bf16": Format(16, None),
    "f16": Format(16, None),
    "int8": Format(8, "int8"),
    "int4": Format(4, "int4"),
    "q4_k_m": Format(4, "int4"),
}


T = TypeVar("T")


class Size(NamedTuple):
    """Tokens of each prompt, and how many sequences, or clients, there are at a time."""

    prompt_tokens: int
    batch_size: int


class Entry(NamedTuple):
    """A shape, and the sizes at which it is run."""

    shape: str
    sizes: tuple[Size, ...]


STEP_SIZES = (Size(100, 1), Size(100, 8), Size(100, 32), Size(512, 1), Size(512, 8), Size(512, 32), Size(4096, 1))
SERVED_SIZES = (Size(100, 1), Size(100, 8), Size(100, 32))


def entry(text: str) -> Entry:
    """An argparse type: `SHAPE`, or `SHAPE=100x1,512x8` with sizes of its own, prompt tokens x sequences."""
    shape, _, sizes = text.partition("=")
    return Entry(shape, tuple(_size(one) for one in sizes.split(",")) if sizes else ())


def _size(text: str) -> Size:
    parts = text.split("x")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"{text} is no size: write prompt tokens and sequences as 100x8")
    return Size(*map(options.positive, parts))


@dataclass(frozen=True)
class Cell:
    """One measurement of one system. batch_size: sequences of a batch, or clients of a server."""

    kind: str  # STEPS or SERVED
    shape: str
    format: str
    prompt_tokens: int
    batch_size: int
    decode_length: int
    system: str
    round: int

    @property
    def bits(self) -> int:
        """Of a weight."""
        return FORMATS[self.format].bits

    def __str__(self) -> str:
        what = f"{self.shape} {self.format}, {self.prompt_tokens} x {self.batch_size}"
        return f"{self.system}, {what}{', served' if self.kind == SERVED else ''}"


def cells_of(
    steps: Sequence[Entry],
    served: Sequence[Entry],
    systems: Mapping[str, Sequence[str]],
    formats: Sequence[str],
    rounds: int,
    decode_length: int,
) -> list[Cell]:
    """All cells in the order in which they run: of one shape in one format, whose models are used up before the next
    ones are made, round by round, and of each size all systems in turn. systems: names, with the formats that each has.
    """
    sizes: dict[str, list[tuple[str, Size]]] = {}
    for kind, entries, default in ((STEPS, steps, STEP_SIZES), (SERVED, served, SERVED_SIZES)):
        for one in entries:
            sizes.setdefault(one.shape, []).extend((kind, size) for size in one.sizes or default)
    return [
        Cell(kind, shape, format, *size, decode_length, system, number)
        for shape, format, number in product(sizes, formats, range(1, rounds + 1))
        for kind, size in sizes[shape]
        for system, known in systems.items()
        if format in known
    ]


MODEL = ("shape", "format", "system")  # fields of cells that have the same model
AMOUNTS = ("prompt_tokens", "batch_size", "decode_length")


FIGURES = {STEPS: ("prefill_ms", "decode_ms"), SERVED: ("tokens_per_second", "ttft_ms", "gap_ms", "gap_p99_ms")}


@dataclass(frozen=True)
class Setup:
    """What decides the figures of all cells besides what these say themselves."""

    processor: str
    threads: int
    runs: int


class Records:
    """What came of the cells that have ended, kept in a file. A record is a cell's fields, the setup and the system's
    version, with figures, or with `problem`: why there are none. Those of another setup or version do not count."""

    def __init__(self, path: Path, setup: Setup, versions: Mapping[str, str]) -> None:
        """Read the file, where there is one. versions: of the systems that take part. Raises BenchError."""
        self._path, self._setup, self._versions = path, setup, versions
        found = list(_read(path)) if path.exists() else []
        self.all: dict[Cell, dict[str, Any]] = {cell: record for cell, record in found if self._counts(cell, record)}
        self.num_others = len({cell for cell, _ in found} - self.all.keys())  # that were found, and do not count

    def _counts(self, cell: Cell, record: Mapping[str, Any]) -> bool:
        version = self._versions.get(cell.system, record["version"])
        return _typed(Setup, record) == self._setup and record["version"] == version

    def __contains__(self, cell: Cell) -> bool:
        return cell in self.all

    def add(self, cell: Cell, found: Mapping[str, Any]) -> None:
        """Keep what came of a cell: on the disk when this returns. Raises BenchError."""
        record = {**asdict(cell), **asdict(self._setup), "version": self._versions[cell.system], **found}
        self.all[cell] = record
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise BenchError(f"cannot write {self._path}: {error.strerror}; free some space and start again") from None

    def forget_problems(self) -> None:
        """Have cells that failed run again."""
        self.all = {cell: record for cell, record in self.all.items() if "problem" not in record}

    def hopeless(self, cell: Cell) -> str | None:
        """Why the cell would fail too: its model could not be made, or one that has no more to do was cut; or None."""
        for other, record in self.all.items():
            if any(getattr(cell, name) != getattr(other, name) for name in MODEL):
                continue
            if record.get("unmade"):
                return str(record["problem"])
            has_no_less = all(getattr(cell, name) >= getattr(other, name) for name in AMOUNTS)
            if record.get("cut") and cell.kind == other.kind and has_no_less:
                return f"not run: {other.prompt_tokens} x {other.batch_size} was {record['problem']}"
        return None


def _read(path: Path) -> Iterator[tuple[Cell, dict[str, Any]]]:
    for number, line in enumerate(_whole_lines(path), 1):
        try:
            record = json.loads(line)
            _check(record)
            yield _typed(Cell, record), record
        except (ValueError, KeyError, TypeError):
            raise BenchError(f"{path}, line {number} is not of a race: mend it, or give another --output") from None


def _check(record: Mapping[str, Any]) -> None:
    """Raises ValueError, KeyError or TypeError where a record lacks anything, or has what no record has."""
    _typed(Setup, record)
    figures = () if "problem" in record else FIGURES[record["kind"]]
    numbers = [value for value in record.values() if isinstance(value, int | float)]
    texts = [record["version"], record.get("problem", ""), FORMATS[record["format"]] and record["format"]]
    if not all(isinstance(record[name], int | float) for name in figures) or not all(map(_is_figure, numbers)):
        raise ValueError
    if not all(isinstance(text, str) for text in texts):
        raise TypeError


def _is_figure(value: float) -> bool:
    return 0 <= value <= sys.float_info.max


def _typed(kind: type[T], record: Mapping[str, Any]) -> T:
    """The fields of a dataclass, each a text or a whole number. Raises KeyError and TypeError."""
    values = {field.name: record[field.name] for field in fields(kind)}  # type: ignore[arg-type]
    kinds = {field.name: {"str": str, "int": int}[str(field.type)] for field in fields(kind)}  # type: ignore[arg-type]
    if any(type(value) is not kinds[name] for name, value in values.items()):
        raise TypeError
    return kind(**values)


def _whole_lines(path: Path) -> list[str]:
    """The lines of the file. One that was being written when the race was killed is removed."""
    try:
        text = path.read_text()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole)
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read {path}: {error}; mend it, or give another --output") from None
    return whole.splitlines()
