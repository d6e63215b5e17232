"""What comes next in a file is asked for once, and nothing else is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from server.checkpoint import weights
from server.checkpoint.weights import ReadAhead


def test_what_follows_is_asked_for_in_stretches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    save_file({f"layer{number}": torch.zeros(1000) for number in range(10)}, path)
    data = path.stat().st_size - 40_000
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(weights, "AHEAD_BYTES", 12_000)
    monkeypatch.setattr(os, "posix_fadvise", lambda file, begin, size, advice: asked.append((begin - data, size)))
    reading = ReadAhead()
    for number in range(4):
        reading.passed(path, f"layer{number}")
    assert [(4_000, 12_000), (16_000, 8_000)] == asked  # behind the first; then, half of that having passed, more
    reading.passed(path, "layer8")
    assert (36_000, 12_000) == asked[-1]
    reading.passed(path, "layer0")
    assert (4_000, 12_000) == asked[-1]
