"""What is said of what is left: by what was done, by what is known before, and nothing before that."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from benchmark.progress import Progress, Remaining, Stage, left_in_words, words

ROOT = Path(__file__).parents[2]


class ManualClock:
    """Only `pass_` moves it."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def test_nothing_is_said_before_anything_is_done() -> None:
    clock = ManualClock()
    remaining = Remaining([Stage("a"), Stage("b")], clock)
    remaining.begin()
    clock.now += 10
    assert remaining.seconds_left is None
    assert left_in_words(remaining) == ""
    assert remaining.share_done == 0.0


def test_what_is_left_follows_from_the_work_done() -> None:
    clock = ManualClock()
    remaining = Remaining([Stage("a", 2), Stage("b", 6)], clock)
    remaining.begin()
    clock.now += 5
    remaining.advance(0.5)  # 1 of 8 in 5 s
    assert remaining.seconds_left == pytest.approx(35)
    clock.now += 5
    remaining.begin()  # 2 of 8 in 10 s
    assert remaining.seconds_left == pytest.approx(30)
    clock.now += 10
    remaining.advance(1 / 3)  # 4 of 8 in 20 s
    assert remaining.seconds_left == pytest.approx(20)
    assert remaining.share_done == pytest.approx(0.5)
    remaining.finish()
    assert remaining.seconds_left == 0


def test_stages_of_known_length_count_as_they_are() -> None:
    clock = ManualClock()
    remaining = Remaining([Stage("known", seconds=60), Stage("open", 1), Stage("known", seconds=30)], clock)
    remaining.begin()
    clock.now += 20
    assert remaining.seconds_left is None  # nobody knows how long the open one takes
    clock.now += 40
    remaining.begin()
    clock.now += 10
    remaining.advance(0.5)
    assert remaining.seconds_left == pytest.approx(10 + 30)
    remaining.begin()
    clock.now += 45  # longer than was known
    assert remaining.seconds_left == 0


def test_what_is_expected_can_change() -> None:
    clock = ManualClock()
    remaining = Remaining([], clock)
    remaining.expect([Stage("first", seconds=10), Stage("second", seconds=10)])
    remaining.begin()
    remaining.expect([Stage("other", seconds=5)])
    assert remaining.seconds_left == 15
    assert [remaining.begin().name, remaining.begin().name] == ["other", ""]  # one more than was expected


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "1 s"), (89, "89 s"), (100, "2 min"), (5399, "1 h 30 min"), (7500, "2 h 05 min")]
)
def test_times_are_said_as_people_say_them(seconds: float, said: str) -> None:
    assert words(seconds) == said


def test_lines_have_the_stage_and_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    clock = ManualClock()
    progress = Progress(Remaining([Stage("one"), Stage("two")], clock))
    done = []
    for thing in progress.each("ab"):
        clock.now += 3
        done.append(thing)
    captured = capsys.readouterr()
    assert done == ["a", "b"]
    assert captured.out == ""
    assert captured.err.splitlines() == ["1 of 2: one", "2 of 2: two, about 3 s left"]


def test_a_single_stage_is_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    Progress(Remaining([Stage("all of it")])).begin()
    assert capsys.readouterr().err == ""


def test_a_terminal_sees_a_bar_and_standard_output_nothing() -> None:
    code = (
        "from benchmark.progress import Stage, shown\n"
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
