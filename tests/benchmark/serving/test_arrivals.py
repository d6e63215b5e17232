"""When requests are sent: rates, gaps and their courses, by numbers."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from statistics import fmean, pstdev

import pytest

from benchmark.serving.outcomes import Load
from benchmark.serving.workload import arrival_times


def gaps(load: Load) -> list[float]:
    return [after - before for before, after in pairwise(arrival_times(load, 20_000, None, Random(1)))]


@pytest.mark.parametrize("burstiness", [0.0, 0.5, 1.0, 2.0])
def test_gaps_have_their_mean_and_their_deviation(burstiness: float) -> None:
    found = gaps(Load(request_rate=20.0, burstiness=burstiness))
    assert pytest.approx(1 / 20, rel=0.05) == fmean(found)
    assert pytest.approx(burstiness, rel=0.05, abs=1e-9) == pstdev(found) / fmean(found)


def test_a_ramp_goes_from_one_rate_to_the_other() -> None:
    load = Load(request_rate=55.0, ramp=(10.0, 100.0), burstiness=0.0)
    times = arrival_times(load, None, 100.0, Random(0))
    in_seconds = [sum(second <= at < second + 10 for at in times) for second in (0, 45, 90)]
    assert [145, 550, 955] == pytest.approx(in_seconds, abs=2)  # 10 s around rates of 14.5, 55 and 95.5
    assert 5500 == pytest.approx(len(times), abs=1)


def test_a_ramp_may_fall_and_then_stays() -> None:
    load = Load(request_rate=6.0, ramp=(10.0, 2.0), burstiness=0.0)
    times = arrival_times(load, 70, 1000.0, Random(0))
    assert 70 == len(times) and times == sorted(times)
    short = arrival_times(load, 60, None, Random(0))
    assert pytest.approx(10.0) == short[-1]  # 60 at 6 a second on average


def test_a_duration_and_a_number_end_what_comes_first() -> None:
    load = Load(request_rate=10.0, burstiness=0.0)
    assert (19, 5) == tuple(len(arrival_times(load, count, 2.0, Random(0))) for count in (None, 5))


def test_a_load_says_what_it_is() -> None:
    assert "4 concurrent" == str(Load(concurrency=4))
    assert "5 requests/s" == str(Load(request_rate=5.0))
    assert "1 to 9 requests/s, constant gaps, 8 at once" == str(
        Load(request_rate=5.0, ramp=(1.0, 9.0), burstiness=0.0, max_concurrency=8)
    )
