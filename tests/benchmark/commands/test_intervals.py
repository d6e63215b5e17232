"""How often `compare` calls equal systems different, and finds those that are: held by systems that are simulated."""

from __future__ import annotations

import numpy as np
import pytest

from benchmark.commands.compare import (
    DIFFERS,
    ONE_START,
    UNKNOWN,
    TooShort,
    autocorrelation_time,
    between_starts,
    t_quantile,
    within_a_start,
)
from tests.benchmark.simulated_systems import (
    OPEN_REQUESTS,
    REQUESTS,
    STARTS,
    Queue,
    Streams,
    differs,
    figures,
    leaves_out_one,
    share,
)
from tests.running import ROOT

MOST_FALSE_ALARMS = 0.08  # of nominally 0.05
LEAST_FOUND = 0.8


@pytest.mark.parametrize(("freedom", "published"), [(1, 12.706), (2, 4.303), (4, 2.776), (8, 2.306), (30, 2.042)])
def test_student_s_quantiles_are_those_of_the_tables(freedom: float, published: float) -> None:
    assert published == pytest.approx(t_quantile(freedom), abs=0.0005)


def test_the_interval_of_two_starts_each_by_hand() -> None:
    """Logarithms 0 and 2, and 1 and 3: their means lie 1 apart, variances of the means 1 each, 2 degrees of freedom."""
    base, other = [1.0, np.e**2], [np.e, np.e**3]
    reach = t_quantile(2) * 2**0.5
    assert (1 - reach, 1 + reach) == pytest.approx(np.log(between_starts(base, other)))


def test_starts_of_unequal_scatter_have_the_freedom_of_the_wilder_ones() -> None:
    steady, wild = [1.0, 1.0001, 0.9999, 1.0], [1.0, 1.5, 0.7]
    low, high = np.log(between_starts(steady, wild))
    assert 2 * t_quantile(2) * np.log(wild).std(ddof=1) / 3**0.5 == pytest.approx(high - low, rel=1e-3)


def test_copies_are_no_starts() -> None:
    with pytest.raises(TooShort, match="copies"):
        between_starts([2.0, 2.0], [3.0, 3.0])


def test_the_autocorrelation_time_is_that_of_the_process() -> None:
    """Of x[k] = a x[k - 1] + noise it is (1 + a) / (1 - a)."""
    random = np.random.default_rng(1)
    assert 1.0 == pytest.approx(autocorrelation_time(random.normal(size=50_000)), abs=0.1)
    tied = np.zeros(50_000)
    for k, noise in enumerate(random.normal(size=len(tied) - 1), 1):
        tied[k] = 0.9 * tied[k - 1] + noise
    assert 19.0 == pytest.approx(autocorrelation_time(tied), rel=0.15)
    assert 1.0 == autocorrelation_time(np.zeros(50))


def test_within_a_start_the_same_work_cancels_out() -> None:
    """Times that scatter by their own size, and twice those, up to a percent: the ratio is as sure as that percent."""
    random = np.random.default_rng(1)
    base = random.exponential(size=400)
    low, high = within_a_start(list(base), list(2 * base * random.normal(1.0, 0.01, 400)))
    assert 1.99 < low < 2 < high < 2.01
    low, high = within_a_start(list(base), list(2 * random.exponential(size=600)))  # some pieces of more than one
    assert low < 1.95 and 2.05 < high


def test_a_short_start_has_no_interval() -> None:
    with pytest.raises(TooShort, match="fewer than 200 samples"):
        within_a_start([1.0, 2.0] * 99, [2.0, 1.0] * 99)
    wave = [2 + np.sin(k / 20) for k in range(400)]
    with pytest.raises(TooShort, match="less than 200 times"):
        within_a_start(wave, wave[::-1])
    with pytest.raises(TooShort, match="less than 200 times"):
        within_a_start(wave, wave)  # whose difference, alone, is tied to nothing
    with pytest.raises(TooShort, match="nothing came"):
        within_a_start([0.0] * 399 + [1.0], [0.0] * 399 + [1.0])


