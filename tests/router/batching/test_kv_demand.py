"""KV blocks on demand: who is sent away, that everyone ends with their own tokens, and what is never exceeded."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.batching.batcher import Batcher
from router.scheduling import forecast
from router.scheduling.answer_lengths import History
from router.scheduling.fairness import MIN_ADVANCE, sent_away
from router.scheduling.forecast import Forecast
from router.scheduling.plan import Extension, StepPlan
from router.scheduling.request import Entry, Finished, Scheduled, Token, ValidRequest
from router.scheduling.scheduler import Scheduler
from tests.router.batching.test_batcher import is_clean
from tests.router.doubles import (
    STATES,
    FakeMatching,
    Running,
    constrained,
    events_of,
    fake_shards,
    make_limits,
    request_of,
    running,
    token_ids_of,
    tokens_alone,
    with_states,
)
from tests.router.scheduling.test_fairness import Asking, ledger_of
from tests.router.scheduling.test_repeated_plans import LIMITS

DEMAND: dict[str, Any] = {"kv_admission": "demand", "waiting_served_ratio": 0.0}


def counts_of(batcher: Batcher) -> Any:
    assert batcher._scheduler.forecast is not None
    return batcher._scheduler.forecast.counts


def expects_little(batcher: Batcher, owner: str = "", length: int = 2) -> None:
    """Of this key's requests, after many short answers."""
    assert batcher._scheduler.forecast is not None
    history = batcher._scheduler.forecast._lengths.of(owner, "")
    for _ in range(60):
        history.began()
        history.came(0, length)
        history.ended(length)


async def together(at_work: Running, requests: list[ValidRequest]) -> list[Entry]:
    """All at once; each with its own tokens."""
    entries = [at_work.batcher.submit(request) for request in requests]
    assert [tokens_alone(request) for request in requests] == await asyncio.gather(*map(token_ids_of, entries))
    return entries


async def test_what_is_asked_for_and_not_written_keeps_nobody_waiting() -> None:
    """Thirty ask for 100 tokens each, where 1,024 fit, and end after a few."""
    requests = [replace(request_of(4, 100, n), ends=replace(request_of(1).ends)) for n in range(30)]
    async with running(**DEMAND, max_batch_total_tokens=1024) as at_work:
        expects_little(at_work.batcher, length=8)
        entries = [at_work.batcher.submit(request) for request in requests]
        await asyncio.gather(*(entry.events.get() for entry in entries))
        assert 30 == at_work.traces[-1].batch_size or max(trace.batch_size for trace in at_work.traces) >= 28
        for entry in entries:
            entry.cancelled = True
    assert is_clean(at_work)


@pytest.mark.parametrize("kv_admission", ["demand", "reserve"])
async def test_who_asks_for_all_that_fits_does_not_wait_for_thirty_that_run(kv_admission: str) -> None:
    """Without `max_tokens` a request asks for the longest sequence, which nearly is the whole cache."""
    limits = {**DEMAND, "kv_admission": kv_admission, "max_total_tokens": 1024, "max_batch_total_tokens": 1100}
    async with running(**limits) as at_work:
        if kv_admission == "demand":
            expects_little(at_work.batcher, length=8)
        entries = [at_work.batcher.submit(request_of(3, 20, n)) for n in range(1, 31)]
        await asyncio.gather(*(entry.events.get() for entry in entries))
        num_steps = len(at_work.traces)
        longest = at_work.batcher.submit(request_of(4, 1020))
        await longest.events.get()
        waited = len(at_work.traces) - num_steps
        assert (waited <= 4) == (kv_admission == "demand"), waited
        longest.cancelled = True
        assert [tokens_alone(entry.request)[1:] for entry in entries] == await asyncio.gather(
            *map(token_ids_of, entries)
        )
    assert is_clean(at_work)


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("decoder_start", [None, 7])
async def test_who_is_sent_away_comes_back_with_the_very_same_tokens(
    prefix_caching: bool, decoder_start: int | None
) -> None:
    limits = {**DEMAND, "max_batch_total_tokens": 320, "prefix_caching": prefix_caching and decoder_start is None}
    shards = fake_shards(make_limits(**limits), decoder_start=decoder_start)
    async with running(shards, **limits, num_blocks=shards.num_blocks) as at_work:
        expects_little(at_work.batcher)
        requests = [request_of(10 + n, 100, n).read_by_encoder(decoder_start) for n in range(8)]
        entries = await together(at_work, requests)
    assert counts_of(at_work.batcher).num_sent_away >= 4
    assert 0 == entries[0].num_preempted  # the first of all never leaves
    assert max(trace.reserved_tokens for trace in at_work.traces) <= 320
    assert is_clean(at_work)


