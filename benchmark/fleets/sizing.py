"""The smallest fleet that keeps up with a load and its objectives: the share of the load that a replica has falls.

Sizes are doubled until one is enough, and then halved between that and the last that was not; which sizes are tried
depends on the load alone, and so does what is found, whatever the most is that somebody wants to pay for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmark.report import BenchError

NAMES = ("TTFT", "TPOT")
Objectives = tuple[float | None, float | None]  # of TTFT and TPOT in ms, at p99; None: any


@dataclass(frozen=True)
class Trial:
    """A fleet under the load. problem: why it is too small, for people; empty where it is not."""

    row: Mapping[str, Any]
    problem: str


def missed(row: Mapping[str, Any], objectives: Objectives) -> str:
    """Which objectives a row does not keep at p99, for people; empty where it keeps them."""
    pairs = ((name, row[f"{name.lower()}_ms"], most) for name, most in zip(NAMES, objectives, strict=True))
    found = ((name, (times or {"p99": 0.0})["p99"], most) for name, times, most in pairs if most is not None)
    return ", ".join(f"{name} p99 {p99:.0f} ms" for name, p99, most in found if p99 > most)


def num_runs(least: int, most: int) -> int:
    """How many fleets are tried at most."""
    doublings = ((most - 1) // least).bit_length()
    return 1 + 2 * doublings


def fewest(simulate: Callable[[int], Trial], least: int, most: int, objectives: Objectives) -> dict[str, Any]:
    """The row of the fewest replicas, at least `least`, that are enough, with all that were tried.

    Raises BenchError where `most` are not.
    """
    tried: dict[int, Trial] = {}

    def is_enough(count: int) -> bool:
        tried[count] = simulate(count)
        return not tried[count].problem

    high = least
    while not is_enough(high):
        if high >= most:
            raise BenchError(f"a fleet of {high} does not keep {wanted(objectives)}: {tried[high].problem}; {REMEDY}")
        high *= 2
    low = high // 2 + 1 if high > least else high
    while low < high:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle + 1
    if high > most:
        raise BenchError(f"{wanted(objectives)} need {high} replicas: {REMEDY}")
    return {**tried[high].row, "tried": {str(count): trial.problem for count, trial in sorted(tried.items())}}


REMEDY = "raise --fewest-replicas or the objectives"


def wanted(objectives: Objectives) -> str:
    """The objectives, for people."""
    return " and ".join(f"{name} p99 <= {ms:g} ms" for name, ms in zip(NAMES, objectives, strict=True) if ms)
