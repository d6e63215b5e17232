"""Data sets and traces in the forms that people have them in, and one sentence for each that is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.result import BenchError
from benchmark.serving.datasets import Lengths, Said, read_dataset, read_trace

SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "gpt", "value": "left over"},
            {"from": "human", "value": "one two"},
            {"from": "gpt", "value": "three"},
            {"from": "human", "value": "four"},
        ],
    },
    {"id": "b", "conversations": []},
]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def written(folder: Path, name: str, *records: Any) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in records))
    return path


def test_sharegpt_is_turns(tmp_path: Path) -> None:
    [(first, second)] = read_dataset(written(tmp_path, "share.json", SHAREGPT))
    assert Said((user("one two"),), "three") == first
    assert Said((user("four"),), None) == second


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": "a b", "completion": "c"}, Said((user("a b"),), "c")),
        ({"prompt": "a b", "output_length": 7}, Said((user("a b"),), None, None, 7)),
        ({"input_length": 5, "output_length": 7}, Said((), None, 5, 7)),
        ({"prompt_tokens": "5", "completion_tokens": 7}, Said((), None, 5, 7)),
        ({"messages": [user("a"), {"role": "assistant", "content": "b"}], "max_tokens": 3},
         Said((user("a"),), "b", None, 3)),
        ({"messages": [user("a") | {"content": [{"type": "text", "text": "a"}]}]}, Said((user("a"),))),
        ({"prompt": [{"role": "system", "content": "s"}, user("a")]},
         Said(({"role": "system", "content": "s"}, user("a")))),
    ],
)  # fmt: skip
def test_lines_of_every_kind(record: Any, said: Said, tmp_path: Path) -> None:
    assert [(said,)] == [tuple(turns) for turns in read_dataset(written(tmp_path, "set.jsonl", record))]


def test_a_table_and_a_column_of_ones_own(tmp_path: Path) -> None:
    path = written(tmp_path, "set.csv", "title,output", '"a, b",c')
    assert [((Said((user("a, b"),), "c")),)] == [tuple(one) for one in read_dataset(path, column="title")]


def test_a_folder_is_read_by_its_split(tmp_path: Path) -> None:
    written(tmp_path, "data/train-0.jsonl", {"prompt": "a"})
    written(tmp_path, "data/test-0.jsonl", {"prompt": "b"}, {"prompt": "c"})
    assert [1, 2] == [len(read_dataset(tmp_path, split)) for split in (None, "test")]
    with pytest.raises(BenchError, match="give another --split"):
        read_dataset(tmp_path, "dev")


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.jsonl", "", "has no prompts"),
        ("a.json", "[]", "has no prompts"),
        ("a.json", "[1", "is no JSON"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt"', "line 2 is no JSON"),
        ("a.jsonl", '{"title": "a"}', "is not understood: a record has"),
        ("a.jsonl", '{"input_length": 0, "output_length": 4}', "is not understood"),
        ("a.jsonl", '{"messages": [{"role": "fool", "content": "a"}]}', "line 1: "),
        ("a.jsonl", "[1, 2]", "is not understood"),
        ("a.parquet", "PAR1", "is Parquet or Arrow, which Lockstep does not read"),
    ],
)
def test_what_is_no_data_set_is_one_sentence(name: str, text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="--dataset") as error:
        read_dataset(written(tmp_path, name, text))
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_files_and_columns_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot read --dataset"):
        read_dataset(tmp_path / "none.jsonl")
    with pytest.raises(BenchError, match='no usable "title", which --prompt-column names'):
        read_dataset(written(tmp_path, "a.jsonl", {"prompt": "a"}), column="title")
    written(tmp_path, "hub/data/train-0.parquet", "PAR1")
    with pytest.raises(BenchError, match="write it as JSONL once"):
        read_dataset(tmp_path / "hub")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BenchError, match="has no files that end in"):
        read_dataset(tmp_path / "empty")


# --------------------------------------------------------------------------------------------------------------- traces


MOONCAKE = """{"timestamp": 3000, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [46, 49]}

"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,0
"""


def test_mooncake_has_milliseconds_and_blocks(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, "trace.jsonl", MOONCAKE))
    assert (0.0, Lengths(600, 7), (46, 49)) == (first.arrives_s, first.lengths, tuple(first.blocks))
    assert (3.0, Lengths(1100, 52)) == (second.arrives_s, second.lengths)


def test_azure_has_dates_and_no_blocks(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, "azure.csv", AZURE))
    assert (0.0, Lengths(4808, 10), ()) == (first.arrives_s, first.lengths, first.blocks)
    assert pytest.approx(0.052, abs=1e-6) == second.arrives_s
    assert 1 == second.lengths.output_length  # what was cancelled before its first token


def test_a_trace_can_be_replayed_faster(tmp_path: Path) -> None:
    assert 0.75 == read_trace(written(tmp_path, "trace.jsonl", MOONCAKE), 4.0)[-1].arrives_s


def test_traces_of_simulate_are_read(tmp_path: Path) -> None:
    line = '{"arrival_s": 0.5, "input_length": 128, "output_length": 64}\n'
    assert [Lengths(128, 64)] == [one.lengths for one in read_trace(written(tmp_path, "trace.jsonl", line))]


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
        read_trace(written(tmp_path, name, text))
    assert sentence in str(error.value)


def test_a_missing_trace_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot read --trace"):
        read_trace(tmp_path / "none.jsonl")
