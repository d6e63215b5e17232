"""When requests are meant to be sent: constant gaps, Poisson, gamma, and rates that rise or fall over the run.

Gaps of mean 1 are drawn first and then stretched by the rate, so that every kind of gap goes with every course of the
rate. Numbers only: no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice, takewhile
from random import Random

from benchmark.outcomes import Load


def unit_times(burstiness: float, random: Random) -> Iterator[float]:
    """Ascending times without end, one a second on average.

    burstiness: the gaps' standard deviation / mean; 0 is a constant gap, 1 is Poisson, anything else gamma.
    """
    now = 0.0
    shape = burstiness**-2 if burstiness else math.inf
    while True:
        if burstiness == 1:
            now += random.expovariate(1.0)
        else:
            now += random.gammavariate(shape, 1 / shape) if burstiness else 1.0
        yield now


def arrival_times(load: Load, count: int | None, seconds: float | None, random: Random) -> list[float]:
    """Intended send times in seconds: `count` of them, or all before `seconds`, or what comes first of the two."""
    assert load.request_rate is not None and (count or seconds), "an open loop ends somewhere"
    first, last = load.ramp or (load.request_rate, load.request_rate)
    lasts = seconds if seconds is not None else (count or 0) / load.request_rate
    times = (_when(passed, first, last, lasts) for passed in unit_times(load.burstiness, random))
    bounded = times if seconds is None else takewhile(lambda at: at < seconds, times)
    return list(islice(bounded, count))


def _when(passed: float, first: float, last: float, seconds: float) -> float:
    """When so many requests are due, at a rate that goes evenly from `first` to `last` in `seconds`, then stays."""
    slope = (last - first) / seconds
    if slope == 0:
        return passed / first
    within = (first + last) / 2 * seconds
    if passed >= within:
        return seconds + (passed - within) / last
    # first * t + slope * t**2 / 2 = passed, in the form that loses no digits to a small slope
    return 2 * passed / (first + math.sqrt(first**2 + 2 * slope * passed))
