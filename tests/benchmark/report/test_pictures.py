"""Plots: the files are there and have a sensible size. That they are legible was looked at, not tested."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmark.report import pictures
from benchmark.result import BenchError


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
