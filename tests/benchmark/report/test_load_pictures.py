"""Pictures of a load: which there are for which rows. That they are legible was looked at, not tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmark.report import pictures
from benchmark.result import Result
from tests.benchmark.report.test_pictures import png_size
from tests.benchmark.report.test_result import context


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
