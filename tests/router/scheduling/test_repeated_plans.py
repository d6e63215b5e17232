"""A step that is planned by repeating the one before it is the step that would be planned from scratch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.scheduling.limits import Limits
from router.scheduling.plan import Lane, StepPlan
from router.scheduling.request import Scheduled, ValidRequest
from router.scheduling.scheduler import Scheduler
from tests.router.doubles import adapter_of

LIMITS = Limits(
    max_input_length=64,
    max_total_tokens=96,
    max_batch_total_tokens=192,
    max_batch_prefill_tokens=32,
    block_size=4,
    num_blocks=48,
    max_concurrent_requests=8,
    max_batch_size=None,
    waiting_served_ratio=0.3,
    max_waiting_tokens=5,
    max_best_of=1,
    max_stop_sequences=0,
    max_top_n_tokens=0,
    vocab_size=100,
    prefill_chunk=8,
    adapter_rows=2,
    adapter_bytes=2,
    adapter_host_bytes=2,
)


class FromScratch(Scheduler[Scheduled]):
    """The reference: no step is a repetition."""

    def _planned_again(self, lane: Lane[Scheduled]) -> StepPlan[Scheduled] | None:
        return None


@dataclass(frozen=True)
class Event:
    """What happens before some steps are planned."""

    kind: str
    which: int  # of the requests so far, or the length of a new prompt
    tokens: int  # that a new request asks for
    steps: int  # that follow
    owner: str
    adapter: int | None = None  # of a new request


events = st.builds(
    Event,
    kind=st.sampled_from(("add", "add", "add", "over", "cancel", "fail")),
    which=st.integers(1, 40),
    tokens=st.integers(1, 24),
    steps=st.integers(0, 12),
    owner=st.sampled_from(("", "", "", "other")),
    adapter=st.sampled_from((None, None, None, 1, 2, 3)),
)


def shown(plan: StepPlan[Scheduled] | None) -> Any:
    """A plan as plain values. Requests are told apart by when they came."""
    if plan is None:
        return None
    values = plan._asdict()
    for name in ("retired", "admitted", "decoding", "constrained"):
        values[name] = [entry.id for entry in values[name]]
    for name in ("preempted", "concerned"):
        values[name] = {id: entry.num_scheduled for id, entry in values[name].items()}
    values["filled"] = [tuple(block)[1:] for block in values["filled"]]
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


class Driven:
    """A scheduler whose steps are computed at once, but for the last two."""

    def __init__(self, scheduler: Scheduler[Scheduled]) -> None:
        self.scheduler = scheduler
        self.requests: list[Scheduled] = []
        self.under_way: list[StepPlan[Scheduled]] = []

    def happen(self, event: Event) -> None:
        if event.kind == "add":
            adapter = None if event.adapter is None else adapter_of(event.adapter)
            request = ValidRequest(list(range(event.which)), event.tokens, adapter=adapter)
            entry = Scheduled(self.scheduler.new_id(), request, owner=event.owner)
            self.requests.append(entry)
            self.scheduler.add(entry)
        elif event.kind == "fail" and self.under_way:
            *others, plan = self.under_way
            self.under_way = []
            for other in others:
                self.scheduler.computed(other)
            lost = self.scheduler.failed(plan)
            self.scheduler.add_again([entry for entry in lost if not entry.is_over])
        elif self.requests:
            entry = self.requests[event.which % len(self.requests)]
            if event.kind == "over":
                entry.is_over = True
            else:
                entry.cancelled = True
                self.scheduler.forget_cancelled()

    def step(self) -> Any:
        plan = self.scheduler.plan()
        if plan is not None:
            self.under_way.append(plan)
        if self.under_way and (plan is None or len(self.under_way) > 2):
            done = self.under_way.pop(0)
            self.scheduler.computed(done)
            self.scheduler.timed(done, 0.01)
            for adapter in [*self.scheduler.adapters.wanted]:
                self.scheduler.adapters.prepared(adapter.key, 1)
        return shown(plan)


@pytest.mark.parametrize("kv_admission", ["reserve", "demand"])
@pytest.mark.parametrize("num_lanes", [1, 2, 4])
@given(st.lists(events, max_size=30))
def test_a_repeated_step_is_the_step_from_scratch(num_lanes: int, kv_admission: str, happening: list[Event]) -> None:
    limits = replace(LIMITS, num_lanes=num_lanes, kv_admission=kv_admission)
    one, other = Driven(Scheduler(limits)), Driven(FromScratch(limits))
    for event in happening:
        one.happen(event)
        other.happen(event)
        for _ in range(event.steps):
            assert one.step() == other.step()
            assert [e.num_scheduled for e in one.requests] == [e.num_scheduled for e in other.requests]


@pytest.mark.parametrize(("kv_admission", "num_shared"), [("reserve", 18), ("demand", 17)])
def test_most_steps_of_a_long_answer_are_repetitions(kv_admission: str, num_shared: int) -> None:
    scheduler: Scheduler[Scheduled] = Scheduler(replace(LIMITS, kv_admission=kv_admission))
    scheduler.add(Scheduled(scheduler.new_id(), ValidRequest([1, 2, 3], 20)))
    plans = [scheduler.plan() for _ in range(21)]
    assert all(plan is not None for plan in plans)
    shared = sum(a.decoding is b.decoding for a, b in pairwise(plans) if a and b)
    # All but the prompt's step, the first that decodes, the one that retires and one with blocks.
    assert shared == num_shared
    assert scheduler.plan() is None