# --------------------------------------------------------------------------------- false alarms, and what is found


@pytest.mark.parametrize(
    ("load", "requests", "given"), [(0.5, 1500, 0.2), (0.5, 3000, 0.7), (0.8, 15_000, 0.1), (0.8, 30_000, 0.7)]
)
def test_queues_that_are_the_same_seldom_differ_within_a_start(load: float, requests: int, given: float) -> None:
    """Of queues with nothing in common but their load: of the intervals that there are, few leave out 1."""
    found = figures(Queue(load, same_work=False), 400, starts=1, requests=requests, spread=0.0)
    intervals = [figure for figure in found if figure.within_start is not None]
    assert len(intervals) >= given * len(found)
    assert share(intervals, leaves_out_one) <= MOST_FALSE_ALARMS
    assert {(UNKNOWN, None)} == {(figure.verdict, figure.interval) for figure in found}


@pytest.mark.parametrize(("load", "requests"), [(0.5, 300), (0.8, 1000), (0.8, 3000), (0.9, 1000), (0.9, 3000)])
def test_a_start_that_is_much_too_short_for_its_waves_has_no_interval(load: float, requests: int) -> None:
    found = figures(Queue(load, same_work=False), 250, starts=1, requests=requests, spread=0.0)
    assert share(found, lambda figure: figure.within_start is not None) <= 0.01


@pytest.mark.parametrize("same_work", [True, False])
def test_queues_that_are_the_same_seldom_differ(same_work: bool) -> None:
    found = figures(Queue(0.9, same_work), 250)
    assert share(found, differs) <= MOST_FALSE_ALARMS


def test_ten_runs_of_one_start_are_no_ground_for_a_verdict() -> None:
    """Their starts are 3 % apart, and their requests nearly equal; ten starts are a ground."""
    one = figures(Queue(0.1), 20, starts=1, requests=10)
    assert {UNKNOWN} == {figure.verdict for figure in one} and all(
        figure.reason.startswith(ONE_START) for figure in one
    )
    assert share(figures(Queue(0.1), 250, starts=10, requests=10), differs) <= MOST_FALSE_ALARMS


@pytest.mark.parametrize(("load", "same_work"), [(0.5, False), (0.9, False), (0.9, True)])
def test_a_queue_that_is_a_tenth_slower_is_found(load: float, same_work: bool) -> None:
    """By the starts that docs/benchmarking.md recommends, and the requests, which are fewer of the same work."""
    requests = REQUESTS if same_work else OPEN_REQUESTS
    found = figures(Queue(load, same_work), 200, requests=requests, slower=1.1)
    assert share(found, differs) >= LEAST_FOUND
    assert all(figure.ratio and figure.ratio > 1 for figure in found if figure.verdict == DIFFERS)


def test_streams_of_several_tokens_an_event() -> None:
    """Intervals are around the ratio, equal systems seldom differ, and a throughput that is a tenth less is found.

    Already by fewer requests than are recommended.
    """
    same = figures(Streams(), 60, requests=150)
    slower = figures(Streams(), 30, requests=150, slower=1.1)
    for figure in (*same, *slower):
        assert figure.interval and figure.interval.low < (figure.ratio or 0) < figure.interval.high
    assert share(same, differs) <= MOST_FALSE_ALARMS
    assert share(slower, differs) >= LEAST_FOUND
    alone = figures(Streams(), 60, starts=1, requests=100, spread=0.0)
    assert share(alone, leaves_out_one) <= MOST_FALSE_ALARMS
    [one] = figures(Streams(), 1, starts=1, requests=400)
    assert one.within_start and one.within_start.low < (one.ratio or 0) < one.within_start.high


def test_the_page_recommends_what_is_tested() -> None:
    page = (ROOT / "docs" / "benchmarking.md").read_text()
    assert f"**{STARTS} starts of each, of {REQUESTS:,} requests in closed loops and {OPEN_REQUESTS:,} in open" in page
