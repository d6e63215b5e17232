"""The rules that every result follows: percentiles, tables as published, rows that are never lost."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from benchmark.report.publishing import publish, published
from benchmark.result import (
    BenchError,
    Result,
    RunContext,
    SampleSummary,
    above_limit_notes,
    footer,
    percentile,
    percentile_notes,
    prepare_output,
    table,
)

# Literal lines of the document whose layout is followed.
VLLM_THROUGHPUT = """\
| Input Length | Output Length | Throughput (requests/s) | Throughput (output token/s) | Average latency per token (ms) | Average latency per output token (ms) |
| :----------: | :-----------: | :---------------------: | :-------------------------: | :----------------------------: | :-----------------------------------: |
|     128      |      128      |          9.36           |           1197.56           |              6.31              |                 12.62                 |
|     128      |     1024      |          1.12           |           1144.08           |             11.27              |                 12.68                 |
|     2048     |      128      |          1.14           |           145.33            |              1.06              |                 18.04                 |"""  # noqa: E501


def cells_of(markdown: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()]


def context() -> RunContext:
    return RunContext.gather(
        "latency",
        model="m",
        device="cpu",
        dtype="float32",
        num_shard=2,
        threads=1,
        quantize=None,
        arguments={"runs": 3},
        work={"model": "m"},
    )


def test_the_throughput_table_is_that_of_vllm() -> None:
    headers, _, *rows = cells_of(VLLM_THROUGHPUT)
    assert VLLM_THROUGHPUT == table(headers, rows, centred=True)


def test_percentiles_follow_the_index_rule() -> None:
    ten = [float(n) for n in range(10)]
    assert [5.0, 9.0, 9.0] == [percentile(ten, q) for q in (50, 90, 99)]
    assert 7.0 == percentile([7.0], 99)
    assert 99.0 == percentile([float(n) for n in range(100)], 99)


def test_samples_are_sorted_before_percentiles_are_taken() -> None:
    summary = SampleSummary.of([9.0, 1.0, 5.0, 3.0, 7.0])
    assert SampleSummary(5, 5.0, 1.0, 9.0, 5.0, 9.0, 9.0) == summary
    with pytest.raises(ValueError, match="no samples"):
        SampleSummary.of([])


def test_few_samples_are_said_to_have_no_p99() -> None:
    assert any("p99 is the maximum" in note for note in percentile_notes(10)) and 1 == len(percentile_notes(100))


def test_a_row_above_its_limit_is_told() -> None:
    rows = [{"percent_of_limit": value} for value in (99.0, 104.2, None)]
    (note,) = above_limit_notes([*rows, {}])
    assert note.startswith("**Above its limit**: 1 of 4 rows, up to 104.2 %")
    assert [] == above_limit_notes([{"percent_of_limit": 100.0}, {"percent_of_limit": None}])


def test_the_context_says_where_and_with_what() -> None:
    found = context()
    assert {"lockstep", "python", "torch"} == set(found.versions)
    assert found.hardware["cpu"] and found.hardware["gpu"] is None
    assert "2 shards x 1 threads" in found.lines()[0]


def test_published_prints_the_tables_and_one_json_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = Result(context(), rows=[{"step": "prefill", "mean_ms": 1.5}], extra={"peak": 3})
    publish(result, "| a |", tmp_path / "new")
    *head, last = capsys.readouterr().out.splitlines()
    assert ["| a |"] == head
    printed = json.loads(last)
    assert printed == json.loads((tmp_path / "new" / "result.json").read_text())
    assert ("latency", "m", 2, 3, 1.5) == (
        printed["command"], printed["model"], printed["num_shard"], printed["peak"], printed["rows"][0]["mean_ms"]
    )  # fmt: skip
    assert "| a |\n" == (tmp_path / "new" / "result.md").read_text()
    assert [] == [path.name for path in (tmp_path / "new").iterdir() if path.name.startswith(".")]


def test_an_unwritable_folder_costs_no_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(BenchError, match=r"cannot write results to .*; give another --output"):
        publish(Result(context(), rows=[{"step": "prefill"}]), "the table", blocked)
    assert capsys.readouterr().out.startswith("the table\n{")
    with pytest.raises(BenchError, match="cannot write"):
        prepare_output(blocked)


def test_a_full_disk_leaves_the_result_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = Result(context(), rows=[{"step": "prefill"}])
    publish(result, "first", tmp_path)

    def full(path: Path, content: bytes) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(BenchError, match="No space left on device"):
        publish(result, "second", tmp_path)
    assert "first\n" == (tmp_path / "result.md").read_text()
    assert {"result.md", "result.json"} == {path.name for path in tmp_path.iterdir()}


def test_finished_rows_are_kept_when_a_later_one_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = Result(context())
    with (
        pytest.raises(BenchError, match="the server ended"),
        published(result, lambda r: f"{len(r.rows)} rows\n{footer(r)}", tmp_path) as keep,
    ):
        result.rows.append({"step": "prefill"})
        keep()
        assert 1 == len(json.loads((tmp_path / "result.json").read_text())["rows"])
        raise BenchError("the server ended")
    assert "**Incomplete**: the server ended" in capsys.readouterr().out
    kept = json.loads((tmp_path / "result.json").read_text())
    assert ([{"step": "prefill"}], "the server ended") == (kept["rows"], kept["failure"])


def test_nothing_is_published_when_nothing_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BenchError), published(Result(context()), lambda r: "", tmp_path):
        raise BenchError("no server")
    assert "" == capsys.readouterr().out


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, asyncio.CancelledError])
def test_an_interruption_keeps_the_rows(interruption: type[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C reaches code under asyncio as a cancellation."""
    result = Result(context(), rows=[{"step": "prefill"}])
    with pytest.raises(interruption), published(result, footer, None):
        raise interruption
    assert "interrupted" == json.loads(capsys.readouterr().out.splitlines()[-1])["failure"]


def test_a_terminal_is_told_where_the_result_is_and_a_pipe_gets_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Result(context(), rows=[{"a": 1}])
    publish(result, "table", tmp_path)
    assert [{"a": 1}] == json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for folder, said in ((tmp_path, f"As JSON: {tmp_path}/result.json"), (None, "As JSON: with --output DIR, or")):
        publish(result, "table", folder)
        out = capsys.readouterr().out
        assert "table" in out and out.splitlines()[-1].startswith(said)
