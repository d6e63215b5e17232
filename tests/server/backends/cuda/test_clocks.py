"""What a GPU's clocks are while it computes, told by a stand-in for the driver's tool."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from server.backends.cuda import device
from server.backends.cuda.device import clocks_during
from server.stepping.warmup import _decode_for
from tests.server.driver import load_engine
from tests.server.tiny import save_tiny

ANSWER = "1755, 1980, 2619, 2619, 412.53, 700.00, 41"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script by the tool's name, first where programs are looked for."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "nvidia-smi"


def says(tool: Path, script: str) -> None:
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


def test_clocks_are_asked_for_while_it_computes(tool: Path) -> None:
    says(tool, f'test "$1 $2" = "-i GPU-7" && echo "{ANSWER}"')
    told = clocks_during("GPU-7", lambda: time.sleep(0.5))
    assert "SM 1755 of 1980 MHz, memory 2619 of 2619 MHz, 412.53 of 700.00 W, 41 C" == told


@pytest.mark.parametrize("script", ["exit 6", "echo nonsense", "true", "sleep 60"])
def test_where_nobody_tells_nothing_is_said(tool: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(device, "ANSWER_S", 0.3)
    says(tool, script)
    assert "" == clocks_during("GPU-7", lambda: time.sleep(0.1))


def test_without_the_tool_the_action_runs_all_the_same(tool: Path) -> None:
    ran: list[int] = []
    assert "" == clocks_during("GPU-7", lambda: ran.append(1)) and [1] == ran


def test_an_answer_that_comes_too_late_is_not_told(tool: Path) -> None:
    says(tool, f'sleep 0.3; echo "{ANSWER}"')
    assert "" == clocks_during("GPU-7", lambda: time.sleep(0.05))


@pytest.mark.parametrize("case", ["bloom", "t5"])
def test_decoding_for_a_while_leaves_nothing_behind(case: str, tmp_path: Path) -> None:
    save_tiny(case, tmp_path)
    engine = load_engine(tmp_path, tokens=128, total_tokens=100)
    for seconds in (0.0, 0.05, 10.0):  # the last: as far as one sequence reaches
        _decode_for(seconds, engine, 100)
        assert engine._sequences is not None and not engine._sequences.sequences
