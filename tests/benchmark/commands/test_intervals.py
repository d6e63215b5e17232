"""How often `compare` calls equal systems different, and finds those that are: held by systems that are simulated."""

from __future__ import annotations

import numpy as np
import pytest

from benchmark.commands.compare import DIFFERS, ONE_START, UNKNOWN, TooShort, between_starts, t_quantile
from tests.benchmark.simulated_systems import OPEN_REQUESTS, REQUESTS, STARTS, Queue, Streams, differs, figures, share
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


# --------------------------------------------------------------------------------- false alarms, and what is found


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


def test_the_page_recommends_what_is_tested() -> None:
    page = (ROOT / "docs" / "benchmarking.md").read_text()
    assert f"**{STARTS} starts of each, of {REQUESTS:,} requests in closed loops and {OPEN_REQUESTS:,} in open" in page
