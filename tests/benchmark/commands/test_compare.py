"""Results side by side: right ratios, verdicts that starts give, and a refusal of what was measured on other work.

How often verdicts and intervals are right is in `test_intervals.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.__main__ import main
from benchmark.commands.compare import ONE_START
from benchmark.serving.outcomes import STRETCHES, stretch_rates

WORK = {"model": "demo", "input_length": [64], "output_length": [32], "concurrency": [1]}


def serving_row(scale: float, output_length: int = 32) -> dict[str, Any]:
    """246 requests around 100 ms, all `scale` times as long, and somewhat unequal in each."""
    samples = [scale * (100 + (17 * index + int(4 * scale)) % 41 - 20) for index in range(41)] * 6
    names = ("ttft_ms", "tpot_ms", "e2e_ms", "latency_per_token_ms", "latency_per_output_token_ms")
    mean = sum(samples) / len(samples)
    row: dict[str, Any] = {"input_length": 64, "output_length": output_length, "concurrency": 1, "request_rate": None}
    row |= {"requests_per_second": 10 / scale, "output_tokens_per_second": 320 / scale, "errors": 0}
    row |= {"latency_per_token_ms": mean, "latency_per_output_token_ms": mean}
    row |= {name: {"mean": mean, "p50": mean} for name in ("ttft_ms", "tpot_ms", "e2e_ms")}
    rates = [320 / scale + 10 * ((5 * index + int(4 * scale)) % 21 - 10) for index in range(420)]
    row["output_tokens"] = 640
    return row | {"samples": dict.fromkeys(names, samples) | {"output_tokens_per_second": rates}}


def write(folder: Path, name: str, rows: list[dict[str, Any]], command: str = "serving", **work: Any) -> Path:
    """A result file as `lockstep-bench --output` leaves it."""
    (folder / name).mkdir()
    path = folder / name / "result.json"
    path.write_text(json.dumps({"command": command, "model": "demo", "work": WORK | work, "rows": rows}))
    return path


def write_starts(folder: Path, name: str, scales: list[float]) -> Path:
    """The folder of a system with a start for each scale, beside other files."""
    (folder / name).mkdir()
    for number, scale in enumerate(scales):
        write(folder / name, str(number), [serving_row(scale)])
    (folder / name / "notes.json").write_text("{}")
    return folder / name


def compare(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any], str]:
    """Exit code, the JSON of the last line ({} if there is none), and everything that was printed."""
    code = main(["compare", *map(str, arguments)])
    output = capsys.readouterr()
    return code, json.loads(output.out.splitlines()[-1]) if output.out else {}, output.out + output.err


def test_ratios_are_to_the_first_and_of_one_start_there_is_no_verdict(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    paths = [write(tmp_path, name, [serving_row(scale)]) for name, scale in (("a", 1), ("b", 1.5), ("c", 0.5))]
    code, result, text = compare(capsys, *paths)
    assert 0 == code
    by_measure = {row["measure"]: row["systems"] for row in result["rows"]}
    requests = by_measure["requests_per_second"]["b"]
    assert pytest.approx(1 / 1.5) == requests["ratio"]
    assert [] == result["unequal_tokens"] and "are missing" not in text
    latency = by_measure["latency_per_token_ms"]
    assert [1, 1.5, 0.5] == pytest.approx([latency[name]["value"] / latency["a"]["value"] for name in "abc"])
    assert {"cannot tell"} == {systems[name]["verdict"] for systems in by_measure.values() for name in "bc"}
    assert {None} == {systems[name]["interval"] for systems in by_measure.values() for name in "bc"}
    assert "| Input Length | Output Length | Concurrency |" in text
    assert "b / a" in text and ": cannot tell" in text and ONE_START in text


def test_starts_give_a_verdict(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of four systems with 2 % between starts: half as fast again, the same, and one whose starts lie far apart."""
    near = [0.98, 1.0, 1.01, 0.99, 1.02]
    scales = {"a": near, "b": [1.5 * scale for scale in near], "c": near[::-1], "d": [0.8, 1.0, 1.3]}
    code, result, text = compare(capsys, *(write_starts(tmp_path, name, own) for name, own in scales.items()))
    assert 0 == code
    [latency] = [row["systems"] for row in result["rows"] if row["measure"] == "e2e_ms"]
    assert [None, "differs", "same", "cannot tell"] == [latency[name]["verdict"] for name in scales]
    low, high = latency["b"]["interval"]
    assert 1.4 < low < 1.5 < high < 1.6
    assert 1.5 == pytest.approx(latency["b"]["ratio"], rel=0.01)
    assert latency["d"]["interval"][0] < 1 / 1.1 and "the interval holds 1 and more than 10 %" in text
    assert [5, 5, 5, 3] == [len(one["starts"]) for one in result["systems"]]
    assert "): differs |" in text and "): same |" in text and "a: 5 starts, their geometric means" in text


def test_a_start_beside_several_gives_no_verdict(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, result, _ = compare(capsys, write_starts(tmp_path, "a", [0.99, 1.0]), write(tmp_path, "b", [serving_row(2)]))
    assert {(None, "cannot tell")} == {
        tuple(row["systems"]["b"][key] for key in ("interval", "verdict")) for row in result["rows"]
    }


def test_starts_are_of_one_system(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder, other = write_starts(tmp_path, "a", [1.0, 1.1]), write(tmp_path, "b", [serving_row(1)])
    path = folder / "1" / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float16", "arguments": {"output": "a/1"}}))
    code, _, text = compare(capsys, folder, other)
    assert 1 == code and "are no starts of one system: dtype is None and float16; give them as two systems" in text
    assert 0 == compare(capsys, folder / "0", path)[0]
    (tmp_path / "empty").mkdir()
    assert "there is no result.json below" in compare(capsys, other, tmp_path / "empty")[2]


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
    assert (0, None) == (code, by_measure["ttft_ms"]["ratio"])
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
    found = stretch_rates(((tenth / 10, 1) for tenth in range(10)), 2.0)
    half = STRETCHES // 2
    assert (STRETCHES, 0.0) == (len(found), sum(found[half:]))
    assert 5.0 == pytest.approx(sum(found) / STRETCHES)
    assert 1 / 3.0 == pytest.approx(
        stretch_rates([(3.0, 1)], 3.0)[-1] / STRETCHES
    )  # what ends with the run is of its end
    assert [] == stretch_rates([], 0.0)


def test_names_must_tell_the_results_apart(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write(tmp_path, "a", [serving_row(1)])
    assert "tell them apart by --name" in compare(capsys, path, path)[2]
    assert 0 == compare(capsys, path, path, "--name", "monday", "tuesday")[0]
    assert "give two or more" in compare(capsys, path)[2]


def test_output_has_the_table_the_json_and_the_plots(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = [write(tmp_path, name, [serving_row(1), serving_row(1, 64)]) for name in ("a", "b")]
    code, result, _ = compare(capsys, *paths, "--output", tmp_path / "out")
    assert 0 == code
    assert result == json.loads((tmp_path / "out" / "compare.json").read_text())
    assert 4 == len(list((tmp_path / "out").glob("*.png")))
    assert "b / a" in (tmp_path / "out" / "compare.md").read_text()
    assert "b / a" in (tmp_path / "out" / "report.html").read_text()
