"""The tables of a race: systems beside each other at each size, with the limit of the machine and Lockstep's figure.

Arithmetic on records (`cells.py`): no clock, no processes. Of several rounds a table has the medians.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from benchmark.race.cells import SERVED, STEPS, Cell
from benchmark.result import Result, footer, table

Record = Mapping[str, Any]
OURS = "Lockstep"


class Line(NamedTuple):
    """One row of a table: a system in one of its formats, with the records of its rounds."""

    cell: Cell
    records: list[Record]

    def figure(self, name: str) -> float | None:
        """The median over the rounds; None where no round has it."""
        values = [record[name] for record in self.records if name in record]
        return median(values) if values else None

    @property
    def problem(self) -> str:
        """Why rounds have no figures, as the last of them says; empty where all have."""
        return next((record["problem"] for record in reversed(self.records) if "problem" in record), "")


class Column(NamedTuple):
    """A figure with its limit. digits: behind the point; is_rate: whether more is better."""

    title: str
    name: str
    limit: str
    digits: int
    is_rate: bool = False


TABLES: Mapping[str, Sequence[Column]] = {
    STEPS: (
        Column("Prefill, ms", "prefill_ms", "prefill_limit_ms", 1),
        Column("Decode, ms", "decode_ms", "decode_limit_ms", 2),
    ),
    SERVED: (
        Column("Tokens/s", "tokens_per_second", "limit_tokens_per_second", 1, is_rate=True),
        Column("TTFT p50, ms", "ttft_ms", "", 0),
        Column("Gap p50, ms", "gap_ms", "", 1),
        Column("Gap p99, ms", "gap_p99_ms", "", 1),
    ),
}
WORDS = {STEPS: "sequence", SERVED: "client"}


def markdown(result: Result) -> str:
    """Both tables, where there is anything in them, and what a reader must know."""
    parts = [race_table(kind, result.rows) for kind in TABLES]
    return "\n\n".join([*(part for part in parts if part), footer(result)])


def race_table(kind: str, records: Iterable[Record]) -> str:
    """The table of steps, or of servers; empty without records of the kind."""
    groups: dict[tuple[Any, ...], dict[tuple[str, str], Line]] = {}
    for record in records:
        cell = Cell(**{name: record[name] for name in Cell.__dataclass_fields__})
        if cell.kind == kind:
            size = (cell.shape, cell.bits, cell.prompt_tokens, cell.batch_size, cell.decode_length)
            lines = groups.setdefault(size, {})
            lines.setdefault((cell.system, cell.format), Line(cell, [])).records.append(record)
    rows = [row for lines in groups.values() for row in _rows(kind, list(lines.values()))]
    return table(("What", "System", *_headers(kind), "Why not"), rows) if rows else ""


def _headers(kind: str) -> list[str]:
    headers = []
    for column in TABLES[kind]:
        headers += [column.title, *(("Limit", "% of it") if column.limit else ()), f"/ {OURS}'s"]
    return headers


def _rows(kind: str, lines: Sequence[Line]) -> list[list[str]]:
    ours = next((line for line in lines if line.cell.system.startswith(OURS)), None)
    return [
        [
            _what(line.cell),
            f"{line.cell.system} {line.cell.format}",
            *(text for column in TABLES[kind] for text in _cells(column, line, ours)),
            line.problem.replace("|", "/"),
        ]
        for line in lines
    ]


def _what(cell: Cell) -> str:
    """What the lines of a group have in common."""
    many = f"{cell.batch_size} {WORDS[cell.kind]}{'s' if cell.batch_size > 1 else ''}"
    sizes = f"{many}, {cell.prompt_tokens} in, {cell.decode_length} out"
    return f"{cell.shape}, {cell.bits} bits, {sizes}"


def _cells(column: Column, line: Line, ours: Line | None) -> list[str]:
    value, limit = line.figure(column.name), line.figure(column.limit) if column.limit else None
    base = None if ours is None else ours.figure(column.name)
    share = None if value is None or limit is None else value / limit if column.is_rate else limit / value
    limits = [_text(limit, column.digits), _text(share and 100 * share, 0)] if column.limit else []
    return [_text(value, column.digits), *limits, _text(value / base if value and base else None, 2)]


def _text(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
