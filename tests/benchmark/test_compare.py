"""Results side by side: right ratios and intervals, and a refusal of what was not measured on the same work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmark.__main__ import main
from benchmark.compare import bootstrap_ratio
from benchmark.stretches import rates

WORK = {"model": "demo", "input_length": [64], "output_length": [32], "concurrency": [1]}


def serving_row(scale: float, output_length: int = 32) -> dict[str, Any]:
    """20 requests around 100 ms, all `scale` times as long."""
    samples = [scale * (90 + index) for index in range(21)]
    names = ("ttft_ms", "tpot_ms", "e2e_ms", "latency_per_token_ms", "latency_per_output_token_ms")
    mean = 100 * scale
    row: dict[str, Any] = {"input_length": 64, "output_length": output_length, "concurrency": 1, "request_rate": None}
    row |= {"requests_per_second": 10 / scale, "output_tokens_per_second": 320 / scale, "errors": 0}
    row |= {"latency_per_token_ms": mean, "latency_per_output_token_ms": mean}
    row |= {name: {"mean": mean, "p50": mean} for name in ("ttft_ms", "tpot_ms", "e2e_ms")}
    rates = [320 / scale + 10 * (index - 10) for index in range(21)]
    row["output_tokens"] = 640
    return row | {"samples": dict.fromkeys(names, samples) | {"output_tokens_per_second": rates}}


def write(folder: Path, name: str, rows: list[dict[str, Any]], command: str = "serving", **work: Any) -> Path:
    """A result file as `lockstep-bench --output` leaves it."""
    (folder / name).mkdir()
    path = folder / name / "result.json"
    path.write_text(json.dumps({"command": command, "model": "demo", "work": WORK | work, "rows": rows}))
    return path


def compare(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any], str]:
    """Exit code, the JSON of the last line ({} if there is none), and everything that was printed."""
    code = main(["compare", *map(str, arguments)])
    output = capsys.readouterr()
    return code, json.loads(output.out.splitlines()[-1]) if output.out else {}, output.out + output.err


def test_ratios_are_to_the_first_and_intervals_hold_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    paths = [write(tmp_path, name, [serving_row(scale)]) for name, scale in (("a", 1), ("b", 1.5), ("c", 0.5))]
    code, result, text = compare(capsys, *paths)
    assert 0 == code
    by_measure = {row["measure"]: row["systems"] for row in result["rows"]}
    assert pytest.approx(1 / 1.5) == by_measure["requests_per_second"]["b"]["ratio"]
    assert by_measure["requests_per_second"]["b"]["interval"] is None  # of results without samples of it
    low, high = by_measure["output_tokens_per_second"]["b"]["interval"]
    assert 0.5 < low < 1 / 1.5 < high < 0.9
    assert [] == result["unequal_tokens"] and "are missing" not in text
    latency = by_measure["latency_per_token_ms"]
    assert [1, 1.5, 0.5] == pytest.approx([latency[name]["ratio"] for name in "abc"])
    low, high = latency["b"]["interval"]
    assert 1.4 < low < 1.5 < high < 1.6
    assert "| Input Length | Output Length | Concurrency |" in text
    assert "b / a" in text


def test_latency_results_compare_by_step_and_batch_size(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def row(step: str, mean: float) -> dict[str, Any]:
        return {"step": step, "batch_size": 4, "mean_ms": mean, "samples_ms": [mean - 1, mean, mean + 1]}

    paths = [
        write(tmp_path, name, [row("prefill", 10 * scale), row("decode_token", 5 * scale)], "latency")
        for name, scale in (("a", 1), ("b", 2))
    ]
    code, result, _ = compare(capsys, *paths)
    assert 0 == code
    assert [("prefill", 4), ("decode_token", 4)] == [(row["step"], row["batch_size"]) for row in result["rows"]]
    assert [2, 2] == pytest.approx([row["systems"]["b"]["ratio"] for row in result["rows"]])


def test_different_work_is_refused_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first = write(tmp_path, "a", [serving_row(1)])
    second = write(tmp_path, "b", [serving_row(1)], input_length=[128])
    code, _, text = compare(capsys, first, second)
    assert 1 == code
    assert "were not measured on the same work: input_length is [64] and [128]" in text
    assert "concurrency" not in text


def test_different_commands_are_different_work(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first, second = write(tmp_path, "a", []), write(tmp_path, "b", [], "offline")
    code, _, text = compare(capsys, first, second)
    assert 1 == code
    assert "command is serving and offline" in text


def test_rows_that_one_run_did_not_reach_are_left_out_and_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    whole = write(tmp_path, "whole", [serving_row(1), serving_row(1, output_length=64)])
    died = write(tmp_path, "died", [serving_row(1)])
    code, result, text = compare(capsys, whole, died)
    assert (0, {32}) == (code, {row["output_length"] for row in result["rows"]})
    assert "whole has 1 more rows that not every result has" in text


def test_a_row_whose_requests_all_failed_has_no_ratio(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    failed = serving_row(1) | {"ttft_ms": None, "requests_per_second": 0.0, "errors": 7}
    failed["samples"] = failed["samples"] | {"ttft_ms": []}
    code, result, text = compare(capsys, write(tmp_path, "a", [serving_row(1)]), write(tmp_path, "b", [failed]))
    by_measure = {row["measure"]: row["systems"]["b"] for row in result["rows"]}
    assert (0, None, None) == (code, by_measure["ttft_ms"]["ratio"], by_measure["ttft_ms"]["interval"])
    assert 0 == by_measure["requests_per_second"]["ratio"]
    assert "b had 7 failed requests" in text


@pytest.mark.parametrize("text", ["", "[]", '{"rows": []}', '{"command": "plan", "work": {}, "rows": []}'])
def test_what_is_no_result_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    code, _, printed = compare(capsys, write(tmp_path, "a", [serving_row(1)]), path)
    assert 1 == code
    assert "x.json is not a result of lockstep-bench" in printed


def test_missing_tokens_are_said_with_both_counts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The one side is three times as fast, with a fifth of the tokens: of new results, and of those before counts."""
    whole, short = serving_row(1), serving_row(0.3) | {"output_tokens": 128}
    paths = [write(tmp_path, "a", [whole]), write(tmp_path, "b", [short])]
    _, result, text = compare(capsys, *paths)
    sentence = "Input Length 64, Output Length 32, Concurrency 1: b produced 128 tokens and a 640: 80.0 % are missing."
    assert sentence in text
    assert [("a", 640, "b", 128)] == [
        (one["base"], one["base_tokens"], one["other"], one["other_tokens"]) for one in result["unequal_tokens"]
    ]
    assert "b produced 128 tokens" in compare(capsys, *reversed(paths))[2]
    old = {key: value for key, value in short.items() if key != "output_tokens"}
    old |= {"output_tokens_per_second": 64.0, "seconds": 2.0}
    assert sentence.replace(": b", ": c") in compare(capsys, paths[0], write(tmp_path, "c", [old]))[2]


