"""What the shards lose goes on elsewhere: the same tokens, in the same order, and who is to blame ends alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.errors import GenerationError, Overloaded, Unavailable
from router.scheduling.request import Failed, Finished, PromptTokens, Token
from tests.router.batching.test_batcher import is_clean
from tests.router.doubles import (
    Running,
    events_of,
    fake_shards,
    make_limits,
    request_of,
    running,
    token_ids_of,
    tokens_alone,
)

START = 7  # of an encoder-decoder


def at_risk(**faults: Any) -> Any:
    """Shards with faults, which are started again as often as they die."""
    return fake_shards(make_limits(), renewals=100, **faults)


@pytest.mark.parametrize("fault", [{"failing_steps": {4: "out of memory"}}, {"deaths": {4}}, {"deaths": {4, 5, 9}}])
async def test_what_was_lost_gets_the_tokens_of_an_undisturbed_run(fault: dict[str, Any]) -> None:
    async with running(at_risk(**fault), prefix_caching=True) as at_work:
        requests = [request_of(length, 30, seed) for length, seed in ((4, 0), (20, 1), (40, 2), (40, 2))]
        entries = [at_work.batcher.submit(request) for request in requests]
        got = await asyncio.gather(*map(token_ids_of, entries))
    assert [tokens_alone(request) for request in requests] == got
    assert is_clean(at_work)


async def test_a_loss_while_nothing_runs_is_noticed_and_mended() -> None:
    async with running(at_risk()) as at_work:
        await token_ids_of(at_work.batcher.submit(request_of(4, 2)))
        at_work.shards.die("killed from outside")
        at_work.batcher.wake()
        while at_work.shards.renewals == 100:
            await asyncio.sleep(0)
        assert tokens_alone(request_of(4, 2)) == await token_ids_of(at_work.batcher.submit(request_of(4, 2)))


async def test_who_has_left_while_there_are_no_shards_fills_no_queue() -> None:
    async with running(at_risk(), max_queue_tokens=100) as at_work:
        may_go_on, renew = asyncio.Event(), at_work.shards.renew

        async def late(error: Any) -> Any:
            await may_go_on.wait()
            return await renew(error)

        at_work.shards.renew = late
        at_work.shards.die("killed from outside")
        at_work.batcher.wake()
        while at_work.batcher.outage is None:
            await asyncio.sleep(0)
        for _ in range(3):
            at_work.batcher.check_room([request_of(4, 80)], "", 1.0)
            gone = at_work.batcher.submit(request_of(4, 80))
            gone.cancelled = True
        with pytest.raises(Overloaded, match="max_queue_tokens"):
            waits = at_work.batcher.submit(request_of(4, 80))
            at_work.batcher.check_room([request_of(4, 80)], "", 1.0)
        may_go_on.set()
        assert tokens_alone(request_of(4, 80)) == await token_ids_of(waits)


async def test_what_an_encoder_read_is_read_again_and_its_tokens_rebuilt() -> None:
    shards = at_risk(decoder_start=START, deaths={9})
    async with running(shards, num_blocks=shards.num_blocks) as at_work:
        request = request_of(3, 30).read_by_encoder(START)
        assert tokens_alone(request) == await token_ids_of(at_work.batcher.submit(request))
    [again] = [new for step in shards.requests for new in step.add][1:]
    assert 0 < again.generated == len(again.token_ids) - 1
    assert is_clean(at_work)


@pytest.mark.parametrize("death", [1, 2, 3, 6])
async def test_log_probabilities_of_a_prompt_come_once_and_whole(death: int) -> None:
    shards = fake_shards(make_limits(max_batch_prefill_tokens=8), renewals=1, deaths={death})
    async with running(shards, max_batch_prefill_tokens=8) as at_work:
        entry = at_work.batcher.submit(request_of(20, 10, prompt_logprobs=True))
        first, *rest = await events_of(entry)
    assert isinstance(first, PromptTokens)
    assert [None] + [-1.0] * 19 == [token.logprob for token in first.tokens]
    assert [Token] * 10 + [Finished] == [type(event) for event in rest]


async def test_those_that_ran_come_before_those_that_waited() -> None:
    shards = fake_shards(make_limits(max_batch_size=2), renewals=1, deaths={5})
    async with running(shards, max_batch_size=2) as at_work:
        entries = [at_work.batcher.submit(request_of(4 + n, 20)) for n in range(4)]
        await asyncio.gather(*map(token_ids_of, entries))
    prompts = [len(new.token_ids) for step in shards.requests for new in step.add]
    assert [4, 5] == prompts[:2]
    assert [True, True] == [new.generated > 0 for s in shards.requests for new in s.add][2:4]
    assert [6, 7] == prompts[4:]


async def test_shards_with_less_memory_go_on_with_a_smaller_cache() -> None:
    shards = at_risk(deaths={6}, renewed_tokens=128)  # which the shards insist on; 8 requests want 8 * 48
    async with running(shards) as at_work:
        requests = [request_of(18, 30, seed) for seed in range(8)]
        entries = [at_work.batcher.submit(request) for request in requests]
        got = await asyncio.gather(*map(token_ids_of, entries))
        assert [tokens_alone(request) for request in requests] == got
        assert (128, 8, 8) == (
            at_work.batcher.limits.max_batch_total_tokens,
            at_work.batcher.limits.num_blocks,
            at_work.batcher.num_free_blocks,
        )
    assert not shards.live_ids


async def beside_a_killer(at_work: Running, killer: int) -> tuple[list[Any], list[list[int]]]:
    """The killer's events, and the tokens of five others that run beside it."""
    others = [at_work.batcher.submit(request_of(4 + n, 30)) for n in range(5)]
    await asyncio.gather(*(other.events.get() for other in others))
    doomed = at_work.batcher.submit(request_of([1, killer], 30))
    events = await events_of(doomed)
    return events, [[*other.generated_ids] if other.is_over else await token_ids_of(other) for other in others]


