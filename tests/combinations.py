"""Parameters of tests whose whole product says little more than a part of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, cycle, islice, product
from typing import Any


def by_turns(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Every value of every axis, as often as the longest axis has values."""
    values = [list(axis) for axis in axes]
    return list(islice(zip(*map(cycle, values), strict=True), max(map(len, values))))


def all_pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Combinations in which every two values of two axes meet: greedily few, and the same in every run."""
    values = [list(axis) for axis in axes]
    candidates = list(product(*(range(len(axis)) for axis in values)))
    left = {pair for candidate in candidates for pair in _pairs(candidate)}
    found = []
    while left:
        best = max(candidates, key=lambda candidate: sum(pair in left for pair in _pairs(candidate)))
        left.difference_update(_pairs(best))
        found.append(tuple(axis[place] for axis, place in zip(values, best, strict=True)))
    return found


def _pairs(candidate: Sequence[int]) -> Iterable[tuple[tuple[int, int], ...]]:
    return combinations(enumerate(candidate), 2)
