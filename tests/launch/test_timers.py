"""Whose silence counts."""

from __future__ import annotations

from launch.timers import SILENCE_S, TICK_S, Watchdog


def silent_after(watchdog: Watchdog, start: float, step: float, ticks: int) -> int | None:
    """The look, of so many that are `step` seconds apart, at which it counts as silent."""
    return next((look for look in range(1, ticks + 1) if watchdog.is_silent(start + look * step)), None)


def test_who_says_nothing_is_silent_after_a_while_and_any_sign_begins_anew() -> None:
    watchdog = Watchdog(100.0)
    assert round(SILENCE_S / TICK_S) == silent_after(watchdog, 100.0, TICK_S, 60)
    watchdog.reset()
    assert not watchdog.is_silent(100.0 + SILENCE_S + TICK_S)


def test_time_in_which_this_process_ran_late_does_not_count() -> None:
    watchdog = Watchdog(100.0)
    assert not watchdog.is_silent(100.0 + 3600.0)  # suspended
    assert silent_after(watchdog, 3700.0, 3 * TICK_S, 100) is None  # starved
    assert silent_after(watchdog, 4000.0, TICK_S, 60) is not None
