"""Lanes: whose turn it is, and who may join which."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.scheduling.plan import MOST_UNDER_WAY, Lanes, StepPlan
from router.scheduling.request import Scheduled, ValidRequest
from router.scheduling.scheduler import Scheduler
from tests.router.scheduling.test_repeated_plans import LIMITS


def test_lanes_take_turns_and_none_has_more_than_two_steps_under_way() -> None:
    lanes: Lanes[object] = Lanes(3)
    taken = []
    while (lane := next(lanes.turns(), None)) is not None:
        lanes.taken(lane)
        taken.append(lane.number)
    assert [0, 1, 2] * MOST_UNDER_WAY == taken
    plan: StepPlan[object] = StepPlan(1, lane=1)
    lanes.answered(plan)
    assert [1] == [lane.number for lane in lanes.turns()]
    lanes.restart()
    assert [0, 0, 0] == [lane.under_way for lane in lanes.all] and 3 == len(list(lanes.turns()))


@given(st.lists(st.integers(0, 9), min_size=2, max_size=5), st.integers(1, 20))
def test_who_waits_finds_a_place_and_lanes_become_as_even_as_can_be(sizes: list[int], waiting: int) -> None:
    lanes: Lanes[object] = Lanes(len(sizes))
    for lane, size in zip(lanes.all, sizes, strict=True):
        lane.size = size
    fullest = max(sizes)
    while waiting:
        places = {lane.number: lanes.places(lane, waiting) or 0 for lane in lanes.all}
        number = next(number for number, free in places.items() if free)
        joined = min(waiting, places[number])
        lanes.all[number].size += joined
        waiting -= joined
    after = [lane.size for lane in lanes.all]
    assert max(after) <= max(fullest, -(-sum(after) // len(after)))


def test_one_lane_bounds_nothing() -> None:
    lanes: Lanes[object] = Lanes(1)
    assert lanes.places(lanes.all[0], 5) is None
    for _ in range(5):
        lanes.taken(next(lanes.turns()))


@pytest.mark.parametrize("state", ["is_over", "cancelled"])
def test_who_has_ended_in_another_lane_makes_room_for_nobody(state: str) -> None:
    """The batching loop knows it no more."""
    scheduler: Scheduler[Scheduled] = Scheduler(replace(LIMITS, num_lanes=2, max_batch_total_tokens=64, num_blocks=16))
    many = [Scheduled(scheduler.new_id(), ValidRequest([1, 2, 3, 4], 12), owner="many") for _ in range(4)]
    for entry in many:
        scheduler.add(entry)
    for _ in range(8):
        plan = scheduler.plan()
        assert plan is not None
        scheduler.computed(plan)
    for entry in many[2:]:  # the youngest, in both lanes
        setattr(entry, state, True)
    scheduler.add(Scheduled(scheduler.new_id(), ValidRequest([5, 6, 7, 8], 12), owner="few"))
    plan = scheduler.plan()
    assert plan is not None
    assert not [entry for entry in plan.preempted.values() if entry in many[2:]]
