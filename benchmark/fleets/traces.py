"""Traces of real traffic as a simulated fleet's requests: our own JSONL, and Mooncake's with the hashes of prompts.

Mooncake's lines (github.com/kvcache-ai/Mooncake) are `{"timestamp": 27482, "input_length": 6955, "output_length": 52,
"hash_ids": [46, 47, …]}`: milliseconds, tokens, and a name for each 512 tokens of the prompt together with all before
them, of which the last may be fewer.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmark import traffic
from benchmark.report import BenchError
from benchmark.traffic import Request

HASH_TOKENS = 512  # that a hash of Mooncake's stands for


def read(path: Path) -> list[Request]:
    """The requests of a trace in the order of their arrival. Raises BenchError that names the line."""
    try:
        lines = [(n, line) for n, line in enumerate(path.read_text().splitlines(), 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read --trace {path}: {error}") from None
    if not lines or '"timestamp"' not in lines[0][1]:
        return traffic.read_trace(path)
    requests = [_mooncake(line, f"{path}:{number}") for number, line in lines]
    return sorted(requests, key=lambda one: one.arrives_at)


def _mooncake(line: str, where: str) -> Request:
    try:
        record = json.loads(line)
        lengths = (record["input_length"], record["output_length"])
        hashes, at = tuple(record["hash_ids"]), record["timestamp"]
        model = record.get("model")
        is_valid = all(type(number) is int for number in (at, *lengths, *hashes)) and min(lengths) >= 1 and at >= 0
        is_valid = is_valid and len(hashes) <= -(-lengths[0] // HASH_TOKENS) and isinstance(model, str | None)
    except (ValueError, KeyError, TypeError, AttributeError):
        is_valid = False
    if not is_valid:
        raise BenchError(
            f'{where}: expected {{"timestamp": 2000, "input_length": 700, "output_length": 52, "hash_ids": [46, 47]}}, '
            f"with milliseconds, lengths of at least 1, and at most one hash for each {HASH_TOKENS} tokens"
        )
    return Request(at / 1000, *lengths, lengths[1], hashes, HASH_TOKENS, model)