async def test_blocks_of_answers_are_found_again_where_there_is_room_for_them() -> None:
    async with running(**DEMAND, max_batch_total_tokens=320, prefix_caching=True) as at_work:
        expects_little(at_work.batcher)
        await together(at_work, [request_of([n] * 20, 100, n) for n in range(1, 7)])
        counts = counts_of(at_work.batcher)
    async with running(**DEMAND, max_batch_total_tokens=320, prefix_caching=False) as without:
        expects_little(without.batcher)
        await together(without, [request_of([n] * 20, 100, n) for n in range(1, 7)])
    assert 0 < counts.tokens_again < counts_of(without.batcher).tokens_again


async def test_one_block_after_another_costs_no_more_steps_than_all_at_once() -> None:
    async with running(**DEMAND) as at_work:
        await together(at_work, [request_of(5, 100, n) for n in range(4)])
        num_steps = len(at_work.shards.requests)
        grown = [step for step in at_work.shards.requests if step.grown_ids]
        assert 5 <= len(grown) <= 8  # all four together, as often as a block is full
    async with running(kv_admission="reserve") as other:
        await together(other, [request_of(5, 100, n) for n in range(4)])
    assert len(other.shards.requests) == num_steps


async def test_what_grows_and_is_lost_with_a_failed_step_is_rebuilt() -> None:
    limits = {**DEMAND, "max_batch_total_tokens": 256}
    shards = fake_shards(make_limits(**limits), failing_steps=dict.fromkeys(range(10, 60, 7), "bad luck"))
    async with running(shards, **limits) as at_work:
        expects_little(at_work.batcher)
        await together(at_work, [request_of(10, 80, n) for n in range(5)])
    assert is_clean(at_work)


def test_the_youngest_of_the_greediest_leaves_and_never_the_first_of_all() -> None:
    first, second = Asking("a", 60, arrival=1), Asking("b", 20, arrival=2)
    third, fourth = Asking("b", 20, arrival=4), Asking("b", 20, arrival=3)
    batch = [first, second, third, fourth]
    ledger = ledger_of(first, Asking("b", 100), *batch[1:])
    assert [third] == sent_away(batch, ledger, bool)
    assert [third, fourth] == sent_away(batch, ledger, lambda leaving: len(leaving) == 2)
    assert [] == sent_away(batch, ledger, lambda leaving: len(leaving) == 4)
    assert [] == sent_away([first], ledger_of(first), bool)
    assert [] == sent_away([first, replace(second, may_be_preempted=False)], ledger_of(first, second), bool)


def test_without_a_block_a_sequence_lets_steps_pass_until_another_may_leave() -> None:
    limits = replace(LIMITS, kv_admission="demand", max_batch_total_tokens=88, num_blocks=22, waiting_served_ratio=0.0)
    scheduler: Scheduler[Scheduled] = Scheduler(limits)
    old, young = (Scheduled(scheduler.new_id(), ValidRequest([1, 2, 3], 80)) for _ in range(2))
    scheduler.add(old)
    scheduler.add(young)
    assert scheduler.forecast is not None
    held, sent, num_blocks = 0, 0, 0
    for _ in range(400):
        if (plan := scheduler.plan()) is None:
            break
        held += old.id in plan.held
        sent += len(plan.preempted)
        num_blocks += sum(map(len, plan.grown.values()))
        scheduler.computed(plan)
        for entry in plan.concerned.values():
            if not entry.num_prompt_left and entry.num_scheduled > len(entry.generated_ids):
                scheduler.delivered(entry, 1)
    assert (80, 80) == (len(old.generated_ids), len(young.generated_ids))
    assert sent == young.num_preempted > 0 == old.num_preempted and not scheduler.running
    assert (sent, num_blocks) == (scheduler.forecast.counts.num_sent_away, scheduler.forecast.counts.blocks_given)


