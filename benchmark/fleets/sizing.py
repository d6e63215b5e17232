"""The smallest fleet that keeps its objectives, found by halving: the share of the load that a replica has falls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmark.fleets.conditions import Pool
from benchmark.report import BenchError

Objectives = tuple[float | None, float | None]  # of TTFT and TPOT in ms, at p99; None: any


def resized(pools: Sequence[Pool], count: int) -> list[Pool]:
    """The same pools with so many replicas, divided between them as those were; each keeps one at least."""
    total, found, left = sum(pool.num_replicas for pool in pools), [], count
    for number, pool in enumerate(pools):
        others = len(pools) - number - 1
        part = left if not others else min(max(1, round(count * pool.num_replicas / total)), left - others)
        found.append(replace(pool, num_replicas=part))
        left -= part
    return found


def keeps(row: Mapping[str, Any], objectives: Objectives) -> bool:
    """Whether nothing was refused and the p99 of both times are within the objectives."""
    found = [(row[name] or {"p99": 0.0})["p99"] for name in ("ttft_ms", "tpot_ms")]
    return not row["refused"] and all(most is None or p99 <= most for p99, most in zip(found, objectives, strict=True))


def num_runs(most: int) -> int:
    """How many fleets are tried at most."""
    return 1 + most.bit_length()


def fewest(simulate: Callable[[int], dict[str, Any]], most: int, objectives: Objectives) -> dict[str, Any]:
    """The row of the fewest replicas, at most `most`, that keep the objectives. Raises BenchError where none do."""
    low, high, best = 1, most, simulate(most)
    if not keeps(best, objectives):
        names = ("TTFT", "TPOT")
        wanted = " and ".join(f"{name} p99 <= {ms:g} ms" for name, ms in zip(names, objectives, strict=True) if ms)
        found = ", ".join(f"{name} p99 {best[f'{name.lower()}_ms']['p99']:.0f} ms" for name in names)
        raise BenchError(
            f"{most} replicas do not keep {wanted}: {found}, {best['refused']} refused; raise --fewest-replicas or the "
            "objectives"
        )
    while low < high:
        middle = (low + high) // 2
        row = simulate(middle)
        if keeps(row, objectives):
            high, best = middle, row
        else:
            low = middle + 1
    return best
