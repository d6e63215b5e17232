"""What is said of what is left: by what was done, by what is known before, and nothing before that."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from benchmark.terminal import Progress, Stage, words
from tests.running import ROOT


class ManualClock:
    """Only `pass_` moves it."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def test_nothing_is_said_before_anything_is_done() -> None:
    clock = ManualClock()
    progress = Progress([Stage("a"), Stage("b")], clock)
    progress.begin()
    clock.now += 10
    assert ("", 0.0) == (progress.left, progress.share_done)


def test_what_is_left_follows_from_the_work_done() -> None:
    clock = ManualClock()
    progress = Progress([Stage("a", 2), Stage("b", 6)], clock)
    progress.begin()
    clock.now += 5
    progress.advance(0.5)  # 1 of 8 in 5 s
    assert "about 35 s left" == progress.left
    clock.now += 5
    progress.begin()  # 2 of 8 in 10 s
    assert "about 30 s left" == progress.left
    clock.now += 10
    progress.advance(1 / 3)  # 4 of 8 in 20 s
    assert "about 20 s left" == progress.left
    assert 0.5 == pytest.approx(progress.share_done)


def test_a_stage_more_than_was_expected_has_no_name() -> None:
    progress = Progress([Stage("only")])
    assert ["only", ""] == [progress.begin().name, progress.begin().name]


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "1 s"), (89, "89 s"), (100, "2 min"), (5399, "1 h 30 min"), (7500, "2 h 05 min")]
)
def test_times_are_said_as_people_say_them(seconds: float, said: str) -> None:
    assert words(seconds) == said


def test_lines_have_the_stage_and_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    clock = ManualClock()
    progress = Progress([Stage("one"), Stage("two")], clock)
    done = []
    for thing in progress.each("ab"):
        clock.now += 3
        done.append(thing)
    captured = capsys.readouterr()
    assert done == ["a", "b"]
    assert captured.out == ""
    assert captured.err.splitlines() == ["1 of 2: one", "2 of 2: two, about 3 s left"]


def test_a_single_stage_is_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    Progress([Stage("all of it")]).begin()
    assert capsys.readouterr().err == ""


def test_a_terminal_sees_a_bar_and_standard_output_nothing() -> None:
    code = (
        "from benchmark.terminal import Stage, shown\n"
        "with shown('a title', [Stage('first'), Stage('second')]) as view:\n"
        "    view.begin(); view.advance(0.5); view.begin()\n"
        "print('done')"
    )
    ours, theirs = pty.openpty()
    try:
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
        ran = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs, env=environment, timeout=60
        )
        seen = os.read(ours, 100_000).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert ran.stdout == b"done\n"
    assert "a title" in seen
    assert "2 of 2: second" in seen
    assert "left" in seen
