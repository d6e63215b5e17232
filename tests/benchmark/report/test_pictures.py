"""Plots: which there are for which rows, and of a sensible size. That they are legible was looked at, not tested."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmark.report import pictures
from benchmark.result import BenchError, Result
from tests.benchmark.report.test_result import context


def png_size(path: Path) -> tuple[int, int]:
    """Width and height in pixels, from the file's head."""
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def serving_rows(factor: float, input_lengths: tuple[int, ...], **load: Any) -> list[dict[str, Any]]:
    return [
        {
            "input_length": input_length,
            "output_length": output_length,
            "concurrency": 16,
            "request_rate": None,
            **{metric.key: factor * output_length for metric in pictures.METRICS},
        }
        | load
        for input_length in input_lengths
        for output_length in (128, 512, 1024)
    ]


def latency_rows(floor: float | None) -> list[dict[str, Any]]:
    return [
        {"step": step, "batch_size": batch_size, "mean_ms": 10.0 * batch_size, "floor_ms": floor}
        for step in ("prefill", "decode_token", "decode_total")
        for batch_size in (1, 2, 4)
    ]


def test_serving_has_the_four_plots_of_the_published_sweep(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    systems = {"ours": serving_rows(1, (128, 512, 2048)), "theirs": serving_rows(2, (128, 512, 2048))}
    paths = [picture.path for picture in pictures.plot_serving(systems, tmp_path)]
    names = ["throughput-req.png", "throughput-token-out.png", "pertoken.png", "per-out-token.png"]
    assert [tmp_path / name for name in names] == paths
    for path in paths:
        width, height = png_size(path)
        assert 1000 <= width <= 2000 and 800 <= height <= 2000  # two panels abreast, two lines of them
        assert 20_000 < path.stat().st_size < 500_000


def test_several_loads_and_failed_rows_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = serving_rows(1, (128,)) + serving_rows(2, (128,), concurrency=None, request_rate=2.5)
    rows[0] |= {metric.key: None for metric in pictures.METRICS}
    for picture in pictures.plot_serving({"ours": rows}, tmp_path):
        assert png_size(picture.path)[0] > 500


def test_one_output_length_is_drawn_over_the_load(tmp_path: Path) -> None:
    rows = [row for row in serving_rows(1, (64,)) if row["output_length"] == 128]
    assert "output_length" == pictures.axis_of(rows)
    assert "concurrency" == pictures.axis_of([*rows, rows[0] | {"concurrency": 32}])


@pytest.mark.parametrize("floor", [None, 5.0])
def test_latency_is_drawn_with_and_without_floors(tmp_path: Path, floor: float | None) -> None:
    pytest.importorskip("matplotlib")
    pictures.plot_latency(latency_rows(floor), tmp_path / "latency.png")
    width, height = png_size(tmp_path / "latency.png")
    assert 1000 <= width <= 2000 and 300 <= height <= 1000


def test_a_missing_matplotlib_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BenchError, match=r"pip install 'lockstep\[bench\]'"):
        pictures.require_matplotlib()
    with pytest.raises(BenchError, match=r"pip install 'lockstep\[bench\]'"):
        pictures.plot_latency(latency_rows(None), tmp_path / "latency.png")


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(BenchError, match="give another --output"):
        pictures.plot_latency(latency_rows(None), tmp_path / "missing" / "latency.png")
    assert [] == list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------- pictures of a load


def row(load: int | float, factor: float = 1.0, **changes: Any) -> dict[str, Any]:
    """A row of so many streams, or of a rate."""
    times = {"mean": factor, "p50": factor, "p90": 2 * factor, "p99": 3 * factor}
    return {
        "input_length": 64,
        "output_length": 32,
        "concurrency": load if isinstance(load, int) else None,
        "request_rate": None if isinstance(load, int) else load,
        "output_tokens_per_second": 100.0 * factor,
        "ttft_ms": times,
        "tpot_ms": times,
        "inter_token_quantiles_ms": [0.0, 0.0, *(factor * n for n in range(1, 102))],
        "samples": {"ttft_ms": [factor, 2 * factor, 3 * factor]},
        "server_timeline": [{"at_s": 0.5 * n, "running": n, "waiting": 0} for n in range(5)],
    } | changes


def drawn(rows: list[dict[str, Any]], folder: Path) -> dict[str, pictures.Picture]:
    pytest.importorskip("matplotlib")
    return {one.path.name: one for one in pictures.draw_load(Result(context(), rows=rows), folder)}


def test_a_sweep_has_all_three(tmp_path: Path) -> None:
    found = drawn([row(1), row(4, 2.0), row(2.5, 3.0)], tmp_path)
    assert list(found) == ["pareto.png", "distributions.png", "server.png"]
    for picture in found.values():
        width, height = png_size(picture.path)
        assert 1000 <= width <= 1300
        assert 400 <= height <= 1400
        assert "64 in 32 out" in picture.caption
        assert "1, 4 concurrent; 2.5 requests/s" in picture.caption


def test_one_load_has_nothing_to_be_compared_with_and_a_short_row_no_timeline(tmp_path: Path) -> None:
    assert list(drawn([row(1, server_timeline=[{"at_s": 0.0, "running": 0, "waiting": 0}])], tmp_path)) == [
        "distributions.png"
    ]


def test_rows_without_an_answer_and_answers_of_one_token_do_no_harm(tmp_path: Path) -> None:
    failed = row(8, ttft_ms=None, tpot_ms=None, inter_token_quantiles_ms=[], samples={"ttft_ms": []})
    single = row(2, tpot_ms=None, inter_token_quantiles_ms=[])
    assert "pareto.png" in drawn([row(1), single, failed], tmp_path)
    assert drawn([failed], tmp_path) == {}


def test_more_lines_than_colours_are_some_of_them_and_the_picture_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "DOTS_PER_INCH", 20)
    monkeypatch.setattr(pictures, "MOST_PANELS", 3)
    found = drawn([row(n, float(n)) for n in range(1, 21)], tmp_path)
    assert f"({pictures.MOST_LINES} of 20 rows)" in found["distributions.png"].caption
    assert f"({pictures.MOST_PANELS} of 20 rows)" in found["server.png"].caption
    assert "rows)" not in found["pareto.png"].caption  # all of them are points of one line


def test_rows_of_simulate_have_their_latencies_against_throughput(tmp_path: Path) -> None:
    rows = [row(rate, rate) for rate in (1.0, 2.0)]
    for one in rows:
        for key in ("inter_token_quantiles_ms", "samples", "server_timeline"):
            del one[key]
    assert list(drawn(rows, tmp_path)) == ["pareto.png"]
