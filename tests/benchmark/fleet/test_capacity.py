"""Whether a run keeps up: made-up queues that stand, grow, or are too short to tell; and which fleets are tried."""

from __future__ import annotations

from array import array
from random import Random
from typing import Any

import pytest

from benchmark.fleet.capacity import GROWS, OPEN, REFUSES, STEADY, Trial, Watched, fewest_replicas, judged, num_runs
from benchmark.fleet.traffic import OpenLoop, Request
from benchmark.result import BenchError


def queue(count: int, mean: float, growth: float = 0.0, seed: int = 1) -> array[int]:
    """What arrivals find: about `mean`, correlated over as many arrivals, and `growth` more with each."""
    random, level, found = Random(seed), mean, array("q")
    for n in range(count):
        level += (mean - level) / mean + random.gauss(0, 1)
        found.append(max(0, round(level + growth * n)))
    return found


@pytest.mark.parametrize(
    ("seen", "word"),
    [
        (queue(4000, 40), STEADY),
        (queue(8000, 200), STEADY),
        (array("q", [16] * 2000), STEADY),  # streams of a closed loop
        (queue(2000, 40, growth=0.2), GROWS),  # of 100 requests 20 are left over
        (queue(20_000, 40, growth=0.02), GROWS),
        (queue(1900, 40), OPEN),
        (queue(2000, 400), OPEN),  # five times as long as a request takes
        (array("q", [3, 4]), OPEN),
    ],
)
def test_a_run_is_judged_by_what_its_arrivals_find(seen: array[int], word: str) -> None:
    verdict = judged(seen)
    assert (word, len(seen)) == (verdict.word, verdict.num_requests)
    assert (not verdict.problem) == (word == STEADY)


def test_steady_queues_are_hardly_ever_taken_for_growing_ones() -> None:
    words = [judged(queue(4000, 60, seed=seed)).word for seed in range(100)]
    assert 0 == words.count(GROWS)
    assert words.count(STEADY) > 50


def test_traffic_ends_when_it_is_clear_and_not_before() -> None:
    def requests() -> OpenLoop:
        return OpenLoop(Request(n / 10, 5, 5, 5) for n in range(10_000))

    def taken(watched: Watched, refused_at: int = -1) -> int:
        count = 0
        while watched.next_at() < float("inf"):
            at = watched.take().arrives_at
            (watched.refused if count == refused_at else watched.ended)(at)
            count += 1
        return count

    for watched, refused_at, expected, word in (
        (Watched(requests(), 100, lambda share: None), -1, 10_000, STEADY),
        (Watched(requests(), 100, lambda share: None, lambda: False), -1, 2000, STEADY),
        (Watched(requests(), 100, lambda share: None, lambda: False), 7, 8, REFUSES),
        (Watched(requests(), 100, lambda share: None), 7, 10_000, REFUSES),
    ):
        assert expected == taken(watched, refused_at)
        assert word == watched.verdict.word


def enough(*counts: int) -> Any:
    tried: list[int] = []

    def simulate(count: int) -> Trial:
        tried.append(count)
        return Trial({"replicas": count}, "" if count in counts else "too few")

    return simulate, tried


@pytest.mark.parametrize("most", [9, 10, 15, 16, 1000])
def test_which_fleets_are_tried_depends_on_the_load_alone(most: int) -> None:
    simulate, tried = enough(*range(9, 2000))
    assert 9 == fewest_replicas(simulate, 1, most, (1.0, None))["replicas"]
    assert [1, 2, 4, 8, 16, 12, 10, 9] == tried
    assert len(tried) <= num_runs(1, most)


@pytest.mark.parametrize("least", [1, 2])
def test_fleets_begin_with_the_smallest(least: int) -> None:
    for needed in range(least, 40):
        simulate, tried = enough(*range(needed, 100))
        assert needed == fewest_replicas(simulate, least, 64, (1.0, None))["replicas"]
        assert len(tried) == len(set(tried)) <= num_runs(least, 64)


@pytest.mark.parametrize(
    ("most", "sentence"),
    [
        (8, "a fleet of 8 does not keep TTFT p99 <= 1 ms: too few; raise"),
        (9, "TTFT p99 <= 1 ms need 11 replicas: raise"),
    ],
)
def test_more_than_there_may_be_are_refused(most: int, sentence: str) -> None:
    with pytest.raises(BenchError, match=sentence):
        fewest_replicas(enough(*range(11, 100))[0], 1, most, (1.0, None))
