"""Traces of real traffic: when requests came, how long they were, and which of them began alike. Lengths, no texts.

Read are Mooncake's JSONL (`timestamp` in milliseconds, `input_length`, `output_length`, `hash_ids`: one for each block
of 512 prompt tokens, equal where a prompt is the same up to there), the Azure LLM inference CSV (`TIMESTAMP`,
`ContextTokens`, `GeneratedTokens`) and the traces of `simulate` (`arrival_s`). Times count from the first request.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmark.report import BenchError
from benchmark.workload import Lengths

BLOCK_TOKENS = 512  # that one of Mooncake's hashes stands for
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
FORMS = (
    'a line of Mooncake\'s JSONL is {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": '
    f"[46, 47]}}, a CSV of Azure begins with {','.join(AZURE)}"
)


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace. blocks: hashes of its prompt's blocks; empty where the trace has none."""

    arrives_s: float
    lengths: Lengths
    blocks: Sequence[int] = ()


def read_trace(path: Path, speed: float = 1.0) -> list[TracedRequest]:
    """The requests in the order of their arrival, `speed` times as fast. Raises BenchError that names the line."""
    try:
        with path.open(newline="") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read --trace {path}: {error}; {FORMS}") from None
    is_csv = path.suffix.lower() == ".csv" or (bool(lines) and lines[0].startswith(AZURE[0]))
    found = sorted(_of_csv(lines, path) if is_csv else _of_json(lines, path), key=lambda one: one.arrives_s)
    if not found:
        raise BenchError(f"--trace {path} has no requests: {FORMS}")
    start = found[0].arrives_s
    return [replace(one, arrives_s=(one.arrives_s - start) / speed) for one in found]


def _of_json(lines: Sequence[str], path: Path) -> Iterator[TracedRequest]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _request_of(json.loads(line))
            except (ValueError, KeyError, TypeError):
                raise BenchError(f"--trace {path}, line {number} is no request: {line[:80]!r}; {FORMS}") from None


def _request_of(record: Mapping[str, Any]) -> TracedRequest:
    at = float(record["arrival_s"]) if "arrival_s" in record else float(record["timestamp"]) / 1000
    blocks = record.get("hash_ids") or ()
    if any(type(block) is not int for block in blocks):
        raise ValueError
    return _checked(at, record["input_length"], record["output_length"], tuple(blocks))


def _of_csv(lines: Sequence[str], path: Path) -> Iterator[TracedRequest]:
    reader = csv.DictReader(lines)
    if missing := [name for name in AZURE if name not in (reader.fieldnames or ())]:
        raise BenchError(f"--trace {path} has no column {', '.join(missing)}: its first line names {', '.join(AZURE)}")
    for row in reader:
        try:
            at = datetime.fromisoformat(row[AZURE[0]]).timestamp()
            yield _checked(at, int(row[AZURE[1]]), int(row[AZURE[2]]))
        except (ValueError, TypeError):
            where = f"--trace {path}, line {reader.line_num}"
            raise BenchError(f"{where} is no request: {lines[reader.line_num - 1][:80]!r}; {FORMS}") from None


def _checked(at: float, input_length: Any, output_length: Any, blocks: Sequence[int] = ()) -> TracedRequest:
    """An answer without a token was cancelled: it is asked for one. Raises ValueError."""
    if type(input_length) is not int or type(output_length) is not int or not math.isfinite(at):
        raise ValueError
    if input_length < 1 or output_length < 0 or len(blocks) > math.ceil(input_length / BLOCK_TOKENS):
        raise ValueError
    return TracedRequest(at, Lengths(input_length, max(1, output_length)), blocks)