def test_a_run_s_rates_have_its_rate_for_their_mean() -> None:
    """A second with a token at each tenth, and one of silence."""
    found = rates(((tenth / 10, 1) for tenth in range(10)), 2.0)
    assert ([10.0] * 10, [0.0] * 10) == (found[:10], found[10:])
    assert 5.0 == sum(found) / len(found)
    assert 1 / 3.0 == pytest.approx(sum(rates([(3.0, 1)], 3.0)) / 20)  # what ends with the run is of its last stretch
    assert [] == rates([], 0.0)


def test_names_must_tell_the_results_apart(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write(tmp_path, "a", [serving_row(1)])
    assert "tell them apart by --name" in compare(capsys, path, path)[2]
    assert 0 == compare(capsys, path, path, "--name", "monday", "tuesday")[0]
    assert "give two or more" in compare(capsys, path)[2]


def test_the_bootstrap_is_seeded_and_narrows_with_samples() -> None:
    few, many = [90.0, 100.0, 110.0], [90.0, 100.0, 110.0] * 100
    assert bootstrap_ratio(few, few) == bootstrap_ratio(few, few)
    wide, narrow = bootstrap_ratio(few, few), bootstrap_ratio(many, many)
    assert wide is not None and narrow is not None
    assert wide[0] < narrow[0] < 1 < narrow[1] < wide[1]
    assert bootstrap_ratio([1.0], few) is None


def test_the_interval_holds_the_true_ratio_as_often_as_it_says() -> None:
    random = np.random.default_rng(3)
    held = 0
    for _ in range(30):
        interval = bootstrap_ratio(list(random.normal(100, 10, 40)), list(random.normal(120, 10, 40)))
        assert interval is not None
        held += interval[0] <= 1.2 <= interval[1]
    assert held >= 25  # 28.5 are expected


def test_output_has_the_table_the_json_and_the_plots(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = [write(tmp_path, name, [serving_row(1), serving_row(1, 64)]) for name in ("a", "b")]
    code, result, _ = compare(capsys, *paths, "--output", tmp_path / "out")
    assert 0 == code
    assert result == json.loads((tmp_path / "out" / "compare.json").read_text())
    assert 4 == len(list((tmp_path / "out").glob("*.png")))
    assert "b / a" in (tmp_path / "out" / "compare.md").read_text()
    assert "b / a" in (tmp_path / "out" / "report.html").read_text()
