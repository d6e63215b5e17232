"""Requests with grammars: held between tokens, forced tokens as a chunk, and neighbours that notice nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from router.errors import GenerationError
from router.scheduling.grammar import Continuation, Mask
from router.scheduling.request import (
    Failed,
    Finished,
    PromptScores,
    PromptTokens,
    Sampling,
    ScoredToken,
    Token,
    ValidRequest,
)
from router.text.generated import FinishReason
from tests.router.batching.test_batcher import is_clean
from tests.router.doubles import (
    EOS,
    FakeMatching,
    constrained,
    events_of,
    fake_rule,
    fake_shards,
    make_limits,
    request_of,
    running,
    token_ids_of,
    tokens_alone,
)
from tests.router.fake_shards import fake_raw_logprob

MIX = [constrained(request_of(5, 40, 3)), request_of(9, 30, 1), constrained(request_of(20, 33)), request_of(3, 40)]


@pytest.mark.parametrize("delays", [(0,), (40,), (0, 7, 1, 30, 3)], ids=["at once", "late", "mixed"])
@pytest.mark.parametrize("limits", [{}, {"prefill_chunk": 3}, {"prefix_caching": True}], ids=str)
async def test_everyone_gets_the_tokens_that_they_get_alone(delays: tuple[int, ...], limits: dict[str, Any]) -> None:
    async with running(matching=FakeMatching(delays), **limits) as at_work:
        entries = [at_work.batcher.submit(request) for request in [*MIX, *MIX]]
        got = await asyncio.gather(*map(token_ids_of, entries))
    assert [tokens_alone(request) for request in [*MIX, *MIX]] == got
    assert is_clean(at_work)


async def test_neighbours_have_two_steps_under_way_while_a_grammar_is_waited_for() -> None:
    under_way: list[int] = []
    shards = fake_shards(make_limits())

    async def watch(_: float) -> None:
        under_way.append(len(shards._replies))
        await asyncio.sleep(0)

    shards.sleep = watch
    async with running(shards, FakeMatching(delays=(25,))) as at_work:
        free = request_of(4, 40)
        entries = [at_work.batcher.submit(free), at_work.batcher.submit(constrained(request_of(4, 8, 3)))]
        got = await asyncio.gather(*map(token_ids_of, entries))
    assert tokens_alone(free) == got[0]
    decodes = [request for request in shards.requests if request.decode]
    assert 41 >= len(decodes)  # a step for each of its tokens: it waited for nobody
    assert under_way.count(2) >= 37
    assert any(request.held for request in decodes)


async def test_forced_tokens_come_in_one_step() -> None:
    forced = (65, 66, 67, 68, 69)

    def rule(token_ids: Any) -> Continuation:
        return Continuation(forced if len(token_ids) % 6 == 1 else (), Mask(allowed=(70,)))

    async with running(matching=FakeMatching(rule=rule)) as at_work:
        request = constrained(request_of(4, 13))
        assert request.grammar is not None
        first = replace(request.grammar, first=Continuation((), Mask(allowed=(70,))))
        events = await events_of(at_work.batcher.submit(replace(request, grammar=first)))
    tokens = [event for event in events if isinstance(event, Token)]
    assert [70, *forced, 70, *forced, 70] == [token.id for token in tokens]
    assert [-0.5, 0, 0, 0, 0, 0, -0.5] == [token.logprob for token in tokens[:7]]
    computing = [request for request in at_work.shards.requests if request.decode or request.chunk_ids]
    assert 3 == len(computing)
    assert isinstance(events[-1], Finished) and (FinishReason.LENGTH, 13) == (
        events[-1].reason,
        events[-1].generated_tokens,
    )


@pytest.mark.parametrize("limits", [{}, {"prefill_chunk": 2}], ids=str)
@pytest.mark.parametrize("faults", [{}, {"deaths": {3, 9}}, {"failing_steps": {4: "no"}}], ids=str)
async def test_forced_tokens_have_log_probabilities_and_candidates_of_their_own(
    limits: dict[str, Any], faults: dict[str, Any]
) -> None:
    request = constrained(replace(request_of(6, 40), prompt_logprobs=True, top_n_tokens=2))
    raw = replace(request, sampling=Sampling(raw_logprobs=True))
    shards = fake_shards(make_limits(), renewals=9, **faults)
    async with running(shards, **limits) as at_work:
        for asked in (request, raw):
            first, *events = await events_of(at_work.batcher.submit(asked))
            if asked is raw:
                assert isinstance(first, PromptScores)
                assert [fake_raw_logprob(id) for id in range(2, 7)] == list(first.logprobs)
                assert [2, 3] == [id for id, _ in first.candidates(0)]
            else:
                assert isinstance(first, PromptTokens)
                assert [None] + [-1.0] * 5 == [token.logprob for token in first.tokens]
            for token in events[:-1]:
                assert isinstance(token, Token) and token.logprob is not None
                is_chosen = token.logprob == -0.5
                if asked is raw and not is_chosen:
                    assert isinstance(token, ScoredToken)
                    assert fake_raw_logprob(token.id) == token.logprob
                    assert [token.id, token.id + 1] == [id for id, _ in token.candidates]
                elif not is_chosen:
                    assert [(token.id, 0.0)] == [(top.id, top.logprob) for top in token.top_tokens]
            forced = sum(token.logprob != -0.5 for token in events[:-1] if isinstance(token, Token))
            assert forced > 5


async def test_a_stop_sequence_within_forced_tokens_ends_the_text_there() -> None:
    request = constrained(request_of(6, 40))
    alone = tokens_alone(request)
    forced = fake_rule([]).forced or ()
    place = next(n for n in range(len(alone)) if len(fake_rule(alone[: n + 1]).forced) > 2 and n >= len(forced))
    stop = chr(alone[place + 2]) if alone[place + 2] < 128 else None
    async with running() as at_work:
        entry = at_work.batcher.submit(replace(request, stop=(stop,) if stop else ()))
        events = await events_of(entry)
    got = [event.id for event in events if isinstance(event, Token)]
    assert got == alone[: len(got)]
    if stop:
        assert isinstance(events[-1], Finished) and events[-1].reason is FinishReason.STOP_SEQUENCE


async def test_the_end_token_ends_it_also_before_min_tokens() -> None:
    matching = FakeMatching(rule=lambda ids: Continuation((), Mask(allowed=(65,) if len(ids) < 3 else (EOS,))))
    async with running(fake_shards(make_limits(), vocab_size=257), matching) as at_work:
        request = constrained(request_of(4, 20))
        assert request.grammar is not None
        grammar = replace(request.grammar, first=Continuation((), Mask(allowed=(65,))))
        ends = replace(request.ends, min_tokens=10, has_grammar=True)
        events = await events_of(at_work.batcher.submit(replace(request, grammar=grammar, ends=ends)))
    assert [65, 65, 65, EOS] == [event.id for event in events if isinstance(event, Token)]
    assert isinstance(events[-1], Finished) and events[-1].reason is FinishReason.EOS_TOKEN
    assert 0 == at_work.batcher._metrics.surplus_tokens._value.get()


async def test_a_grammar_that_cannot_be_followed_fails_its_own_request_alone() -> None:
    async with running(matching=FakeMatching(failing_at=12)) as at_work:
        free, held = request_of(4, 40), constrained(request_of(4, 40, 3))
        entries = [at_work.batcher.submit(free), at_work.batcher.submit(held)]
        got = await asyncio.gather(*map(events_of, entries))
    assert tokens_alone(free) == [event.id for event in got[0] if isinstance(event, Token)]
    assert isinstance(got[1][-1], Failed) and isinstance(got[1][-1].error, GenerationError)
    assert is_clean(at_work)


@pytest.mark.parametrize("delays", [(0,), (30,), (0, 9, 2)], ids=str)
@pytest.mark.parametrize(
    "faults", [{"deaths": {4, 9, 15}}, {"deaths": {4, 5}}, {"failing_steps": {3: "out of memory", 6: "again"}}], ids=str
)
async def test_what_was_lost_goes_on_with_its_grammar(faults: dict[str, Any], delays: tuple[int, ...]) -> None:
    shards = fake_shards(make_limits(), renewals=100, **faults)
    async with running(shards, FakeMatching(delays), prefix_caching=True) as at_work:
        entries = [at_work.batcher.submit(request) for request in MIX]
        got = await asyncio.gather(*map(token_ids_of, entries))
    assert [tokens_alone(request) for request in MIX] == got
    assert is_clean(at_work)


async def test_an_encoder_s_text_is_held_too_and_rebuilt() -> None:
    shards = fake_shards(make_limits(), decoder_start=7, renewals=9, deaths={5, 11})
    async with running(shards, FakeMatching((3, 0))) as at_work:
        requests = [request.read_by_encoder(7) for request in MIX]
        got = await asyncio.gather(*(token_ids_of(at_work.batcher.submit(request)) for request in requests))
    assert [tokens_alone(request) for request in requests] == got
    assert not shards.live_ids


async def test_who_makes_room_for_another_key_goes_on_with_its_grammar() -> None:
    limits = {"max_batch_total_tokens": 128, "max_total_tokens": 64, "max_batch_size": 2}
    async with running(fake_shards(make_limits(**limits)), FakeMatching((0, 5)), **limits) as at_work:
        many = [constrained(request_of(4, 50, seed)) for seed in range(1, 7)]
        entries = [at_work.batcher.submit(request, owner="many") for request in many]
        await entries[1].events.get()
        other = constrained(request_of(5, 40, 9))
        entries.append(at_work.batcher.submit(other, owner="other"))
        got = await asyncio.gather(*map(token_ids_of, entries))
    got[1].insert(0, tokens_alone(many[1])[0])
    assert [tokens_alone(request) for request in [*many, other]] == got
    assert at_work.batcher._metrics.preempted._value.get() > 0
    assert is_clean(at_work)


async def test_who_leaves_while_held_leaves_nothing() -> None:
    async with running(matching=FakeMatching(delays=())) as at_work:
        request: ValidRequest = constrained(request_of(4, 30))
        entry = at_work.batcher.submit(request)
        await entry.events.get()
        entry.cancelled = True
        assert tokens_alone(request_of(6, 5)) == await token_ids_of(at_work.batcher.submit(request_of(6, 5)))
    assert is_clean(at_work)
