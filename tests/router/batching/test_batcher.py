"""The loop over fake shards, which check every request against the protocol: who runs with whom, and what is left."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.errors import Unavailable
from router.scheduling.request import Entry, Failed, Finished, PromptTokens, Token, ValidRequest
from router.text.generated import Ends, FinishReason
from tests.router.doubles import (
    EOS,
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
from tests.router.fake_shards import FakeShardedClient, fake_next_token

Story = Callable[[], Coroutine[Any, Any, None]]


def is_clean(at_work: Running) -> bool:
    """Nothing is left of any request, here or on the shards."""
    return at_work.batcher.num_free_blocks == at_work.limits.num_blocks and not at_work.shards.live_ids


async def test_one_request_gets_its_tokens_and_one_last_event() -> None:
    async with running() as at_work:
        request = request_of(5, max_new_tokens=6)
        events = await events_of(at_work.batcher.submit(request))
    assert [event.id for event in events[:-1] if isinstance(event, Token)] == tokens_alone(request)
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.generated_tokens) == (FinishReason.LENGTH, 6)
    assert finished.generated_text == "".join(event.text for event in events[:-1] if isinstance(event, Token))
    times = finished.timings
    assert times.queued <= times.admitted <= times.first_token <= times.finished
    assert is_clean(at_work)


async def test_length_finish_computes_no_surplus_token() -> None:
    async with running() as at_work:
        entries = [at_work.batcher.submit(request_of(3, max_new_tokens=n)) for n in (1, 2, 5)]
        await asyncio.gather(*map(events_of, entries))
    assert at_work.batcher._metrics.surplus_tokens._value.get() == 0
    # The first step yields a token from the prompt, each later one a decoded token, the last one only retires.
    assert [request.decode for request in at_work.shards.requests] == [False, True, True, True, True, False]


async def test_eos_is_noticed_one_step_late_and_its_surplus_token_dropped() -> None:
    limits = make_limits()
    shards = fake_shards(limits, vocab_size=257, next_token=lambda ids, *_: EOS if len(ids) == 6 else 65)
    async with running(shards) as at_work:
        events = await events_of(at_work.batcher.submit(request_of(4, max_new_tokens=20)))
    assert [event.id for event in events if isinstance(event, Token)] == [65, 65, EOS]
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.EOS_TOKEN
    assert at_work.batcher._metrics.surplus_tokens._value.get() == 1
    assert is_clean(at_work)


async def test_a_request_says_which_tokens_end_it() -> None:
    given = [EOS, 65, 65, 66, 67]
    shards = fake_shards(make_limits(), vocab_size=257, next_token=lambda ids, *_: given[(len(ids) - 4) % 5])
    ends = Ends(stop_ids=frozenset({66}), ignores_eos=True)
    async with running(shards) as at_work:
        events = await events_of(at_work.batcher.submit(request_of(4, max_new_tokens=20, ends=ends)))
    assert [event.id for event in events if isinstance(event, Token)] == given[:4]
    assert isinstance(events[-1], Finished) and events[-1].reason is FinishReason.STOP_SEQUENCE


async def test_at_most_two_requests_are_under_way() -> None:
    under_way: list[int] = []
    shards = fake_shards(make_limits())

    async def watch(_: float) -> None:
        under_way.append(len(shards._replies))

    shards.sleep = watch
    async with running(shards) as at_work:
        await events_of(at_work.batcher.submit(request_of(4, max_new_tokens=12)))
    assert max(under_way) == 2
    assert under_way.count(2) > 8


async def test_long_prompt_runs_in_chunks_while_others_decode() -> None:
    async with running(max_batch_prefill_tokens=16, max_waiting_tokens=0) as at_work:
        short, long = request_of(4, 12), request_of(50, 3)
        first = at_work.batcher.submit(short)
        second = at_work.batcher.submit(long)
        got = await asyncio.gather(token_ids_of(first), token_ids_of(second))
    assert got == [tokens_alone(short), tokens_alone(long)]
    chunks = [sum(request.chunk_tokens) for request in at_work.shards.requests if request.chunk_tokens]
    assert chunks == [16, 16, 16, 6]  # 4 + 12 of the long one, then 16, 16, and its last 6
    assert any(request.decode and request.chunk_ids for request in at_work.shards.requests)


async def test_waiting_request_joins_at_once_when_the_ratio_allows_it() -> None:
    async with running(waiting_served_ratio=0.0) as at_work:
        first = at_work.batcher.submit(request_of(4, 30))
        await first.events.get()
        second = at_work.batcher.submit(request_of(4, 2))
        await events_of(second)
        assert not first.is_over
        await events_of(first)


async def test_waiting_request_joins_after_max_waiting_tokens_steps() -> None:
    async with running(waiting_served_ratio=2.0, max_waiting_tokens=10) as at_work:
        first = at_work.batcher.submit(request_of(4, 40))
        await first.events.get()
        await events_of(at_work.batcher.submit(request_of(4, 2)))
        await events_of(first)
    admitting = [request.step for request in at_work.shards.requests if request.add]
    assert admitting == [1, 11]  # counted from the admitting step, as TGI does


async def test_cancelled_while_waiting_is_never_sent() -> None:
    async with running(max_batch_size=1) as at_work:
        first = at_work.batcher.submit(request_of(4, 10))
        second = at_work.batcher.submit(request_of(4, 10))
        second.cancelled = True
        await events_of(first)
    assert [[one.id for one in request.add] for request in at_work.shards.requests if request.add] == [[first.id]]
    assert second.events.empty()


async def test_cancelled_while_running_frees_its_blocks_within_two_steps() -> None:
    async with running() as at_work:
        entry = at_work.batcher.submit(request_of(4, 100))
        await entry.events.get()
        entry.cancelled = True
        num_steps = len(at_work.shards.requests)
        while at_work.batcher.num_free_blocks < at_work.limits.num_blocks:
            await asyncio.sleep(0)
        assert len(at_work.shards.requests) <= num_steps + 2
    assert is_clean(at_work)


async def test_cancelled_while_the_last_token_is_under_way_is_forgotten() -> None:
    async with running() as at_work:
        entry = at_work.batcher.submit(request_of(4, 1))
        while not at_work.shards.requests:
            await asyncio.sleep(0)
        entry.cancelled = True
        while at_work.batcher._under_way:
            await asyncio.sleep(0)
        assert not at_work.batcher._live
        assert entry.events.empty()
    assert is_clean(at_work)


async def test_shards_that_nobody_starts_again_fail_everything_and_end_the_loop() -> None:
    async with running(max_batch_size=1) as at_work:
        entries = [at_work.batcher.submit(request_of(4, 50)) for _ in range(3)]
        await entries[0].events.get()
        at_work.shards.die("unavailable: socket closed")
        for entry in entries:
            last = (await events_of(entry))[-1]
            assert isinstance(last, Failed)
            assert str(last.error).endswith("a model shard failed, and the server's log says why")
        assert "shard 0: unavailable: socket closed" == str(at_work.batcher.failure)
        assert not at_work.batcher.is_accepting
        with pytest.raises(Unavailable):
            at_work.batcher.submit(request_of(4, 4))


async def test_drain_lets_running_requests_finish_and_nobody_in() -> None:
    async with running() as at_work:
        entry = at_work.batcher.submit(request_of(4, 20))
        await entry.events.get()
        draining = asyncio.create_task(at_work.batcher.drain(5))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="stopping or restarting"):
            at_work.batcher.submit(request_of(4, 4))
        assert isinstance((await events_of(entry))[-1], Finished)
        await draining
    assert is_clean(at_work)


async def test_drain_ends_when_the_last_request_is_cancelled_while_waiting() -> None:
    async with running() as at_work:
        at_work.batcher.submit(request_of(4, 20)).cancelled = True
    assert at_work.shards.requests == []


async def test_drain_fails_what_is_left_when_its_time_is_over() -> None:
    shards = fake_shards(make_limits(), step_delay_s=0.02)
    async with running(shards) as at_work:
        entry = at_work.batcher.submit(request_of(4, 100))
        await at_work.batcher.drain(0.05)
        last = (await events_of(entry))[-1]
        assert isinstance(last, Failed)
        assert isinstance(last.error, Unavailable)


async def test_prompt_logprobs_of_a_chunked_prompt_come_before_the_first_token() -> None:
    async with running(max_batch_prefill_tokens=8) as at_work:
        entry = at_work.batcher.submit(request_of(20, 1, prompt_logprobs=True))
        first, second, _ = await events_of(entry)
    assert isinstance(first, PromptTokens)
    assert [token.id for token in first.tokens] == list(entry.request.token_ids)
    assert [token.logprob for token in first.tokens] == [None] + [-1.0] * 19
    assert isinstance(second, Token)


async def test_top_tokens_go_to_the_requests_that_asked() -> None:
    async with running() as at_work:
        plain = at_work.batcher.submit(request_of(4, 2))
        asking = at_work.batcher.submit(request_of(5, 2, top_n_tokens=3))
        tops = [
            [len(event.top_tokens) for event in await events_of(entry) if isinstance(event, Token)]
            for entry in (plain, asking)
        ]
    assert tops == [[0, 0], [3, 3]]


async def test_token_that_cannot_be_delivered_fails_its_request_alone() -> None:
    async with running() as at_work:
        broken, fine = (at_work.batcher.submit(request_of(4, 5)) for _ in range(2))
        broken.generated._max_new_tokens = None  # type: ignore[assignment]
        assert isinstance((await events_of(broken))[-1], Failed)
        assert isinstance((await events_of(fine))[-1], Finished)
    assert is_clean(at_work)


async def test_a_prefix_is_computed_once_and_generated_tokens_are_part_of_it() -> None:
    async with running(prefix_caching=True) as at_work:
        first = request_of(40, 30)
        answer = await token_ids_of(at_work.batcher.submit(first))
        assert 40 == at_work.traces[0].prefill_tokens
        # The same prompt: two full blocks are there. The conversation goes on: those of the answer are, too.
        for prompt, computed in (([*range(1, 41)], 8), ([*range(1, 41), *answer, 5], 71 - 64)):
            at_work.traces.clear()
            request = request_of(prompt, 4)
            assert tokens_alone(request) == await token_ids_of(at_work.batcher.submit(request))
            assert computed == sum(trace.prefill_tokens for trace in at_work.traces)
    assert is_clean(at_work)


async def test_what_has_states_is_computed_from_the_last_place_where_they_were_kept() -> None:
    states = {"checkpoint_tokens": 32, "checkpoint_blocks": 3}
    async with running(prefix_caching=True, **states) as at_work:
        answer = await token_ids_of(at_work.batcher.submit(request_of(40, 30)))
        assert [32, 8] == [trace.prefill_tokens for trace in at_work.traces[:2]]
        # The same prompt; one that shares a block more than there are states behind; the conversation that goes on.
        for prompt, computed in (([*range(1, 41)], 8), ([*range(1, 50)], 17), ([*range(1, 41), *answer, 5], 71 - 64)):
            at_work.traces.clear()
            request = request_of(prompt, 4)
            assert tokens_alone(request) == await token_ids_of(at_work.batcher.submit(request))
            assert computed == sum(trace.prefill_tokens for trace in at_work.traces)
    assert is_clean(at_work)


async def test_what_has_rings_is_computed_from_where_windows_were_kept() -> None:
    async with running(prefix_caching=True, **with_states((2, 2, 1, 32), 16)) as at_work:
        answer = await token_ids_of(at_work.batcher.submit(request_of(60, 40)))
        assert [32, 28] == [trace.prefill_tokens for trace in at_work.traces[:2]]
        cases = (
            ([*range(1, 61)], 60 - 48),  # the same prompt, of which the end was kept
            ([*range(1, 41), 9], 41 - 32),  # what begins alike up to a place
            ([*range(1, 32), 9], 32),  # and up to none
            ([*range(1, 61), *answer[:30], 5], 91 - 48),  # within an answer there is no place
            ([*range(1, 61), *answer, 5], 101 - 96),  # at its end there is
        )
        for prompt, computed in cases:
            at_work.traces.clear()
            request = request_of(prompt, 4)
            assert tokens_alone(request) == await token_ids_of(at_work.batcher.submit(request))
            assert computed == sum(trace.prefill_tokens for trace in at_work.traces)
    assert is_clean(at_work)


async def test_what_was_not_computed_is_not_shared() -> None:
    shards = fake_shards(make_limits(), failing_token=40)
    async with running(shards, prefix_caching=True) as at_work:
        assert isinstance((await events_of(at_work.batcher.submit(request_of(40, 4))))[-1], Failed)
        shards.failing_token = None
        at_work.traces.clear()
        await token_ids_of(at_work.batcher.submit(request_of(40, 4)))
        assert 40 == at_work.traces[0].prefill_tokens
    assert is_clean(at_work)


async def test_a_long_prompt_joins_in_small_chunks_beside_streams() -> None:
    async with running(prefill_chunk=8) as at_work:
        stream = at_work.batcher.submit(request_of(4, 60))
        await stream.events.get()
        late = at_work.batcher.submit(request_of(60, 2))
        await asyncio.gather(token_ids_of(stream), token_ids_of(late))
    assert all(trace.prefill_tokens <= 8 for trace in at_work.traces if trace.num_decoding)
    assert 64 == sum(trace.prefill_tokens for trace in at_work.traces)


async def test_prompts_of_an_encoder_wait_until_a_step_takes_them_whole() -> None:
    shards = fake_shards(make_limits(), decoder_start=7)
    async with running(shards, num_blocks=shards.num_blocks) as at_work:
        requests = [request_of(40, 3).read_by_encoder(7) for _ in range(3)]
        entries = [at_work.batcher.submit(request) for request in requests]
        got = await asyncio.gather(*map(token_ids_of, entries))
    assert [tokens_alone(request) for request in requests] == got
    # 64 prompt tokens a step take one of these prompts, and none in part.
    assert [40, 40, 40] == [trace.prefill_tokens for trace in at_work.traces if trace.prefill_tokens]
    assert [1, 1, 1] == [n for request in shards.requests for n in request.chunk_tokens]
    assert all(43 * trace.batch_size == trace.reserved_tokens for trace in at_work.traces)
    assert is_clean(at_work)


async def test_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    async with running() as at_work:
        entries = [at_work.batcher.submit(request_of(4, 8, seed=seed)) for seed in (5, 5, 6)]
        one, same, other = await asyncio.gather(*map(token_ids_of, entries))
    assert one == same != other


# ----------------------------------------------------------------------------------------- random schedules


@dataclass(frozen=True)
class Visit:
    """One client's visit: when it comes, what it wants, after how many events it leaves (None: stays)."""

    comes_after_turns: int
    prompt_length: int
    prompt_kind: int  # prompts of one kind begin alike
    max_new_tokens: int
    seed: int
    leaves_after: int | None
    has_grammar: bool

    @property
    def prompt(self) -> list[int]:
        return [self.prompt_kind, *range(1, self.prompt_length)]


