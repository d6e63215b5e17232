"""How long who is refused is told to stay away."""

from __future__ import annotations

from router.scheduling.drain_rate import FEW, WINDOW, DrainRate


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nothing_is_known_before_the_first_end() -> None:
    clock = Clock()
    rate = DrainRate(clock)
    rate.began()
    clock.now += 500
    assert (1, 1) == (rate.seconds_for_requests(3), rate.seconds_for_tokens(1000))


def test_places_free_as_quickly_as_they_did() -> None:
    clock = Clock()
    rate = DrainRate(clock)
    for _ in range(10):
        rate.began()
    for _ in range(4):
        clock.now += 5
        rate.ended(200)
    # Four requests and 800 tokens in 20 s.
    assert (5, 10, 60) == tuple(rate.seconds_for_requests(count) for count in (1, 2, 40))
    assert (1, 5, 60) == tuple(rate.seconds_for_tokens(tokens) for tokens in (1, 200, 4000))
    clock.now += 20  # nothing has ended since: it goes half as quickly
    assert 10 == rate.seconds_for_requests(1)


def test_what_was_before_an_idle_time_does_not_count() -> None:
    clock = Clock()
    rate = DrainRate(clock)
    rate.began()
    clock.now += 50
    rate.ended(100)
    clock.now += 3600
    rate.began()
    assert 1 == rate.seconds_for_requests(1)


def test_only_the_last_ends_count() -> None:
    clock = Clock()
    rate = DrainRate(clock)
    for _ in range(2 * WINDOW + 1):
        rate.began()
    for seconds in (10, 2):
        for _ in range(WINDOW):
            clock.now += seconds
            rate.ended(10)
    assert 2 == rate.seconds_for_requests(1)


def test_a_burst_after_quiet_time_is_measured_by_itself() -> None:
    clock = Clock()
    rate = DrainRate(clock)
    rate.began()  # a stream that does not end
    for _ in range(WINDOW):
        rate.began()
        clock.now += 20
        rate.ended(100)
    for _ in range(50):
        rate.began()
    for _ in range(FEW + 1):
        clock.now += 0.05
        rate.ended(100)
    assert (1, 2) == (rate.seconds_for_requests(20), rate.seconds_for_requests(40))
