"""Whole runs of `serving` with files, conversations, traces and durations, against a mock; and what is refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmark.__main__ import main
from benchmark.serving import loops
from benchmark.serving.datasets import Lengths
from benchmark.serving.http_client import Reply
from benchmark.serving.loops import client_report
from benchmark.serving.outcomes import Load, Objectives, Outcome, load_of, records_of, row_of
from benchmark.serving.workload import PlannedRequest, Turn
from tests.benchmark.mock_server import mock_server

NOWHERE = ("--url", "http://127.0.0.1:1")
GRID = ("--input-length", 6, "--output-length", 8)


def bench(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any], str]:
    """Exit code, the JSON of the last line ({} if there is none), and standard error."""
    code = main(["serving", *map(str, arguments)])
    output = capsys.readouterr()
    return code, json.loads(output.out.splitlines()[-1]) if output.out else {}, output.err


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]


def test_conversations_of_a_file_by_chat(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = [("human", "one two"), ("gpt", "three"), ("human", "four five six"), ("gpt", "seven eight")]
    path = tmp_path / "share.json"
    path.write_text(json.dumps([{"conversations": [{"from": who, "value": text} for who, text in said]}]))
    with mock_server() as url:
        flags = ("--dataset", path, "--turns", 2, "--concurrency", 2, "--num-requests", 3, "--output", tmp_path / "out")
        code, result, _ = bench(capsys, "--url", url, "--api", "chat", *flags)
    [row], found = result["rows"], records(tmp_path / "out")
    assert (0, 0, 6, 3) == (code, row["errors"], row["requests"], row["later_turns"])
    assert (0, 0) == (row["short"], row["other_input_length"])
    turns = sorted((one["turn"], one["prompt_tokens"], one["output_tokens"]) for one in found)
    assert [(0, 2, 1)] * 3 + [(1, 2 + 1 + 3, 2)] * 3 == turns  # the mock's answer of one word is carried


def test_every_request_has_a_record(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with mock_server(refuse_every=4) as url:
        flags = ("--request-rate", 200, 300, "--num-requests", 4, "--warmups", 0, "--output", tmp_path)
        _, result, _ = bench(capsys, "--url", url, *GRID, *flags)
    found = records(tmp_path)
    assert [0] * 4 + [1] * 4 == [one["row"] for one in found]
    assert 2 == sum(one["error"] == "429" == str(one["status"]) for one in found)
    for one in found:
        if one["error"] is None:
            times = one["token_s"]
            assert (200, 8, 8, 6) == (one["status"], len(times), one["output_tokens"], one["prompt_tokens"])
            assert one["intended_s"] <= one["sent_s"] <= times[0] == one["first_token_s"] and times == sorted(times)
    for number, row in enumerate(result["rows"]):
        firsts = [o["first_token_s"] - o["intended_s"] for o in found if o["row"] == number and o["error"] is None]
        assert sorted(row["samples"]["ttft_ms"]) == pytest.approx(sorted(1000 * one for one in firsts), abs=0.01)


def test_a_trace_keeps_its_times_and_lengths(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": at, "input_length": 520, "output_length": 2, "hash_ids": [1, at]} for at in (0, 400, 60_000)]
    path.write_text("\n".join(map(json.dumps, lines)))
    with mock_server() as url:
        flags = ("--trace", path, "--speed", 10, "--duration", 5, "--output", tmp_path / "out")
        code, result, _ = bench(capsys, "--url", url, *flags)
    [row] = result["rows"]
    assert (0, 2, 0, "trace.jsonl") == (code, row["requests"], row["other_input_length"], row["trace"])
    assert [0, 0.04] == pytest.approx([one["intended_s"] for one in records(tmp_path / "out")], abs=1e-6)


def test_a_duration_ends_a_closed_loop_and_says_what_was_sent_again(capsys: pytest.CaptureFixture[str]) -> None:
    with mock_server(ttft_ms=20) as url:
        flags = ("--concurrency", 2, "--duration", 2, "--num-requests", 2, "--warmups", 0)
        code, result, _ = bench(capsys, "--url", url, *GRID, *flags)
    [row] = result["rows"]
    assert (0, 2, 2) == (code, row["drawn_requests"], row["duration"])
    assert row["requests"] - 2 == row["sent_again"] > 0


def test_prefixes_ramps_and_caps_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with mock_server() as url:
        work = ("--input-length", 8, "--output-length", 2, "--prefixes", 2, "--prefix-length", 5)
        load = ("--ramp", 20, 200, "--burstiness", 0, "--max-concurrency", 1, "--num-requests", 12)
        code, result, _ = bench(capsys, "--url", url, *work, *load)
    [row] = result["rows"]
    assert Load(None, 110.0, (20.0, 200.0), 0.0, 1) == load_of(row)
    assert (0, 12, 0) == (code, row["requests"], row["other_input_length"])
    assert {"ramp": [20.0, 200.0], "prefixes": 2, "prefix_length": 5, "max_concurrency": 1}.items() <= (
        result["work"].items()
    )


def test_a_cap_holds_requests_whose_times_count_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, ended = 0, 0, 0
    monkeypatch.setattr(loops, "time", SimpleNamespace(perf_counter=lambda: float(ended)))  # answers are the clock

    async def send(request: PlannedRequest, intended_at: float | None) -> Outcome:
        nonlocal running, most, ended
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0)
        running, ended = running - 1, ended + 1
        assert intended_at is not None
        return Outcome(request.lengths, intended_at, Reply(intended_at, intended_at + 1, [intended_at + 1], 1))

    requests = [PlannedRequest("a", Lengths(1, 1))] * 6
    outcomes = asyncio.run(loops.open_loop(loops.capped(send, 2), requests))
    assert 2 == most
    assert [0, 0, 1, 1, 1, 1] == sorted(one.held_s >= 1 for one in outcomes)  # the first two are never held
    assert 1 == len({one.intended_at for one in outcomes})


def test_a_turn_that_fails_is_the_last_of_its_conversation() -> None:
    sent: list[int] = []

    async def send(request: PlannedRequest, intended_at: float | None) -> Outcome:
        sent.append(request.turn)
        return Outcome(request.lengths, 0.0, Reply(0.0, 1.0, [1.0], 1, error="429" if request.turn == 1 else None))

    later = (Turn(({"role": "user", "content": "b"},), Lengths(1, 1)),) * 3
    asyncio.run(loops.closed_loop(send, [PlannedRequest("a", Lengths(1, 1), later=later)], 1))
    assert [0, 1] == sent


@pytest.mark.parametrize(
    ("delays_ms", "cpu_share", "late_ms", "limits"),
    [
        ([1.0] * 100, 0.5, 2.0, []),
        ([], 0.5, 2.0, []),
        ([1.0] * 100, 0.97, 2.0, ["it computed 97 % of the time"]),
        ([1.0] * 98 + [40.0] * 2, 0.5, 2.0, ["1 % of what it had to do waited 40 ms or more"]),
        ([1.0], 0.5, 30.0, ["it sent 1 % of its requests 30 ms late or later"]),
    ],
)
def test_a_client_that_limits_a_run_says_why(
    delays_ms: list[float], cpu_share: float, late_ms: float, limits: list[str]
) -> None:
    report = client_report(delays_ms, cpu_share, late_ms)
    assert (limits, bool(limits)) == (report["limits"], report["is_limit"])


def test_the_report_marks_a_run_that_the_client_limited(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("benchmark.serving.loops.BUSY_SHARE", 0.0)
    with mock_server() as url:
        main(["serving", "--url", url, *map(str, GRID), "--concurrency", "2", "--num-requests", "4"])
    assert "**6 x 8: the client limited this run**" in capsys.readouterr().out


def test_what_a_cap_held_is_no_lateness_of_the_client() -> None:
    held = Outcome(Lengths(1, 1), 10.0, Reply(12.0, 13.0, [13.0], 1), held_s=2.0)
    row = row_of(Lengths(1, 1), Load(request_rate=1.0, max_concurrency=1), [held], Objectives())
    assert (0.0, 2000.0, 3000.0) == (row["sent_late_ms"]["p99"], row["held_ms"]["p99"], row["ttft_ms"]["p50"])
    [record] = records_of(3, [held], 10.0)
    assert (3, 0.0, 2.0, 3.0) == tuple(record[key] for key in ("row", "intended_s", "sent_s", "first_token_s"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--dataset", "/none.jsonl"), "cannot read --dataset /none.jsonl"),
        (("--trace", "/none.jsonl"), "cannot read --trace /none.jsonl"),
        (("--dataset", "a.jsonl", "--input-length", 3), "--dataset says by itself what --input-length says"),
        (("--dataset", "a.jsonl", "--output-length", 3, 4), "--dataset takes one --output-length, not 2"),
        (("--dataset", "a.jsonl", "--length-distribution", "uniform"), "leave out --length-distribution"),
        (("--trace", "a.csv", "--request-rate", 3), "--trace says by itself what --request-rate says"),
        (("--speed", 2), "--speed does nothing without --trace"),
        (("--burstiness", 0), "--burstiness does nothing without --request-rate or --ramp"),
        (("--slo", "ttft:p99:1s"), "--slo is gone: search for the rate that keeps objectives with guidellm or aiperf"),
        (("--max-concurrency", 2), "--max-concurrency does nothing without --request-rate or --ramp or --trace"),
        (("--think-time", 2), "--think-time does nothing without --turns"),
        (("--prefix-length", 2), "--prefix-length does nothing without --prefixes"),
        (("--most-tokens", 2), "--most-tokens does nothing without --dataset or --trace"),
        (("--prefixes", 2), "give their length with --prefix-length"),
        (("--prefixes", 2, "--prefix-length", 6, *GRID), "--prefix-length 6 leaves nothing of a prompt of 6 tokens"),
        (("--prefixes", 2, "--prefix-length", 6, "--length-distribution", "lognormal"), "--prefixes needs prompts"),
    ],
)
def test_contradictions_are_one_sentence(
    arguments: tuple[object, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, errors = bench(capsys, *NOWHERE, *arguments)
    assert (1, 1) == (code, len(errors.splitlines()))
    assert sentence in errors


@pytest.mark.parametrize("option", ["--request-rate", "--speed", "--duration", "--max-concurrency", "--turns"])
def test_nothing_is_refused_as_a_number(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serving", *NOWHERE, option, "0"])
    assert 2 == end.value.code
    assert "0 is not" in capsys.readouterr().err


def test_a_duration_in_which_nothing_comes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with mock_server() as url:
        flags = ("--request-rate", 1, "--burstiness", 0, "--duration", 0.5)
        code, _, errors = bench(capsys, "--url", url, *GRID, *flags)
    assert 1 == code
    assert "no request comes in 0.5 s at 1 requests/s" in errors


def test_a_trace_that_is_too_long_for_the_server_names_the_remedy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 2}\n{"timestamp": 1, "input_length": 6, ')
    path.write_text(path.read_text() + '"output_length": 2}\n')
    with mock_server(max_input_length=100) as url:
        code, _, errors = bench(capsys, "--url", url, "--trace", path)
        assert 1 == code and "leave those out by --most-tokens" in errors
        code, result, _ = bench(capsys, "--url", url, "--trace", path, "--most-tokens", 100)
    assert (0, 1) == (code, result["rows"][0]["requests"])
