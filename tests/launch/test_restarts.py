"""How often, and how soon, what died is started again."""

from __future__ import annotations

from launch.restarts import WINDOW_S, RestartPolicy


def test_the_first_restart_is_immediate_and_later_ones_back_off_until_it_is_given_up() -> None:
    restarts = RestartPolicy(8)
    assert [0, 1, 2, 4, 8, 16, 16, None] == [restarts.delay(10.0 * n) for n in range(8)]


def test_a_death_after_a_token_does_not_count() -> None:
    restarts = RestartPolicy(3)
    for n in range(20):
        restarts.advanced()
        assert 0.0 == restarts.delay(float(n))
    assert [0.0, 1.0, None] == [restarts.delay(20.0) for _ in range(3)]


def test_a_token_ends_a_row_but_not_the_count() -> None:
    restarts = RestartPolicy(4)
    assert [0.0, 1.0] == [restarts.delay(0.0), restarts.delay(1.0)]
    restarts.advanced()
    assert [0.0, 0.0, None] == [restarts.delay(2.0), restarts.delay(3.0), restarts.delay(4.0)]


def test_old_deaths_are_forgotten() -> None:
    restarts = RestartPolicy(2)
    assert 0.0 == restarts.delay(0.0)
    assert restarts.delay(WINDOW_S) == 0.0  # as the first
    assert restarts.delay(WINDOW_S + 1.0) is None


def test_deaths_without_end_back_off_as_far_as_ever() -> None:
    restarts = RestartPolicy(6)
    assert [16.0] * 1990 == [restarts.delay(0.2 * WINDOW_S * n) for n in range(2000)][10:]


def test_none_may_be_allowed() -> None:
    restarts = RestartPolicy(0)
    restarts.advanced()
    assert restarts.delay(0.0) is None
