"""How keys share: whose request is next, who makes room, and that nobody starves or sees another token for it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.batching.batcher import Batcher
from router.errors import Overloaded
from router.scheduling.fairness import Ledger, divide, fair_order, may_take, preempted_for
from router.scheduling.limits import Limits
from router.scheduling.request import Entry, Failed, Finished, Token
from router.telemetry.metrics import Metrics
from tests.router.doubles import (
    byte_tokenizer,
    events_of,
    fake_shards,
    make_limits,
    request_of,
    running,
    token_ids_of,
    tokens_alone,
)


@dataclass(eq=False)
class Asking:
    owner: str
    max_tokens: int
    weight: float = 1.0
    may_be_preempted: bool = True
    arrival: int = 0

    @property
    def claim(self) -> int:
        return self.max_tokens


def ledger_of(*batch: Asking, waiting: tuple[Asking, ...] = (), tokens: int = 100, places: int | None = None) -> Ledger:
    ledger = Ledger(tokens, places)
    for one in batch:
        ledger.queued(one)
        ledger.admitted(one)
    for one in waiting:
        ledger.queued(one)
    return ledger


# ------------------------------------------------------------------------------------------------------------ the rules


def test_the_key_that_holds_least_is_next_and_order_within_a_key_stays() -> None:
    waiting = (Asking("a", 10), Asking("a", 11), Asking("b", 12), Asking("b", 13), Asking("c", 14))
    ledger = ledger_of(Asking("a", 20), waiting=waiting)
    # b and c hold nothing, so b's first and c's first come before a; then b has 12, c 14, a 20.
    assert [12, 14, 13, 10, 11] == [one.max_tokens for one in fair_order(waiting, ledger)]


def test_a_heavier_key_has_its_turn_more_often() -> None:
    waiting = tuple(Asking(owner, 10, weight) for _ in range(6) for owner, weight in (("light", 1.0), ("heavy", 2.0)))
    owners = [one.owner for one in fair_order(waiting, ledger_of(waiting=waiting))]
    assert (6, 3) == (owners[:9].count("heavy"), owners[:9].count("light"))


def test_places_count_where_they_are_what_is_short() -> None:
    ledger = ledger_of(*[Asking("small", 1)] * 4, Asking("large", 40), tokens=100, places=8)
    assert (0.5, 0.4) == (ledger.held("small"), ledger.held("large"))


def fits_beside(total: int, batch: list[Asking], head: Asking) -> Callable[[Any], bool]:
    used = sum(one.max_tokens for one in batch)
    return lambda leaving: used - sum(one.max_tokens for one in leaving) + head.max_tokens <= total


def test_the_youngest_of_the_greediest_key_makes_room() -> None:
    batch = [Asking("a", 20), Asking("b", 20), Asking("a", 20), Asking("b", 20), Asking("a", 20)]
    head = Asking("c", 15)
    ledger = ledger_of(*batch, waiting=(head,))
    assert [batch[4]] == preempted_for(head, batch, ledger, fits_beside(100, batch, head))


def test_what_was_just_rebuilt_stays_and_the_next_oldest_leaves() -> None:
    batch = [Asking("a", 50), Asking("a", 50, may_be_preempted=False)]
    head = Asking("b", 10)
    ledger = ledger_of(*batch, waiting=(head,))
    assert [batch[0]] == preempted_for(head, batch, ledger, fits_beside(100, batch, head))


def test_nobody_leaves_for_more_than_a_key_s_share() -> None:
    batch = [Asking("a", 50), Asking("b", 40)]
    head = Asking("b", 20)  # with it b would have 60 of 100
    assert [] == preempted_for(head, batch, ledger_of(*batch, waiting=(head,)), fits_beside(100, batch, head))


def test_who_has_its_share_alone_leaves_for_nobody() -> None:
    batch = [Asking("a", 50), Asking("b", 50)]
    head = Asking("a", 10)
    assert [] == preempted_for(head, batch, ledger_of(*batch, waiting=(head,)), fits_beside(100, batch, head))


def test_the_last_request_of_a_key_stays_so_that_many_keys_do_not_take_turns() -> None:
    batch = [Asking("a", 60), Asking("b", 40)]
    head = Asking("c", 10)
    ledger = ledger_of(*batch, waiting=(head, *(Asking(name, 10) for name in "defghi")))
    assert [] == preempted_for(head, batch, ledger, fits_beside(100, batch, head))


def test_a_key_that_holds_nothing_may_have_one_request_of_any_size() -> None:
    batch = [Asking("a", 50), Asking("a", 50)]
    head = Asking("b", 100)
    ledger = ledger_of(*batch, waiting=(head,))
    # It needs both to leave, but after the first a has no more than its half: b waits for the other to end.
    assert [] == preempted_for(head, batch, ledger, fits_beside(100, batch, head))
    head = Asking("b", 50)
    ledger = ledger_of(*batch, waiting=(head,))
    assert [batch[1]] == preempted_for(head, batch, ledger, fits_beside(100, batch, head))


@given(
    st.integers(0, 600),
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(0, 300), st.floats(0.1, 10)), max_size=4),
)
def test_a_step_s_prompts_are_divided_without_remainder(budget: int, asked: dict[str, tuple[int, float]]) -> None:
    wanted = {owner: tokens for owner, (tokens, _) in asked.items()}
    parts = divide(budget, wanted, {owner: weight for owner, (_, weight) in asked.items()})
    assert min(budget, sum(wanted.values())) == sum(parts.values())
    assert all(0 <= parts[owner] <= wanted[owner] for owner in wanted)
    hungry = [owner for owner in wanted if parts[owner] < wanted[owner]]
    if budget >= len(wanted):
        assert all(parts[owner] for owner in hungry)


def test_parts_follow_the_weights() -> None:
    assert {"a": 100, "b": 412} == divide(512, {"a": 100, "b": 1000}, {"a": 1.0, "b": 1.0})
    assert {"a": 128, "b": 384} == divide(512, {"a": 1000, "b": 1000}, {"a": 1.0, "b": 3.0})


def test_one_key_leaves_a_quarter_and_two_leave_a_seventh() -> None:
    held = {"a": 0, "b": 0}
    for owner, expected in (("a", 96), ("b", 24)):
        while may_take(1, held=held[owner], free=128 - sum(held.values()), weight=1.0):
            held[owner] += 1
        assert expected == held[owner]
    while held["a"] > held["b"]:  # what ends of a's goes to b, until both have the same
        held["a"] -= 1
        while may_take(1, held=held["b"], free=128 - sum(held.values()), weight=1.0):
            held["b"] += 1
    assert (54, 55) == (held["a"], held["b"])


def test_a_newcomer_gets_the_last_one() -> None:
    assert may_take(1, held=0, free=1, weight=1.0)
    assert not may_take(1, held=1, free=1, weight=1.0)
    assert not may_take(2, held=0, free=1, weight=1.0)


# --------------------------------------------------------------------------------------------------------- in the batch


async def test_the_youngest_makes_room_and_gets_the_very_same_tokens() -> None:
    async with running(max_batch_size=2, max_batch_total_tokens=1024) as at_work:
        requests = [request_of(10 + n, 60, seed=n) for n in range(2)]
        greedy = [at_work.batcher.submit(request, owner="a") for request in requests]
        for _ in range(20):
            await greedy[1].events.get()
        got = 20
        other = at_work.batcher.submit(request_of(5, 40), owner="b")
        await other.events.get()
        assert (0, 1) == (greedy[0].num_preempted, greedy[1].num_preempted)
        assert tokens_alone(requests[0]) == await token_ids_of(greedy[0])
        assert tokens_alone(requests[1])[got:] == await token_ids_of(greedy[1])
        assert tokens_alone(other.request)[1:] == await token_ids_of(other)
        assert not at_work.shards.live_ids or await all_gone(at_work.shards)
    assert at_work.batcher.num_free_blocks == at_work.limits.num_blocks


async def all_gone(shards: Any) -> bool:
    while shards.live_ids:
        await asyncio.sleep(0)
    return True


async def test_prompt_logprobs_survive_being_sent_away_in_the_middle_of_the_prompt() -> None:
    async with running(max_batch_size=2, max_batch_prefill_tokens=8, prefill_chunk=8) as at_work:
        older = at_work.batcher.submit(request_of(1, 60), owner="a")
        greedy = at_work.batcher.submit(request_of(60, 3, prompt_logprobs=True), owner="a")
        while len(greedy.prompt_scores.logprobs) < 16:
            await asyncio.sleep(0)
        other = at_work.batcher.submit(request_of(5, 4), owner="b")
        assert tokens_alone(other.request) == await token_ids_of(other)
        first, *_, last = await events_of(greedy)
        assert 1 == greedy.num_preempted
        assert [None] + [-1.0] * 59 == [token.logprob for token in first.tokens]  # type: ignore[union-attr]
        assert isinstance(last, Finished)
        assert tokens_alone(older.request) == await token_ids_of(older)


async def test_without_keys_nobody_makes_room() -> None:
    async with running(max_batch_size=2) as at_work:
        entries = [at_work.batcher.submit(request_of(5, 40)) for _ in range(6)]
        for entry in entries:
            await events_of(entry)
    assert [0] * 6 == [entry.num_preempted for entry in entries]


def test_the_queue_is_bounded_by_tokens_and_a_key_leaves_room_for_others() -> None:
    async def story() -> None:
        async with running(max_batch_size=1, max_queue_tokens=400) as at_work:
            batcher = at_work.batcher
            one = request_of(20, 30)  # 50 tokens

            def ask(owner: str) -> Entry:
                batcher.check_room([one], owner, 1.0)
                return batcher.submit(one, owner=owner)

            entries = [ask("a") for _ in range(6)]  # 300 waiting, 100 free
            with pytest.raises(Overloaded, match="max_queue_tokens"):
                ask("a")
            entries += [ask("b")]
            assert 350 == batcher._scheduler.ledger.waiting_tokens
            batcher.check_room([one], "", 1.0)  # without keys it is the bound itself
            with pytest.raises(Overloaded):
                batcher.check_room([one, one], "", 1.0)
            for entry in entries:
                await events_of(entry)
            assert 0 == batcher._scheduler.ledger.waiting_tokens

    asyncio.run(story())


def test_an_empty_queue_takes_a_request_of_any_length() -> None:
    one = Asking("a", 60)
    assert ledger_of().has_room(60, 50, "", 1.0)
    assert not ledger_of(waiting=(one,)).has_room(1, 50, "", 1.0)


@dataclass(frozen=True)
class Call:
    owner: str
    comes_after_turns: int
    prompt_length: int
    max_new_tokens: int
    leaves_after: int | None


calls = st.builds(
    Call,
    owner=st.sampled_from(["a", "a", "a", "b", "c"]),
    comes_after_turns=st.integers(0, 60),
    prompt_length=st.integers(1, 60),
    max_new_tokens=st.integers(1, 50),
    leaves_after=st.none() | st.none() | st.integers(0, 6),
)


@pytest.mark.parametrize("kv_admission", ["reserve", "demand"])
@pytest.mark.parametrize("num_lanes", [1, 2, 4])
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=max(30, settings().max_examples // 3))
@given(
    st.lists(calls, min_size=2, max_size=16),
    st.integers(120, 400),
    st.none() | st.integers(1, 4),
    st.integers(8, 80),
    st.none() | st.integers(4, 40),
    st.booleans(),
    st.sampled_from([None, None, 7]),
    st.fixed_dictionaries({"a": st.floats(0.2, 5), "b": st.floats(0.2, 5), "c": st.just(1.0)}),
    st.just({}) | st.dictionaries(st.integers(1, 60), st.just("bad luck"), max_size=3),
)
def test_every_request_of_every_key_finishes_with_its_own_tokens(
    num_lanes: int,
    kv_admission: str,
    schedule: list[Call],
    capacity: int,
    batch_size: int | None,
    prefill: int,
    prefill_chunk: int | None,
    prefix_caching: bool,
    decoder_start: int | None,
    weights: dict[str, float],
    failing_steps: dict[int, str],
) -> None:
    admitted: list[Entry] = []

    async def call(one: Call, batcher: Batcher) -> Entry:
        for _ in range(one.comes_after_turns):
            await asyncio.sleep(0)
        request = request_of(one.prompt_length, one.max_new_tokens).read_by_encoder(decoder_start)
        entry = batcher.submit(request, owner=one.owner, weight=weights[one.owner])
        if one.leaves_after is None:
            *events, last = await events_of(entry)
            got = [event.id for event in events if isinstance(event, Token)]
            assert isinstance(last, Finished) or failing_steps
            assert got == tokens_alone(request)[: len(got) if isinstance(last, Failed) else None]
        else:
            for _ in range(min(one.leaves_after, one.max_new_tokens)):
                if not isinstance(await entry.events.get(), Token):
                    break
            entry.cancelled = True
        return entry

    async def story() -> None:
        overrides = {
            "max_batch_total_tokens": capacity,
            "max_batch_size": batch_size,
            "max_batch_prefill_tokens": prefill if decoder_start is None else max(prefill, 60),
            "prefill_chunk": prefill_chunk if decoder_start is None else None,
            "prefix_caching": prefix_caching and decoder_start is None,
            "num_lanes": num_lanes,
            "kv_admission": kv_admission,
        }
        shards = fake_shards(make_limits(**overrides), decoder_start=decoder_start, failing_steps=failing_steps)
        overrides["num_blocks"] = shards.num_blocks
        async with asyncio.timeout(60), running(shards, **overrides) as at_work:
            entries = await asyncio.gather(*(call(one, at_work.batcher) for one in schedule))
        admitted.extend(entries)
        assert at_work.batcher.num_free_blocks == at_work.limits.num_blocks and not at_work.shards.live_ids
        ledger = at_work.batcher._scheduler.ledger
        assert ({}, 0) == (ledger.weights, ledger.waiting_tokens)

    asyncio.run(story())
    for owner in "abc":  # first in, first out within a key; those who left while they waited were never admitted
        times = [
            e.admitted_at for e in sorted(admitted, key=lambda e: e.queued_at) if e.owner == owner and e.admitted_at
        ]
        assert times == sorted(times)


# ------------------------------------------------------------------------------------------------------ in virtual time


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer as soon as nothing else is left to do."""

    def __init__(self) -> None:
        super().__init__(selectors.DefaultSelector())
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._now = max(self._now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def in_virtual_time(story: Callable[[Callable[[], float]], Awaitable[None]]) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(story(loop.time))
    finally:
        loop.close()


STEP_S = 0.1


@pytest.mark.parametrize(("prompt_length", "max_new_tokens", "chunk"), [(100, 100, 512), (600, 20, 128)])
def test_one_client_beside_a_hundred_waits_for_two_steps_at_most(
    prompt_length: int, max_new_tokens: int, chunk: int
) -> None:
    """32 sequences fit, 100 clients of one key want them all the time, and one client comes beside.

    Where prompts are long, they alone would fill the budget of every step.
    """
    limits = make_limits(
        max_input_length=1024,
        max_total_tokens=2048,
        max_batch_total_tokens=32 * (prompt_length + max_new_tokens + 8),
        max_batch_prefill_tokens=chunk,
        prefill_chunk=chunk,
        waiting_served_ratio=0.0,
    )
    queued, first, preempted = one_beside_many(limits, prompt_length, max_new_tokens)
    assert 30 == len(queued)
    assert max(queued) <= 2 * STEP_S + 1e-9
    # Its prompt of 50 tokens takes one step.
    assert max(first) <= (1 + 3) * STEP_S + 1e-9
    assert preempted or prompt_length == 600  # where prompts take all the time, the batch does not fill


def test_a_job_with_a_small_weight_goes_on_beside_live_traffic_without_slowing_it() -> None:
    """Its requests fill the batch while nobody else is there, and make room within a step."""
    limits = make_limits(
        max_input_length=1024,
        max_total_tokens=2048,
        max_batch_total_tokens=32 * 208,
        max_batch_prefill_tokens=512,
        prefill_chunk=512,
        waiting_served_ratio=0.0,
    )
    queued, first, preempted = one_beside_many(limits, 100, 100, weight=0.01)
    assert max(queued) <= 2 * STEP_S + 1e-9 and max(first) <= (1 + 3) * STEP_S + 1e-9
    assert preempted  # and every request of the job got its own tokens, which `many` waits for


def one_beside_many(
    limits: Limits, prompt_length: int, max_new_tokens: int, weight: float = 1.0
) -> tuple[list[float], list[float], int]:
    """Queue times and times to the first token of the one client, and how often others made room.

    weight: of the key that has the many; the one's is 1.
    """
    queued: list[float] = []
    first: list[float] = []
    total = 0

    async def story(clock: Callable[[], float]) -> None:
        nonlocal total
        shards = fake_shards(limits, step_delay_s=STEP_S, clock=clock, keep_requests=False)
        batcher = Batcher(shards, byte_tokenizer(), limits, Metrics(limits), clock=clock)
        batching = asyncio.ensure_future(batcher.run())
        random = Random(9)

        async def many(number: int) -> None:
            nonlocal total
            while True:
                request = request_of(
                    [number, *(random.randrange(256) for _ in range(prompt_length - 1))], max_new_tokens
                )
                entry = batcher.submit(request, owner="many", weight=weight)
                await asyncio.shield(asyncio.ensure_future(events_of(entry)))
                total += entry.num_preempted

        crowd = [asyncio.ensure_future(many(number)) for number in range(100)]
        await asyncio.sleep(80 * STEP_S)
        for _ in range(30):
            await asyncio.sleep(random.random() * 20 * STEP_S)
            entry = batcher.submit(request_of(50, random.randint(1, 50)), owner="one")
            assert tokens_alone(entry.request) == await token_ids_of(entry)
            queued.append(entry.admitted_at - entry.queued_at)
            first.append(entry.first_token_at - entry.queued_at)
        for task in [*crowd, batching]:
            task.cancel()
        await asyncio.wait([*crowd, batching])

    in_virtual_time(story)
    return queued, first, total
