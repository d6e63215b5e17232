"""What a GPU's clocks are while it computes, told by a stand-in for the driver's tool."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

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


class Over(threading.Event):
    """Has a file written once it is set."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def set(self) -> None:
        super().set()
        self._path.touch()


def until_there(path: Path) -> None:
    deadline = time.monotonic() + 60  # a bound of liveness
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def says(tool: Path, script: str) -> None:
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


def test_clocks_are_asked_for_while_it_computes(tool: Path, tmp_path: Path) -> None:
    """The action lasts until the tool is asked a second time: what it said first has been read by then."""
    asked, again = tmp_path / "asked", tmp_path / "again"
    says(tool, f'test -e {asked} && touch {again}; touch {asked}; test "$1 $2" = "-i GPU-7" && echo "{ANSWER}"')
    told = clocks_during("GPU-7", lambda: until_there(again))
    assert "SM 1755 of 1980 MHz, memory 2619 of 2619 MHz, 412.53 of 700.00 W, 41 C" == told


@pytest.mark.parametrize("script", ["exit 6", "echo nonsense", "true", "sleep 60"])
def test_where_nobody_tells_nothing_is_said(tool: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(device, "ANSWER_S", 0.3)
    says(tool, script)
    assert "" == clocks_during("GPU-7", lambda: time.sleep(0.1))


def test_without_the_tool_the_action_runs_all_the_same(tool: Path) -> None:
    ran: list[int] = []
    assert "" == clocks_during("GPU-7", lambda: ran.append(1)) and [1] == ran


def test_an_answer_that_comes_too_late_is_not_told(tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool answers once the action is over."""
    asked, over = tmp_path / "asked", tmp_path / "over"
    threads = SimpleNamespace(Thread=threading.Thread, Event=lambda: Over(over))
    monkeypatch.setattr(device, "threading", threads)
    says(tool, f'touch {asked}; while ! test -e {over}; do sleep 0.01; done; echo "{ANSWER}"')
    assert "" == clocks_during("GPU-7", lambda: until_there(asked))
    assert over.exists()


@pytest.mark.parametrize("case", ["bloom", "t5"])
def test_decoding_for_a_while_leaves_nothing_behind(case: str, tmp_path: Path) -> None:
    save_tiny(case, tmp_path)
    engine = load_engine(tmp_path, tokens=128, total_tokens=100)
    for seconds in (0.0, 0.05, 10.0):  # the last: as far as one sequence reaches
        _decode_for(seconds, engine, 100)
        assert engine._sequences is not None and not engine._sequences.sequences