visits = st.builds(
    Visit,
    comes_after_turns=st.integers(0, 30),
    prompt_length=st.integers(1, 60),
    prompt_kind=st.integers(0, 2),
    max_new_tokens=st.integers(1, 20),
    seed=st.integers(0, 3),
    leaves_after=st.none() | st.integers(0, 6),
    has_grammar=st.sampled_from([False, False, True]),
)


def with_eos(token_ids: Sequence[int], seed: int, vocab_size: int) -> int:
    token_id = fake_next_token(token_ids, seed, vocab_size)
    return EOS if token_id % 11 == 0 else token_id


def alone_with_eos(request: ValidRequest) -> list[int]:
    if request.grammar is not None:
        return tokens_alone(request, next_token=with_eos)
    token_ids = [*request.encoder_ids, *request.token_ids]
    num_given = len(token_ids)
    for _ in range(request.max_new_tokens):
        token_ids.append(with_eos(token_ids, request.sampling.seed, 256))
        if token_ids[-1] == EOS:
            break
    return token_ids[num_given:]


async def pay(visit: Visit, at_work: Running) -> None:
    for _ in range(visit.comes_after_turns):
        await asyncio.sleep(0)
    request = request_of(visit.prompt, visit.max_new_tokens, visit.seed)
    request = constrained(request) if visit.has_grammar else request
    request = request.read_by_encoder(at_work.shards.decoder_start)
    entry = at_work.batcher.submit(request)
    if visit.leaves_after is None:
        *events, last = await events_of(entry)
        got = [event.id for event in events if isinstance(event, Token)]
        alone = alone_with_eos(request)
        assert got == (alone if isinstance(last, Finished) else alone[: len(got)])
        # A request may fail if it was lost three times and more without getting a token between.
        assert isinstance(last, Finished) or len(at_work.shards.failing_steps) + len(at_work.shards.deaths) > 2
    else:
        await leave_after(entry, visit.leaves_after)