def test_what_is_owed_is_no_more_than_the_cache_and_not_forgiven_by_its_own_computation() -> None:
    forecast: Forecast[Scheduled] = Forecast(16, 1, 1000)
    entry = Scheduled(1, ValidRequest([1], 9))
    for _ in range(50):
        entry.num_lost = 100
        forecast.came_back(entry)
    assert 1000 == forecast.owed
    forecast.planned(StepPlan(1, prefill_tokens=55_000))
    lent = -forecast.owed
    assert 50 == pytest.approx(lent)
    entry.num_lost = 100
    forecast.came_back(entry)
    forecast.planned(StepPlan(2, prefill_tokens=100))
    assert pytest.approx(100 - lent) == forecast.owed
    owed = forecast.owed
    forecast.planned(StepPlan(3, drafts={n: Extension(0, [1, 2], []) for n in range(100)}))
    forgiven = owed - forecast.owed
    forecast.planned(StepPlan(4, decoding=[entry] * 100))
    assert 0 < forgiven == pytest.approx(owed - forgiven - forecast.owed)


@pytest.mark.parametrize("is_bounded", [True, False])
def test_what_is_computed_again_is_bounded_however_wrong_what_is_expected_is(
    is_bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 300 is expected to end with its next token, and writes all that it asks for."""
    monkeypatch.setattr(History, "expected", lambda history, written, most: min(written + 1, most))
    if not is_bounded:
        monkeypatch.setattr(forecast, "MOST_AT_ALL", 1.0)
    limits = replace(LIMITS, kv_admission="demand", max_batch_total_tokens=400, num_blocks=100, max_batch_size=20)
    scheduler: Scheduler[Scheduled] = Scheduler(replace(limits, waiting_served_ratio=0.0))
    entries = [Scheduled(scheduler.new_id(), ValidRequest([1, 2, 3], 80)) for _ in range(300)]
    for entry in entries:
        scheduler.add(entry)
    assert scheduler.forecast is not None
    computed, is_within = 0, True
    while (plan := scheduler.plan()) is not None:
        computed += len(plan.decoding) + plan.prefill_tokens
        again = scheduler.forecast.counts.tokens_again
        is_within &= again <= 0.1 * computed + 400 + 20 * 83  # a share, the cache, and who runs once more
        scheduler.computed(plan)
        for entry in plan.concerned.values():
            if not entry.num_prompt_left and entry.num_scheduled > len(entry.generated_ids):
                scheduler.delivered(entry, 1)
    assert {80} == {len(entry.generated_ids) for entry in entries}
    assert is_bounded == is_within


@pytest.mark.parametrize(("written", "num_outgrown"), [(19, 0), (20, 1), (30, 1)])
def test_an_answer_is_outgrown_if_it_is_longer_than_was_expected_first(written: int, num_outgrown: int) -> None:
    """Also where it ends on the blocks that it had anyway."""
    scheduler: Scheduler[Scheduled] = Scheduler(replace(LIMITS, kv_admission="demand"))
    assert scheduler.forecast is not None
    history = scheduler.forecast._lengths.of("", "")
    for _ in range(60):
        history.began()
        history.came(0, 18)
        history.ended(18)
    entry, level = Scheduled(scheduler.new_id(), ValidRequest([1], 60)), history.level
    scheduler.add(entry)
    while len(entry.generated_ids) < written:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.computed(plan)
        scheduler.delivered(entry, 1)
    scheduler.finished(entry, is_cut=False)
    assert 19 == entry.first_expected
    assert num_outgrown == scheduler.forecast.counts.num_outgrown == (history.level > level)


@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_who_joins_is_found_in_few_looks_and_not_looked_for_in_every_step(
    ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    has_room = Forecast._has_room

    def counted(forecast: Forecast[Any], *args: Any) -> bool:
        nonlocal looks
        looks += 1
        return has_room(forecast, *args)

    monkeypatch.setattr(Forecast, "_has_room", counted)
    size = {"max_batch_total_tokens": 40_060, "num_blocks": 10_015, "max_batch_prefill_tokens": 10_000}
    limits = replace(LIMITS, kv_admission="demand", max_waiting_tokens=1000, waiting_served_ratio=ratio, **size)
    scheduler: Scheduler[Scheduled] = Scheduler(limits)
    for _ in range(1000):
        scheduler.add(Scheduled(scheduler.new_id(), ValidRequest([1, 2, 3], 200)))
    plan = scheduler.plan()
    assert plan is not None and 200 < len(plan.admitted) < 1000 and looks <= 20
    num_looks = looks
    for _ in range(40):
        scheduler.computed(plan)
        for entry in plan.concerned.values():
            scheduler.delivered(entry, 1)
        plan = scheduler.plan()
        assert plan is not None and not plan.admitted
    assert looks - num_looks <= (10 if ratio == 0 else 100)


async def test_two_do_not_wait_for_each_other_where_a_grammar_forces_more_than_a_sequence_has_room_for() -> None:
    """The oldest lacks a block, and the only other has come back, got too little to leave again, and has forced tokens
    to compute."""
    limits = {**DEMAND, "max_batch_total_tokens": 121, "block_size": 8, "prefill_chunk": 9, "num_lanes": 4}
    asked = [("a", 35, 48), ("a", 11, 65), ("a", 18, 43), ("c", 9, 27)]
    forced = [("b", 37, 47), ("a", 19, 56), ("c", 10, 16)]
    async with running(**limits, max_total_tokens=110, prefix_caching=True) as at_work:
        for owner in "abc":
            expects_little(at_work.batcher, owner)
        entries = [
            at_work.batcher.submit(constrained(request) if one in forced else request, owner=one[0])
            for one in (*asked[:3], *forced[:2], asked[3], forced[2])
            for request in [request_of(one[1], one[2], one[2])]
        ]
        async with asyncio.timeout(30):
            for entry in entries:
                assert tokens_alone(entry.request) == await token_ids_of(entry)
    assert is_clean(at_work)


async def test_a_sequence_that_gets_blocks_and_is_not_computed_does_not_decode() -> None:
    """It has forced tokens to compute, and the step's one prompt token goes to another's."""
    limits = {**DEMAND, "max_total_tokens": 110, "max_batch_total_tokens": 400, "block_size": 4, "prefill_chunk": 1}
    asked = [(7, 64), (24, 38), (2, 39), (22, 21)]
    async with running(None, FakeMatching(), **limits) as at_work:
        requests = [request_of(prompt, length, n) for n, (prompt, length) in enumerate(asked)]
        await together(at_work, [constrained(one) if n % 2 else one for n, one in enumerate(requests)])
    assert is_clean(at_work)


@pytest.mark.parametrize("num_lanes", [1, pytest.param(2, marks=pytest.mark.rest), 4])
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.sampled_from("aabc"), st.integers(1, 40), st.integers(1, 70), st.booleans()), max_size=10),
    st.integers(110, 260),
    st.sampled_from([1, 8, 16]),
    st.none() | st.integers(1, 20),
    st.booleans(),
    st.just(frozenset()) | st.frozensets(st.integers(1, 80), max_size=3),
    st.none() | st.just(7),
    STATES,
)
def test_however_little_is_expected_all_end_with_their_own_tokens(
    num_lanes: int,
    asked: list[tuple[str, int, int, bool]],
    capacity: int,
    block_size: int,
    prefill_chunk: int | None,
    prefix_caching: bool,
    deaths: frozenset[int],
    decoder_start: int | None,
    states: tuple[int, int, int, int],
) -> None:
    async def story() -> None:
        limits = {
            **DEMAND,
            "max_total_tokens": 110,
            "max_batch_total_tokens": capacity,
            **(with_states(states, block_size) if decoder_start is None else {}),
            "block_size": block_size,
            "prefill_chunk": prefill_chunk if decoder_start is None else None,
            "prefix_caching": prefix_caching and decoder_start is None,
            "num_lanes": num_lanes,
        }
        shards = fake_shards(make_limits(**limits), deaths=deaths, renewals=len(deaths), decoder_start=decoder_start)
        async with asyncio.timeout(60), running(shards, FakeMatching(), **limits, num_blocks=shards.num_blocks) as it:
            for owner in "abc":
                expects_little(it.batcher, owner)
            entries = []
            for owner, prompt, length, has_grammar in asked:
                request = request_of(prompt, length, length).read_by_encoder(decoder_start)
                request = constrained(request) if has_grammar and decoder_start is None else request
                entries.append(it.batcher.submit(request, owner=owner))
            for entry in entries:
                *events, last = await events_of(entry)
                assert isinstance(last, Finished)
                assert tokens_alone(entry.request) == [event.id for event in events if isinstance(event, Token)]
        assert is_clean(it)
        assert all(trace.reserved_tokens <= capacity for trace in it.traces)
        for entry in entries:  # each time but the first it had got on
            if entry.request.grammar is None:
                assert entry.num_preempted <= 1 + entry.request.max_new_tokens // MIN_ADVANCE + len(deaths)

    asyncio.run(story())
