"""Traces as they are published, by hand, and one sentence for each that is not one."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark.result import BenchError
from benchmark.serving.datasets import Lengths, read_trace

MOONCAKE = """{"timestamp": 3000, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [46, 49]}

"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,0
"""


def written(folder: Path, text: str, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_mooncake_has_milliseconds_and_blocks(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, MOONCAKE))
    assert (0.0, Lengths(600, 7), (46, 49)) == (first.arrives_s, first.lengths, tuple(first.blocks))
    assert (3.0, Lengths(1100, 52)) == (second.arrives_s, second.lengths)


def test_azure_has_dates_and_no_blocks(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, AZURE, "azure.csv"))
    assert (0.0, Lengths(4808, 10), ()) == (first.arrives_s, first.lengths, first.blocks)
    assert pytest.approx(0.052, abs=1e-6) == second.arrives_s
    assert 1 == second.lengths.output_length  # what was cancelled before its first token


def test_a_trace_can_be_replayed_faster(tmp_path: Path) -> None:
    assert 0.75 == read_trace(written(tmp_path, MOONCAKE), 4.0)[-1].arrives_s


def test_traces_of_simulate_are_read(tmp_path: Path) -> None:
    line = '{"arrival_s": 0.5, "input_length": 128, "output_length": 64}\n'
    assert [Lengths(128, 64)] == [one.lengths for one in read_trace(written(tmp_path, line))]


@pytest.mark.parametrize(
    ("text", "name", "sentence"),
    [
        ("", "a.jsonl", "has no requests: a line of Mooncake"),
        ("{}\n", "a.jsonl", "line 1 is no request: '{}'"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}\n', "a.jsonl", "line 1 is no request"),
        ('{"timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": [1, 2]}', "a.jsonl", "line 1 is no"),
        ("\n[1\n", "a.jsonl", "line 2 is no request"),
        ("TIMESTAMP,Context\n1,2\n", "a.csv", "has no column ContextTokens, GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,2,3\n", "a.csv", "line 2 is no request: 'yesterday,2,3'"),
    ],
)
def test_what_is_no_trace_is_one_sentence(text: str, name: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="--trace") as error:
        read_trace(written(tmp_path, text, name))
    assert sentence in str(error.value)


def test_a_missing_trace_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot read --trace"):
        read_trace(tmp_path / "none.jsonl")
