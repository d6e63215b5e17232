"""`simulate`: traces and bursts, figures worked out by hand, and whole runs of the command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmark.__main__ import main
from benchmark.commands.simulate import SETTINGS
from benchmark.fleet.prediction import comparison, figures, read_serving
from benchmark.fleet.replica import Tally
from benchmark.fleet.traffic import Request, read_trace
from benchmark.result import BenchError
from tests.benchmark.cost.test_step_times import latency_result
from tests.running import ROOT

# ---------------------------------------------------------------------------------------------------------- work


def test_a_trace_is_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival_s": 2.5, "input_length": 7, "output_length": 3, "max_new_tokens": 9}\n\n'
        '{"arrival_s": 1, "input_length": 5, "output_length": 4}\n'
    )
    assert [Request(1, 5, 4, 4), Request(2.5, 7, 3, 9)] == read_trace(path)


# ------------------------------------------------------------------------------------------------------- figures


def test_figures_of_two_requests_worked_out_by_hand() -> None:
    tally = Tally(num_requests=3, num_refused=1, num_tokens=12, num_steps=4, num_step_tokens=24)
    for samples, values in (
        (tally.ttft, (0.1, 0.3)), (tally.tpot, (0.02, 0.05)), (tally.e2e, (0.2, 0.5)), (tally.queued, (0.0, 0.2)),
        (tally.gaps, (0.05, 0.02)),
    ):  # fmt: skip
        samples.extend(values)
    tally.gap_counts.extend((1, 9))
    tally.last_arrival_at, tally.ended_by_then, tally.given_by_then = 2.0, 1, 8
    tally.started_at, tally.ended_at, tally.busy, tally.batch, tally.kv = 1.0, 3.0, 1.0, 1.5, 0.25
    row = figures(tally, 2, (200.0, 30.0))
    assert (1.0, 6.0, 1 / 6) == tuple(row[k] for k in ("requests_per_second", "output_tokens_per_second", "busy_share"))
    assert {"seconds": 1.0, "requests_per_second": 1.0, "output_tokens_per_second": 8.0} == row["while_arriving"]
    assert pytest.approx({"share": 1 / 3, "requests_per_second": 0.5}) == {
        name: row["goodput"][name] for name in ("share", "requests_per_second")
    }
    assert pytest.approx({"mean": 23, "p50": 20, "p90": 50, "p99": 50}) == row["inter_token_ms"]
    assert pytest.approx(200) == row["ttft_ms"]["mean"]
    assert (1.5, 0.25, 6.0) == (row["batch_size"]["mean"], row["kv_share"]["mean"], row["tokens_per_step"])


def test_predictions_are_held_against_the_medians() -> None:
    def row(rate: float, ttft: float) -> Mapping[str, Any]:
        none = dict.fromkeys(("output_tokens_per_second", "tpot_ms", "inter_token_ms", "e2e_ms"))
        return {"requests_per_second": rate, "ttft_ms": {"p50": ttft}, **none}

    entries = comparison([row(2.0, 100.0)], [row(2.1, 125.0)])
    assert [("requests_per_second", True), ("ttft_ms", False)] == [(e["figure"], e["is_on_target"]) for e in entries]
    assert [1.05, 1.25] == pytest.approx([entry["ratio"] for entry in entries])


# --------------------------------------------------------------------------------------------------- whole runs

H200 = ("--shape", "bloomz-7b1-mt", "--device", "h200")


def run(capsys: pytest.CaptureFixture[str], *flags: object) -> tuple[list[str], dict[str, Any]]:
    assert 0 == main(["simulate", *map(str, flags)])
    *lines, last = capsys.readouterr().out.splitlines()
    return lines, json.loads(last)


def test_chunks_can_be_swept_beside_auto(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines, result = run(
        capsys, *H200, "--concurrency", 16, "--num-requests", 100, "--sweep", "prefill-chunk=64,auto",
        "--output", tmp_path,
    )  # fmt: skip
    assert [row["settings"]["prefill_chunk"] for row in result["rows"]] == [64, "auto"]
    assert [row["settings"]["max_inter_token_ms"] for row in result["rows"]] == [None, None]
    assert any("|auto|" in line.replace(" ", "") for line in lines)


def test_a_sweep_prints_a_row_for_each_value(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines, result = run(
        capsys, *H200, "--request-rate", 30, "--num-requests", 100, "--sweep", "max-batch-size=1,4,16",
        "--sweep", "replicas=1,2", "--ttft-objective", 300, "--tpot-objective", 30, "--output", tmp_path,
    )  # fmt: skip
    settings = [(row["settings"]["max_batch_size"], row["settings"]["replicas"]) for row in result["rows"]]
    assert [(1, 1), (1, 2), (4, 1), (4, 2), (16, 1), (16, 2)] == settings
    goodput = [row["goodput"]["share"] for row in result["rows"]]
    assert goodput[0] < goodput[2] < goodput[4]
    assert [1, 4, 16] == [row["batch_size"]["peak"] for row in result["rows"][::2]]
    (header,) = {line for line in lines if "Goodput (requests/s)" in line}
    assert "| max_batch_size | replicas |" in header
    assert result == json.loads((tmp_path / "result.json").read_text())


def test_limits_are_the_servers(capsys: pytest.CaptureFixture[str]) -> None:
    _, result = run(capsys, *H200, "--num-requests", 20, "--input-length", 1000, "--output-length", 24)
    settings = result["rows"][0]["settings"]
    assert (4096, 0.0, 20, 128) == tuple(
        settings[name]
        for name in (
            "max_batch_prefill_tokens",
            "waiting_served_ratio",
            "max_waiting_tokens",
            "max_concurrent_requests",
        )
    )
    assert 128 * 1024 == settings["max_batch_total_tokens"]  # no load could use more


def test_a_latency_result_predicts_a_serving_result(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    latency, serving = tmp_path / "latency.json", tmp_path / "serving.json"
    latency.write_text(json.dumps(latency_result(100)))
    _, measured = run(
        capsys, "--cost", latency, "--concurrency", 4, "--request-rate", 2, "--num-requests", 40, "--seed", 5
    )
    serving.write_text(json.dumps(measured | {"command": "serving"}))
    lines, result = run(capsys, "--cost", latency, "--compare", serving, "--seed", 5)
    assert {1.0} == {entry["ratio"] for entry in result["comparison"]}
    assert 12 == len(result["comparison"])
    assert any("| yes" in line or " yes " in line for line in lines)


def test_a_latency_result_of_one_length_simulates_no_other(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text(json.dumps(latency_result(100)))
    other.write_text(json.dumps(latency_result(400)))
    for flags in (("--input-length", "400"), ("--length-distribution", "uniform")):
        few = (*flags, "--num-requests", "5")
        assert 1 == main(["simulate", "--cost", str(one), *few])
        assert "error: --cost is of one --sequence-length" in capsys.readouterr().err
        run(capsys, "--cost", one, other, *few)


def test_a_latency_result_of_one_length_simulates_no_cached_beginnings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text(json.dumps(latency_result(100)))
    other.write_text(json.dumps(latency_result(400)))
    few = ("--input-length", "100", "--prefix-length", "64", "--num-requests", "5")
    assert 1 == main(["simulate", "--cost", str(one), *few])
    said = capsys.readouterr().err
    assert "error: --cost is of one --sequence-length, whose prompts were computed whole" in said
    assert "give another result, too" in said and "or --no-prefix-cache" in said
    run(capsys, "--cost", one, *few, "--no-prefix-cache")
    run(capsys, "--cost", one, other, *few)


def test_a_comparison_takes_the_limits_that_the_server_had(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Four at once of eight streams: the others are refused here as they were there, unless the user says otherwise."""
    latency, serving = tmp_path / "latency.json", tmp_path / "serving.json"
    latency.write_text(json.dumps(latency_result(100)))
    _, measured = run(capsys, "--cost", latency, "--concurrency", 8, "--num-requests", 40)
    told = {"max_concurrent_requests": 4, "max_batch_prefill_tokens": 512, "max_batch_size": None, "model_id": "m"}
    serving.write_text(json.dumps(measured | {"command": "serving", "server": told}))
    compare = ("--cost", latency, "--compare", serving)
    lines, result = run(capsys, *compare)
    settings = result["rows"][0]["settings"]
    assert (4, 512) == (settings["max_concurrent_requests"], settings["max_batch_prefill_tokens"])
    assert result["rows"][0]["refused"] > 0
    assert any("as it told serving: max_batch_prefill_tokens 512, max_concurrent_requests 4" in line for line in lines)
    for given in (9, SETTINGS["max_concurrent_requests"].default):
        assert 0 == run(capsys, *compare, "--max-concurrent-requests", given)[1]["rows"][0]["refused"]


