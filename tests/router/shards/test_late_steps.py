"""When a step is late: against steps of its size, and by the time that this process was awake."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from router.shards.group import ACTIVE_S, FLOOR_S, MOST_S, SAMPLES, TICK_S, StepWatch


def took(watch: StepWatch, prompt_tokens: int, seconds: Iterable[float], start: float = 0.0) -> float:
    """Steps one after the other; when the last was answered."""
    now = start
    for duration in seconds:
        watch.sent(prompt_tokens, now)
        now += duration
        watch.received(now)
    return now


def late_after(watch: StepWatch, now: float, most: float) -> float | None:
    """How long after `now` the watch finds the step late, if it does so within `most` seconds."""
    at = now
    while at < now + most:
        at += TICK_S
        if watch.is_late(watch.age(at)):
            return at - now
    return None


def test_nothing_is_late_where_nothing_is_under_way() -> None:
    watch = StepWatch()
    assert late_after(watch, 0.0, 100.0) is None
    now = took(watch, 0, [0.1])
    assert late_after(watch, now, 100.0) is None


def test_a_quick_step_is_late_after_the_floor() -> None:
    watch = StepWatch()
    now = took(watch, 0, [0.01] * 50)
    watch.sent(0, now)
    assert FLOOR_S + TICK_S == pytest.approx(late_after(watch, now, 100.0), abs=TICK_S)


def test_a_step_is_not_late_until_nothing_has_gone_on_for_a_while() -> None:
    watch = StepWatch()
    assert not watch.is_active(0, 100.0)  # nothing goes on
    assert watch.is_active(8, 101.0)
    assert watch.is_active(8, 101.0 + ACTIVE_S / 2)
    assert not watch.is_active(8, 101.0 + ACTIVE_S)
    assert watch.is_active(9, 200.0)


def test_a_slow_step_is_late_after_ten_times_the_slowest_of_its_size() -> None:
    watch = StepWatch()
    now = took(watch, 512, [1.0] * 20)
    watch.sent(512, now)
    assert 10.0 == pytest.approx(late_after(watch, now, 100.0), abs=2 * TICK_S)


def test_a_larger_step_than_any_known_may_take_longer_in_proportion() -> None:
    watch = StepWatch()
    now = took(watch, 127, [0.5] * 20)
    watch.sent(511, now)  # four times as many
    assert 20.0 == pytest.approx(late_after(watch, now, 100.0), abs=2 * TICK_S)


def test_of_a_smaller_step_the_larger_says_how_long() -> None:
    watch = StepWatch()
    now = took(watch, 4000, [1.0] * 20)
    watch.sent(100, now)
    assert 10.0 == pytest.approx(late_after(watch, now, 100.0), abs=2 * TICK_S)


def test_before_anything_is_known_there_is_much_time() -> None:
    watch = StepWatch()
    watch.sent(4096, 5.0)
    assert pytest.approx(late_after(watch, 5.0, 1000.0), abs=2 * TICK_S) == MOST_S


def test_a_step_far_larger_than_any_known_is_late_some_time() -> None:
    watch = StepWatch()
    now = took(watch, 0, [1.0])
    watch.sent(4096, now)
    assert pytest.approx(late_after(watch, now, 1000.0), abs=2 * TICK_S) == MOST_S


def test_a_step_that_waits_behind_another_is_not_late_for_it() -> None:
    watch = StepWatch()
    now = took(watch, 0, [0.01] * 50)
    watch.sent(0, now)
    watch.sent(0, now)
    watch.received(now + 1.9)
    assert late_after(watch, now + 1.9, 1.9) is None


def test_time_in_which_the_whole_machine_stood_still_does_not_count() -> None:
    watch = StepWatch()
    now = took(watch, 0, [0.01] * 50)
    watch.sent(0, now)
    assert not watch.is_late(watch.age(now + 60.0))
    assert late_after(watch, now + 60.0, 1.0) is None


def test_old_times_are_forgotten() -> None:
    watch = StepWatch()
    took(watch, 0, [5.0])
    now = took(watch, 0, [0.01] * SAMPLES, start=5.0)
    watch.sent(0, now)
    assert FLOOR_S + TICK_S == pytest.approx(late_after(watch, now, 100.0), abs=TICK_S)


def test_steps_of_later_shards_take_what_they_took_before() -> None:
    before = StepWatch()
    for now in (100.0, 101.0):
        before.sent(1, now)
        before.received(now + 0.5)
    watch = StepWatch(before)
    watch.sent(1, 200.0)
    assert (False, True) == (watch.is_late(4.9), watch.is_late(5.1))


def test_shards_in_the_place_of_late_ones_have_twice_their_patience_for_a_while() -> None:
    """Or every step would be late for ever on cores so busy that it takes longer than `FLOOR_S`."""
    watch, now = StepWatch(), 0.0
    for patience in (1, 2, 4):
        now = took(watch, 0, [0.01] * 50, start=now)
        watch.sent(0, now)
        assert patience * FLOOR_S + TICK_S == pytest.approx(late_after(watch, now, 100.0), abs=TICK_S)
        watch.is_given_up = True
        watch = StepWatch(watch)
    now = took(watch, 0, [0.01] * SAMPLES, start=now)
    for later in (watch, StepWatch(watch)):  # which were lost for another reason
        later.sent(0, now)
        assert FLOOR_S + TICK_S == pytest.approx(late_after(later, now, 100.0), abs=TICK_S)
