"""Many adapters and few rows in the scheduler's steps: each sequence finds its own in its row, and nobody is lost."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.scheduling.plan import StepPlan
from router.scheduling.request import Scheduled, ValidRequest
from router.scheduling.scheduler import Scheduler
from tests.router.doubles import adapter_of
from tests.router.scheduling.test_repeated_plans import LIMITS

SERVED = replace(
    LIMITS,
    max_batch_total_tokens=1536,
    num_blocks=384,
    max_concurrent_requests=2000,
    max_batch_size=24,
    adapter_rows=4,
    adapter_bytes=20,
    adapter_host_bytes=40,
    prefix_caching=True,
    kv_admission="demand",
)


def size_of(key: bytes) -> int:
    return 1 + key[0] % 6


class Driven:
    """A scheduler, and shards that only know which sequences they have, and what is in their rows."""

    def __init__(self, **limits: Any) -> None:
        self.scheduler: Scheduler[Scheduled] = Scheduler(replace(SERVED, **limits))
        self.requests: list[Scheduled] = []
        self.under_way: deque[tuple[StepPlan[Scheduled], list[tuple[Scheduled, int]]]] = deque()
        self.rows: dict[int, bytes] = {}
        self.at_hand: set[bytes] = set()
        self.sequences: dict[int, Scheduled] = {}
        self.doomed: set[int] = set()  # steps under way that fail because a row has nothing
        self.num_steps = 0

    def add(self, adapter: int | None, length: int, tokens: int, owner: str = "", priority: int = 0) -> Scheduled:
        named = None if adapter is None else adapter_of(adapter)
        request = ValidRequest([*range(1, length + 1)], tokens, adapter=named, priority=priority)
        entry = Scheduled(self.scheduler.new_id(), request, owner=owner)
        self.requests.append(entry)
        self.scheduler.add(entry)
        return entry

    def prepare(self, most: int) -> None:
        adapters = self.scheduler.adapters
        for adapter in adapters.wanted[:most]:
            self.at_hand.add(adapter.key)
            adapters.prepared(adapter.key, size_of(adapter.key))
        for key in adapters.forgotten():
            assert key not in self.rows.values()
            self.at_hand.remove(key)

    def step(self) -> bool:
        """Send a step, or have one answered; whether there was anything to do."""
        self.scheduler.forget_cancelled()
        most = self.scheduler.limits.num_lanes + 1
        if len(self.under_way) < most and (plan := self.scheduler.plan()) is not None:
            self._send(plan)
            return True
        if not self.under_way:
            return False
        self.answer()
        return True

    def answer(self) -> None:
        if self.under_way[0][0].number in self.doomed:
            self.fail()
        else:
            self._answer(*self.under_way.popleft())

    def _send(self, plan: StepPlan[Scheduled]) -> None:
        self.num_steps += 1
        for id in (*(entry.id for entry in plan.retired), *plan.preempted):
            self.sequences.pop(id, None)
        for row, key in plan.adapters:
            users = [one for one in self.sequences.values() if one.row == row]
            assert not users or self.rows[row] == key, "a row changes that somebody uses"
            assert not key or key in self.at_hand
            self.rows[row] = key
        assert sum(size_of(key) for key in self.rows.values() if key) <= 20
        for entry in plan.admitted:
            self.sequences[entry.id] = entry
        gets = []
        for id, entry in plan.concerned.items():
            if entry.id == id and id in self.sequences:
                expected = b"" if entry.adapter is None else entry.adapter.key
                assert self.rows.get(entry.row, b"") == expected, "it computes with another's"
                if not entry.num_prompt_left:
                    gets.append((entry, id))
        self.under_way.append((plan, gets))

    def _answer(self, plan: StepPlan[Scheduled], gets: list[tuple[Scheduled, int]]) -> None:
        self.scheduler.computed(plan)
        for entry, id in gets:
            if entry.id == id and not (entry.is_over or entry.cancelled):
                self.scheduler.delivered(entry, 1 + len(entry.generated_ids) % 90)
                if len(entry.generated_ids) == entry.request.max_new_tokens:
                    entry.is_over = True
                    self.scheduler.finished(entry, is_cut=True)

    def fail(self) -> None:
        """The oldest step under way fails, and drops its sequences; rows that it changes are empty.

        So does every one behind it that has sequences in such a row.
        """
        if self.under_way:
            plan, _ = self.under_way.popleft()
            lost = {row for row, key in plan.adapters if key}
            for row in lost:
                self.rows[row] = b""
            for later, _ in self.under_way:
                lost -= {row for row, _ in later.adapters}
                if any(entry.id == id and entry.row in lost for id, entry in later.concerned.items()):
                    self.doomed.add(later.number)
            gone = [plan, *(later for later, _ in self.under_way if later.number in self.doomed)]
            for id in (id for one in gone for id in one.concerned):
                self.sequences.pop(id, None)
            self._again(self.scheduler.failed(plan))

    def die(self) -> None:
        self._again(self.scheduler.restart([plan for plan, _ in self.under_way]))
        self.scheduler.resize(self.scheduler.limits.max_batch_total_tokens, self.scheduler.limits.num_blocks)
        for held in (self.under_way, self.doomed, self.rows, self.at_hand, self.sequences):
            held.clear()

    def _again(self, lost: list[Scheduled]) -> None:
        for entry in lost:
            entry.num_losses = min(entry.num_losses + 1, 2)
        self.scheduler.add_again([entry for entry in lost if not (entry.is_over or entry.cancelled)])

    def finish(self, most: int) -> None:
        for _ in range(most):
            if not self.step() and not self.scheduler.waiting:
                break
            self.prepare(2)
        adapters = self.scheduler.adapters
        assert not self.scheduler.waiting and not self.scheduler.running and not self.under_way
        assert not (adapters._pins or adapters._waiting or adapters._owed or adapters._claim)
        assert all(entry.is_over or entry.cancelled for entry in self.requests)
        assert self.scheduler.num_free_blocks == self.scheduler.limits.num_blocks


MANY = [{}, {"num_lanes": 2}, {"kv_admission": "reserve", "adapter_host_bytes": None}]


@pytest.mark.parametrize(
    ("count", "limits"),
    [*((400, limits) for limits in MANY), *(pytest.param(2000, limits, marks=pytest.mark.rest) for limits in MANY)],
)
def test_requests_of_sixty_four_adapters_all_run_in_four_rows(count: int, limits: dict[str, Any]) -> None:
    """Cancelled ones, steps that fail, deaths, two API keys, priorities, and fewer KV blocks than all would like."""
    driven, chance = Driven(**limits), random.Random(3)
    while len(driven.requests) < count:
        for _ in range(chance.randrange(4)):
            adapter = None if chance.random() < 0.1 else int(64 * chance.random() ** 2)
            length, tokens = chance.choice((3, 9, 20, 50)), chance.randrange(1, 40)
            driven.add(adapter, length, tokens, chance.choice("aaab"), int(chance.random() < 0.1))
        if chance.random() < 0.05:
            chance.choice(driven.requests[-50:]).cancelled = True
        for _ in range(4):
            driven.step()
        driven.prepare(chance.randrange(3))
        changes_rows = bool(driven.under_way and driven.under_way[0][0].adapters)
        if chance.random() < (0.2 if changes_rows else 0.01):
            driven.fail()
        if chance.random() < 0.004:
            driven.die()
    driven.finish(60_000)
    assert driven.scheduler.adapters.counts.num_evictions > 30
    assert sum(not entry.cancelled for entry in driven.requests) > 0.9 * count


EVENTS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 6) | st.none(), st.integers(1, 50), st.integers(1, 30)),
    st.tuples(st.just("add"), st.integers(0, 6) | st.none(), st.integers(1, 50), st.integers(1, 30)),
    st.tuples(st.just("steps"), st.integers(1, 12)),
    st.tuples(st.just("steps"), st.integers(1, 12)),
    st.tuples(st.just("prepare"), st.integers(0, 3)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("fail")),
    st.tuples(st.just("die")),
)


@given(
    st.lists(EVENTS, max_size=60),
    st.integers(1, 3),
    st.sampled_from((1, 2)),
    st.sampled_from(("demand", "reserve")),
    st.booleans(),
)
def test_whatever_happens_nobody_is_lost_and_nothing_stays(
    happening: list[tuple[Any, ...]], num_rows: int, num_lanes: int, kv_admission: str, has_keys: bool
) -> None:
    sizes = {"max_batch_total_tokens": 192, "num_blocks": 48, "max_batch_size": 6}
    driven = Driven(adapter_rows=num_rows, num_lanes=num_lanes, kv_admission=kv_admission, **sizes)
    for name, *arguments in happening:
        if name == "add":
            driven.add(*arguments, owner="ab"[len(driven.requests) % 2] if has_keys else "")
        elif name == "steps":
            for _ in range(arguments[0]):
                driven.step()
        elif name == "cancel":
            if driven.requests:
                driven.requests[arguments[0] % len(driven.requests)].cancelled = True
        else:
            getattr(driven, name)(*arguments)
    driven.finish(5_000)


def test_a_request_is_passed_over_only_while_its_adapter_is_missing() -> None:
    driven = Driven()
    first, second, third = driven.add(1, 5, 3), driven.add(None, 5, 3), driven.add(2, 5, 3)
    plan = driven.scheduler.plan()
    assert plan is not None and [second] == plan.admitted and not plan.adapters
    assert [1, 2] == [int(adapter.name[-1]) for adapter in driven.scheduler.adapters.wanted]
    driven.scheduler.adapters.prepared(adapter_of(2).key, 1)
    plan = driven.scheduler.plan()
    assert plan is not None and [third] == plan.admitted and [(third.row, adapter_of(2).key)] == plan.adapters
    driven.scheduler.adapters.prepared(adapter_of(1).key, 1)
    plan = driven.scheduler.plan()
    assert plan is not None and [first] == plan.admitted and first.row not in (0, third.row)
    assert not driven.scheduler.waiting


def test_one_that_is_to_run_alone_waits_for_its_adapter_while_others_run() -> None:
    driven = Driven()
    suspect, other = driven.add(1, 5, 6), driven.add(None, 5, 6)
    suspect.num_losses = 2
    plan = driven.scheduler.plan()
    assert plan is not None and [other] == plan.admitted
    driven.scheduler.adapters.prepared(adapter_of(1).key, 1)
    plan = driven.scheduler.plan()
    assert plan is not None and [suspect] == plan.admitted and not plan.decoding
    assert driven.scheduler.plan() is None  # it runs alone


def test_what_a_failed_step_told_of_rows_is_told_again_even_if_nobody_waits() -> None:
    driven = Driven(num_lanes=2)
    driven.add(None, 5, 30)
    for _ in range(6):
        driven.step()
    lost = driven.add(1, 5, 6)
    driven.scheduler.plan()
    driven.prepare(1)
    while not lost.row:
        driven.step()
    while not driven.under_way[0][0].adapters:
        driven.answer()
    [told] = driven.under_way[0][0].adapters
    lost.cancelled = True
    driven.fail()
    while (plan := driven.scheduler.plan()) is None:
        driven.answer()
    assert not driven.scheduler.waiting and [told] == plan.adapters