@pytest.mark.parametrize("fault", ["fatal_token", "failing_token"])
async def test_what_kills_again_and_again_fails_alone(fault: str) -> None:
    shards = at_risk(**{fault: 200})
    async with running(shards) as at_work:
        events, _ = await beside_a_killer(at_work, 200)
        assert [Failed] == [type(event) for event in events]
        assert isinstance(events[0].error, GenerationError)
        for entry in [*at_work.batcher._live.values()]:
            await token_ids_of(entry)
            assert tokens_alone(entry.request) == entry.generated_ids
    last = [step for step in shards.requests if any(200 in new.token_ids for new in step.add)][-1]
    assert (1, False) == (len(last.add), last.decode)  # it ran alone
    assert is_clean(at_work)


async def test_three_deaths_before_its_first_token_do_not_condemn_a_request() -> None:
    async with running(at_risk(deaths={1, 2, 3})) as at_work:
        requests = [request_of(20, 10, seed) for seed in range(3)]
        entries = [at_work.batcher.submit(request) for request in requests]
        assert [tokens_alone(request) for request in requests] == [await token_ids_of(entry) for entry in entries]


@pytest.mark.parametrize(
    "columns",
    [
        {"ids": [1, 2, 3, 4]},
        {"ids": [99]},
        {"ids": [], "token_ids": [], "logprobs": [], "top_counts": []},
        {"token_ids": [257]},
        {"top_ids": [1, 2, 3]},
        {"logprobs": [0.0] * 7},
        {"proposal_counts": [1]},
    ],
    ids=str,
)
def test_nonsense_is_the_end_of_its_shards_and_reaches_nobody(columns: dict[str, list[int]]) -> None:
    async def story() -> None:
        shards = at_risk()
        async with running(shards) as at_work:
            entry = at_work.batcher.submit(request_of(4, 20))
            await entry.events.get()
            honest = shards.receive

            async def lie() -> Any:
                reply = await honest()
                for column, values in columns.items():
                    del getattr(reply, column)[:]
                    getattr(reply, column).extend(values)
                shards.receive = honest
                return reply

            shards.receive = lie
            await events_of(entry)
            assert tokens_alone(entry.request) == entry.generated_ids
        assert 99 == shards.renewals

    asyncio.run(story())


async def test_a_cancelled_request_is_not_rebuilt() -> None:
    async with running(at_risk(deaths={5})) as at_work:
        entry, other = (at_work.batcher.submit(request_of(4, 40)) for _ in range(2))
        await entry.events.get()
        entry.cancelled = True
        await token_ids_of(other)
    assert 3 >= sum(len(step.add) for step in at_work.shards.requests)
    assert is_clean(at_work)


async def lost_and_draining(at_work: Running) -> asyncio.Task[None]:
    """Its shards are gone, and others do not come; the server stops."""

    async def never(error: Any) -> Any:
        await asyncio.Event().wait()

    at_work.shards.renew = never
    at_work.shards.die("killed from outside")
    at_work.batcher.wake()
    while at_work.batcher.outage is None:
        await asyncio.sleep(0)
    return asyncio.create_task(at_work.batcher.drain(3600))


async def test_a_server_that_stops_waits_for_no_shards_that_nobody_waits_for() -> None:
    async with running(at_risk()) as at_work, asyncio.timeout(60):
        await (await lost_and_draining(at_work))


@pytest.mark.parametrize("how", ["cancelled", "late"])
async def test_a_server_that_stops_waits_for_shards_until_the_last_request_has_gone(how: str) -> None:
    async with running(at_risk()) as at_work, asyncio.timeout(60):
        entry = at_work.batcher.submit(request_of(4, 1000))
        await entry.events.get()
        draining = await lost_and_draining(at_work)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not draining.done()
        at_work.batcher.cancel(entry) if how == "cancelled" else at_work.batcher.end(entry, Unavailable("late"))
        await draining