async def leave_after(entry: Entry, num_events: int) -> None:
    for _ in range(num_events):
        if not isinstance(await entry.events.get(), Token):
            return
    entry.cancelled = True


@pytest.mark.parametrize("kv_admission", ["reserve", "demand"])
@pytest.mark.parametrize("num_lanes", [1, pytest.param(2, marks=pytest.mark.rest), 4])
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(visits, min_size=1, max_size=14),
    st.sampled_from([1, 8, 16]),
    st.integers(80, 300),
    st.integers(4, 80),
    st.none() | st.integers(1, 5),
    st.floats(0, 2),
    st.integers(0, 12),
    st.just({}) | st.dictionaries(st.integers(1, 40), st.just("bad luck"), max_size=4),
    st.just(frozenset()) | st.frozensets(st.integers(1, 60), max_size=5),
    st.none() | st.just(7),
    st.none() | st.integers(1, 40),
    st.booleans(),
    st.lists(st.integers(0, 12), min_size=1, max_size=4),
    STATES,
)
def test_any_schedule_keeps_the_limits_and_changes_no_tokens(
    num_lanes: int,
    kv_admission: str,
    schedule: list[Visit],
    block_size: int,
    capacity: int,
    prefill: int,
    batch_size: int | None,
    ratio: float,
    max_waiting: int,
    failing_steps: dict[int, str],
    deaths: frozenset[int],
    decoder_start: int | None,
    prefill_chunk: int | None,
    prefix_caching: bool,
    matching_delays: list[int],
    states: tuple[int, int, int, int],
) -> None:
    prefill = prefill if decoder_start is None else max(prefill, 60)  # an encoder takes the longest prompt whole

    async def story() -> None:
        overrides = {
            "max_total_tokens": 80,
            "block_size": block_size,
            "max_batch_total_tokens": capacity,
            "max_batch_prefill_tokens": prefill,
            "max_batch_size": batch_size,
            "waiting_served_ratio": ratio,
            "max_waiting_tokens": max_waiting,
            "prefill_chunk": prefill_chunk if decoder_start is None else None,
            "prefix_caching": prefix_caching and decoder_start is None,
            **(with_states(states, block_size) if decoder_start is None else {}),
            "num_lanes": num_lanes,
            "kv_admission": kv_admission,
        }
        shards: FakeShardedClient = fake_shards(
            make_limits(**overrides),
            next_token=with_eos,
            failing_steps=failing_steps,
            deaths=deaths,
            renewals=len(deaths),
            decoder_start=decoder_start,
        )
        overrides["num_blocks"] = shards.num_blocks
        async with running(shards, FakeMatching(matching_delays), **overrides) as at_work:
            await asyncio.gather(*(pay(visit, at_work) for visit in schedule))
        assert is_clean(at_work)
        assert all(trace.reserved_tokens <= capacity for trace in at_work.traces)
        assert all(trace.prefill_tokens <= prefill for trace in at_work.traces)
        assert all(trace.batch_size <= (batch_size or math.inf) for trace in at_work.traces)

    asyncio.run(story())
