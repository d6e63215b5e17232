"""How sure a ratio of two measured figures is: between several starts of either system, and within one start of each.

Two starts of the same system differ by more than their own scatter shows (memory lands elsewhere, clocks and neighbours
are others), so only the scatter between starts says whether systems differ: `between_starts`, by Welch's t-interval
(Biometrika 34, 1947) of the logarithms, which holds for few starts.

Within a start, requests that queue behind each other are no independent samples. `within_a_start` draws whole blocks:
the circular block bootstrap (Politis and Romano, 1992), ten blocks a draw, because from 10 to 30 are as good as more
(Schmeiser, Operations Research 30, 1982, on batch means), and the fewest are the longest. Both systems' blocks of the
same part of the run are drawn together, so that what the same work does to both cancels out. The interval has the
bootstrap's deviation and, as there are ten blocks, Student's quantile. Blocks must outlast what ties requests together:
a start shorter than 200 autocorrelation times, which makes blocks of twenty, has no interval. That time is the
integrated one with Sokal's window (Madras and Sokal, J. Stat. Phys. 50, 1988), the longest of either system's samples
and of their difference. It is itself an estimate, which may be a third too short in a start of 200 such times, and a
start that looks longer than it is has too narrow an interval; with fewer times more of the intervals that are given
would be those. How often intervals err, of those that are given, is held by `tests/benchmark/test_intervals.py`.

Not here: percentiles other than means of samples, and corrections for looking at many ratios at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]

CONFIDENCE = 0.95
RESAMPLES = 2000  # the deviation of so many draws is within 3 % of that of all, in 19 of 20 cases
SEED = 0
BLOCKS = 10
FEWEST_TIMES = 200.0  # autocorrelation times of a start: twenty for each block
WINDOW = 5.0  # autocorrelation times up to which correlations are summed: Sokal's choice of 4 to 10
PIECES = 1000  # that longer series are cut into: what is tied together for less than a thousandth does not matter


class Interval(NamedTuple):
    """Where a ratio is with a probability of `CONFIDENCE`."""

    low: float
    high: float

    @classmethod
    def around(cls, log_ratio: float, deviation: float, freedom: float) -> Interval:
        """Student's interval of a ratio whose logarithm has this standard error, of so many degrees of freedom."""
        reach = t_quantile(freedom) * deviation
        return cls(math.exp(log_ratio - reach), math.exp(log_ratio + reach))


class TooShort(ValueError):
    """There is too little to say how sure a ratio is; the message says what is missing."""


def t_quantile(freedom: float) -> float:
    """What Student's t of at least one degree of freedom does not exceed, in either direction, in 95 of 100 cases.

    With t = sqrt(freedom) tan(a), the density of a is in proportion to cos(a) ** (freedom - 1).
    """
    angles = np.linspace(0.0, math.pi / 2, 4001)
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate(([0.0], np.cumsum(density[1:] + density[:-1])))
    return math.sqrt(freedom) * math.tan(float(np.interp(CONFIDENCE, below / below[-1], angles)))


def between_starts(base: Sequence[float], other: Sequence[float]) -> Interval:
    """Interval of other / base from the figure of each start of either, above zero. Raises TooShort."""
    if min(len(base), len(other)) < 2:
        raise TooShort("one start does not say how far two starts of the same system differ")
    logs = [np.log(np.asarray(figures, dtype=np.float64)) for figures in (base, other)]
    variances = [float(one.var(ddof=1)) / len(one) for one in logs]
    if not (total := sum(variances)):
        raise TooShort("all starts have the same figure to the last digit: are they copies of one?")
    parts = [variance**2 / (len(one) - 1) for variance, one in zip(variances, logs, strict=True)]
    return Interval.around(float(logs[1].mean() - logs[0].mean()), math.sqrt(total), total**2 / sum(parts))


def within_a_start(base: Sequence[float], other: Sequence[float]) -> Interval:
    """Interval of mean(other) / mean(base), of samples above zero in the order of time. Raises TooShort.

    Series of different lengths are cut into as many pieces each; the k-th of one goes with the k-th of the other.
    """
    count = min(len(base), len(other), PIECES)
    if count < FEWEST_TIMES:
        raise TooShort(f"it has fewer than {FEWEST_TIMES:g} samples")
    pieces = [_pieces(samples, count) for samples in (base, other)]
    shares = [sums / sums.sum() - counts / counts.sum() for sums, counts in pieces]
    if count < FEWEST_TIMES * max(map(autocorrelation_time, (*shares, shares[1] - shares[0]))):
        raise TooShort(f"it lasts less than {FEWEST_TIMES:g} times what ties its samples together")
    means = [float(np.mean(samples)) for samples in (base, other)]
    deviation = float(_drawn_log_ratios(pieces[0], pieces[1]).std()) * math.sqrt(BLOCKS / (BLOCKS - 1))
    return Interval.around(math.log(means[1] / means[0]), deviation, BLOCKS - 1)


def autocorrelation_time(series: Floats) -> float:
    """By how much fewer independent values have a mean as uncertain as this series': 1 plus twice its correlations.

    At least 1, in values of the series, of which there must be two.
    """
    centred = series - series.mean()
    spectrum = np.fft.rfft(centred, 2 * len(series))
    covariances = np.fft.irfft(spectrum * spectrum.conj())[: len(series)]
    if covariances[0] <= 0:
        return 1.0
    times = 2 * np.cumsum(covariances / covariances[0]) - 1
    summed = np.arange(len(series)) >= WINDOW * times
    return max(1.0, float(times[summed.argmax() if summed.any() else -1]))


def _pieces(samples: Sequence[float], count: int) -> tuple[Floats, Floats]:
    """Sums and sizes of `count` pieces that are as equal as can be."""
    values = np.asarray(samples, dtype=np.float64)
    begins = np.arange(count) * len(values) // count
    return np.add.reduceat(values, begins), np.diff(begins, append=len(values)).astype(np.float64)


def _drawn_log_ratios(base: tuple[Floats, Floats], other: tuple[Floats, Floats]) -> Floats:
    """[RESAMPLES]: logarithms of the ratio of means in as many draws of blocks, which may go on from end to beginning.

    Raises TooShort.
    """
    count = len(base[0])
    begins = np.random.default_rng(SEED).integers(count, size=(RESAMPLES, BLOCKS))
    ends = begins + count // BLOCKS
    base_sums, base_sizes, other_sums, other_sizes = (_sums(one, begins, ends) for one in (*base, *other))
    if min(base_sums.min(), other_sums.min()) <= 0:
        raise TooShort("nothing came in most of it")
    return np.asarray(np.log(other_sums / other_sizes * base_sizes / base_sums))


def _sums(values: Floats, begins: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> Floats:
    """[RESAMPLES]: what the blocks of each draw hold together."""
    upto = np.concatenate(([0.0], np.cumsum(np.concatenate((values, values)))))
    return np.asarray((upto[ends] - upto[begins]).sum(axis=1))
