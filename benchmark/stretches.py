"""A rate in equal stretches of its run, so that a throughput has a scatter, and an interval like any other mean."""

from __future__ import annotations

from collections.abc import Iterable

STRETCHES = 400  # of a run: many times the blocks of `intervals`, so that what comes in waves can be seen to


def rates(ended: Iterable[tuple[float, float]], seconds: float) -> list[float]:
    """Per second, what ended in each of `STRETCHES` equal parts of a run; their mean is the rate of the whole run.

    ended: how much, and how many seconds after the run's beginning. Empty for a run without length.
    """
    if seconds <= 0:
        return []
    amounts = [0.0] * STRETCHES
    for after, amount in ended:
        amounts[min(max(int(after / seconds * STRETCHES), 0), STRETCHES - 1)] += amount
    return [amount * STRETCHES / seconds for amount in amounts]
