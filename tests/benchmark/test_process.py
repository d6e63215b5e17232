"""Commands of any program: what became of them, whatever they are called and however they end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmark.process import run_limited


@pytest.mark.parametrize(
    ("program", "seconds", "word"),
    [
        ("pass", 60.0, "done"),
        ("raise SystemExit(3)", 60.0, "failed with 3"),
        ("import os; os.kill(os.getpid(), 6)", 60.0, "crashed by SIGABRT"),
        ("import os; os.kill(os.getpid(), 40)", 60.0, "crashed by signal 40"),
        ("import time; time.sleep(600)", 5.0, "cut after 5 s"),
    ],
)
def test_what_became_of_a_command_is_a_word(tmp_path: Path, program: str, seconds: float, word: str) -> None:
    with (tmp_path / "log").open("wb") as log:
        assert word == run_limited((sys.executable, "-c", program), {}, log.fileno(), seconds)


def test_a_path_may_look_like_a_variable(tmp_path: Path) -> None:
    program = tmp_path / "a=b" / "tool"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho $COLOUR $1\n")
    program.chmod(0o755)
    with (tmp_path / "log").open("wb") as log:
        assert "done" == run_limited((str(program), "x=y"), {"COLOUR": "red"}, log.fileno(), 60.0)
        assert "not started: /a=b: No such file or directory" == run_limited(("/a=b",), {}, log.fileno(), 60.0)
    assert "red x=y\n" == (tmp_path / "log").read_text()
