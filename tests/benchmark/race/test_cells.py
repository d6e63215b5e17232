"""Which cells a race has, in which order, and what a file of records tells one that goes on."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmark.race.cells import SERVED, SERVED_SIZES, STEP_SIZES, Entry, Records, Size, cells_of, entry
from benchmark.result import BenchError
from tests.benchmark.race.fakes import SETUP, cell, kept


def test_a_shape_may_have_sizes_of_its_own() -> None:
    assert Entry("a", ()) == entry("a")
    assert Entry("a", (Size(100, 8), Size(4096, 1))) == entry("a=100x8,4096x1")


@pytest.mark.parametrize("text", ["a=100", "a=100x", "a=0x1", "a=1x1x1", "a=100x1,"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        entry(text)


def test_systems_take_turns_at_each_size_and_a_format_is_finished_before_the_next() -> None:
    systems = {"Lockstep": ("bf16", "int4"), "llama.cpp": ("bf16", "int4", "q4_k_m")}
    cells = cells_of([entry("a=100x1,100x8")], [entry("a=5x2")], systems, ["bf16", "q4_k_m"], 2, 10)
    first = [(one.round, one.kind, one.batch_size, one.system) for one in cells if one.format == "bf16"]
    assert [
        (1, "steps", 1, "Lockstep"), (1, "steps", 1, "llama.cpp"),
        (1, "steps", 8, "Lockstep"), (1, "steps", 8, "llama.cpp"),
        (1, "served", 2, "Lockstep"), (1, "served", 2, "llama.cpp"),
    ] == first[:6]  # fmt: skip
    assert [(2, *rest) for _, *rest in first[:6]] == first[6:]
    assert {"llama.cpp"} == {one.system for one in cells[len(first) :]}
    assert len(set(cells)) == len(cells)


def test_sizes_that_are_not_given_are_those_of_the_race() -> None:
    cells = cells_of([entry("a")], [entry("a")], {"Lockstep": ("bf16",)}, ["bf16"], 1, 10)
    assert [*STEP_SIZES, *SERVED_SIZES] == [Size(one.prompt_tokens, one.batch_size) for one in cells]
    assert len(SERVED_SIZES) == sum(one.kind == SERVED for one in cells)


def test_what_was_kept_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "race.jsonl"
    records = kept(path)
    records.add(cell(), {"prefill_ms": 2.0, "decode_ms": 1.0})
    records.add(cell(batch_size=1), {"problem": "no"})
    again = kept(path)
    assert records.all == again.all and cell() in again and cell(round=2) not in again
    again.forget_problems()
    assert [cell()] == list(again.all)


def test_a_line_that_was_being_written_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "race.jsonl"
    kept(path).add(cell(), {"prefill_ms": 2.0, "decode_ms": 1.0})
    whole = path.read_text()
    path.write_text(whole + whole[:40])
    records = kept(path)
    assert [cell()] == list(records.all)
    records.add(cell(batch_size=1), {"prefill_ms": 1.0, "decode_ms": 1.0})
    assert 2 == len(kept(path).all)


WHOLE = {**asdict(cell()), **asdict(SETUP), "version": "1", "prefill_ms": 2.0, "decode_ms": 1.0}


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[]",
        "no",
        json.dumps({"kind": "steps"}),
        json.dumps(asdict(cell()) | {"prefill_ms": 2.0, "decode_ms": 1.0}),
        json.dumps(WHOLE | {"system": []}),
        json.dumps(WHOLE | {"format": []}),
        json.dumps(WHOLE | {"kind": "other"}),
        json.dumps(WHOLE | {"prompt_tokens": "16"}),
        json.dumps(WHOLE | {"version": 1}),
        json.dumps(WHOLE | {"prefill_ms": None}),
        json.dumps(WHOLE | {"prefill_ms": float("inf")}),
        json.dumps(WHOLE | {"decode_limit_ms": float("nan")}),
        json.dumps(WHOLE | {"decode_ms": 10**400}),
        json.dumps(WHOLE | {"problem": 3}),
    ],
)
def test_a_file_of_something_else_is_refused_by_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "race.jsonl"
    kept(path).add(cell(), {"prefill_ms": 2.0, "decode_ms": 1.0})
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(BenchError, match=r"race\.jsonl, line 2 is not of a race"):
        kept(path)


def test_only_what_was_measured_alike_counts(tmp_path: Path) -> None:
    path, one, other = tmp_path / "race.jsonl", cell("one"), cell("other")
    records = Records(path, SETUP, {"one": "1", "other": "1"})
    for each in (one, other):
        records.add(each, {"prefill_ms": 2.0, "decode_ms": 1.0})
    assert {one, other} == set(Records(path, SETUP, {"one": "1"}).all), "of who is not here nothing else is known"
    newer = Records(path, SETUP, {"one": "2", "other": "1"})
    assert [other] == list(newer.all) and 1 == newer.num_others
    for changed in ({"processor": "another"}, {"threads": 3}, {"runs": 2}):
        elsewhere = Records(path, replace(SETUP, **changed), {"one": "1"})  # type: ignore[arg-type]
        assert not elsewhere.all and 2 == elsewhere.num_others
    newer.add(one, {"prefill_ms": 3.0, "decode_ms": 1.0})
    again = Records(path, SETUP, {"one": "2", "other": "1"})
    assert 3.0 == again.all[one]["prefill_ms"] and 0 == again.num_others


def test_what_has_more_to_do_than_what_was_cut_is_not_tried(tmp_path: Path) -> None:
    records = kept(tmp_path / "race.jsonl")
    records.add(cell(batch_size=8), {"problem": "cut after 9 s", "cut": True})
    records.add(cell(system="vLLM", batch_size=1), {"problem": "failed with 1: no"})
    assert "not run: 100 x 8 was cut after 9 s" == records.hopeless(cell(batch_size=32))
    assert "not run: 100 x 8 was cut after 9 s" == records.hopeless(cell(prompt_tokens=512))
    records.add(cell(system="OpenVINO"), {"problem": "no model: no", "unmade": True})
    assert "no model: no" == records.hopeless(cell(system="OpenVINO", batch_size=1, kind=SERVED))
    for other in (
        cell(batch_size=1),
        cell(system="vLLM"),
        cell(format="int8", batch_size=32),
        cell(kind=SERVED),
        cell(system="OpenVINO", format="int8"),
    ):
        assert records.hopeless(other) is None
