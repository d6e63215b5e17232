"""What a person is told of a job: what is left, how fast it goes, how long it will take."""

from __future__ import annotations

import io

import pytest

from host.progress import CLEAR_TO_END, duration
from router.jobs.progress import Progress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_log_has_a_line_now_and_then() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, is_live=False, clock=clock)
    progress.total = 10_000
    progress.note(1000)
    clock.now = 10.0
    progress.report(1400, 100, "the server answers 503")
    told = "1,500 of 10,000 lines, 100 failed, 8,500 left, 50.0 lines/s, 2 min 50 s to go (the server answers 503)\n"
    assert told == stream.getvalue()


def test_nobody_knows_how_long_it_takes_while_nothing_is_done() -> None:
    clock = Clock()
    progress = Progress(io.StringIO(), is_live=True, clock=clock)
    progress.total = 100
    for clock.now in (0.0, 10.0, 20.0):
        progress.note(int(clock.now))
    for clock.now in (35.0, 51.0):
        progress.note(20)
    assert "20 of 100 lines, 0 failed, 80 left (no answer)" == progress.sentence(20, 0, "no answer")
    assert "to go" in progress.sentence(20, 0)
    clock.now = 52.0
    progress.note(21)
    assert progress.sentence(21, 0, "no answer").endswith(" to go (no answer)")


def test_a_terminal_has_one_line_in_place_and_others_above_it() -> None:
    stream = io.StringIO()
    progress = Progress(stream, is_live=True, clock=Clock())
    progress.total = 5
    progress.report(1, 0, "a long word of trouble " * 10)
    progress.report(2, 0)
    progress.say("a line that stays")
    progress.report(5, 0)
    progress.end()
    first, second, said, last = stream.getvalue().split("\r")[1:]
    assert first.endswith(f"…{CLEAR_TO_END}") and len(first) < 80 + len(CLEAR_TO_END), "it would wrap"
    assert f"2 of 5 lines, 0 failed, 3 left{CLEAR_TO_END}" == second
    assert f"{CLEAR_TO_END}a line that stays\n" == said
    assert f"5 of 5 lines, 0 failed, 0 left{CLEAR_TO_END}\n" == last


def test_the_rate_is_of_late_alone() -> None:
    clock = Clock()
    progress = Progress(io.StringIO(), is_live=False, clock=clock)
    progress.total = 10_000
    for second in range(0, 1000, 10):
        clock.now = second
        progress.note(second if second < 500 else 500 + 10 * (second - 500))
    assert "10.0 lines/s" in progress.sentence(5000, 0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (61, "1 min 1 s"), (7200, "2 h 0 min"), (200_000, "2 d 7 h")]
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert text == duration(seconds)