def test_a_comparison_says_what_makes_it_unfair(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    latency, serving = tmp_path / "latency.json", tmp_path / "serving.json"
    latency.write_text(json.dumps(latency_result(100)))
    _, measured = run(capsys, "--cost", latency, "--request-rate", 2, "--num-requests", 10)
    measured["rows"][0] |= {"short": 4, "errors": 1}
    serving.write_text(json.dumps(measured | {"command": "serving", "arguments": {"warmups": 1}}))
    lines, _ = run(capsys, "--cost", latency, "--compare", serving)
    for remark in (
        "- 4 measured answers were short",
        "- 1 measured requests failed",
        "- Warm-ups were measured before",
    ):
        assert any(line.startswith(remark) for line in lines)


def test_a_trace_is_replayed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f'{{"arrival_s": {n}, "input_length": 50, "output_length": 9}}\n' for n in range(4)))
    _, result = run(capsys, *H200, "--trace", trace)
    assert (4, 50, 9) == tuple(result["rows"][0][name] for name in ("requests", "input_length", "output_length"))
    assert 3 < result["rows"][0]["seconds"] < 3.5


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "give either --cost with latency results, or --shape and --device"),
        (("--shape", "bloom-560m"), "--shape needs --device, one of a100-40g"),
        (("--shape", "gpt-17", "--device", "l4"), "no shape is called gpt-17"),
        (("--shape", "flan-t5-xxl", "--device", "h200"), ""),
        (("--shape", "baichuan2-13b", "--device", "l4"), "baichuan2-13b on l4: 27.79 GB of weights"),
        (("--cost", "/nowhere", "--device", "l4"), "--cost says how long steps take: leave out --device"),
        (("--cost", "/nowhere"), "cannot read /nowhere"),
        ((*H200, "--trace", "/nowhere"), "cannot read --trace /nowhere"),
        ((*H200, "--trace", "t", "--concurrency", "1"), "--trace brings its own requests: leave out --concurrency"),
        ((*H200, "--compare", "/nowhere"), "cannot read /nowhere"),
        ((*H200, "--compare", "c", "--sweep", "replicas=1,2"), "--compare is about one server: leave out --sweep"),
        ((*H200, "--max-batch-total-tokens", "50"), "--max-total-tokens is 200 but --max-batch-total-tokens is 50"),
        ((*H200, "--sweep", "replicas=1", "--sweep", "replicas=2"), "--sweep names a setting twice"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_one_sentence(
    flags: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 1 == main(["simulate", *flags])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {sentence}")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--sweep", "temperature=1,2"), "is not NAME=A,B,… with one of replicas, max_batch_total_tokens"),
        (("--sweep", "replicas"), "is not NAME=A,B,…"),
        (("--sweep", "max-batch-size=4,many"), "4,many is not a list of numbers such as 1,2,4"),
        (("--max-batch-size", "0"), "max_batch_size is 0 but must be at least 1"),
        (("--efficiency", "1.5"), "1.5 is not above 0 and at most 1"),
        (("--request-rate", "-1"), "-1 is not above 0"),
    ],
)
def test_wrong_values_name_the_bound(flags: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["simulate", *H200, *flags])
    assert 2 == end.value.code
    assert sentence in capsys.readouterr().err


def test_a_simulation_needs_no_torch() -> None:
    code = (
        "import sys; from benchmark.__main__ import main;"
        "main(['simulate', '--shape', 'mistral-7b', '--device', 'h100', '--num-requests', '10']);"
        "print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "False" == shown.splitlines()[-1]


@pytest.mark.parametrize("about", [{"burstiness": 0.0}, {"ramp": [1.0, 2.0]}, {"max_concurrency": 3}])
def test_loads_that_are_not_simulated_are_not_taken_for_others(tmp_path: Path, about: dict[str, Any]) -> None:
    path = tmp_path / "result.json"
    usual = {"ramp": None, "burstiness": 1.0, "max_concurrency": None, "trace": None}
    path.write_text(json.dumps({"command": "serving", "rows": [usual]}))
    assert [usual] == read_serving(path)["rows"]
    path.write_text(json.dumps({"command": "serving", "rows": [{}, usual | about]}))
    [(name, value)] = about.items()
    with pytest.raises(BenchError, match=re.escape(f"has a row with {name} {value}, and only closed loops")):
        read_serving(path)
