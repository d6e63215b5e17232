"""All features of the batching loop at once, drawn at random: everyone gets the tokens that they would get alone.

Faults were mostly in pairs of features that had been tested one by one. A seed draws limits, lanes, caches, guesses,
grammars, adapters and keys, and what happens: deaths, steps that fail, clients that leave, deadlines, odd clocks.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from router.errors import DeadlinePassed
from router.scheduling.request import Entry, Failed, Finished, Token, ValidRequest
from tests.router.batching.test_batcher import is_clean
from tests.router.batching.test_kv_demand import expects_little
from tests.router.batching.test_proposals import Often, clock_of, right_with
from tests.router.doubles import (
    EOS,
    FakeMatching,
    NextToken,
    Running,
    adapter_of,
    constrained,
    events_of,
    fake_shards,
    make_limits,
    request_of,
    running,
    tokens_alone,
    with_states,
)
from tests.router.fake_shards import FakeShardedClient, fake_next_token

LONGEST = 128  # tokens of a sequence
BAD = 3  # the number of an adapter that cannot be read


def again(token_ids: Sequence[int], seed: int, vocab_size: int) -> int:
    """A text that repeats itself, as drafters find it."""
    return token_ids[-7] if len(token_ids) > 6 else fake_next_token(token_ids, seed, vocab_size)


@dataclass(frozen=True)
class Drawn:
    """What a seed stands for."""

    limits: dict[str, Any]
    shards: FakeShardedClient
    next_token: NextToken
    clock: str
    keys: Sequence[str]


def draw(chance: random.Random) -> Drawn:
    """A server."""
    block_size = chance.choice((4, 16))
    limits: dict[str, Any] = {
        "block_size": block_size,
        "num_lanes": chance.choice((1, 1, 2, 3)),
        "prefix_caching": chance.random() < 0.6,
        "waiting_served_ratio": chance.choice((0.0, 0.3, 1.2)),
        "prefill_chunk": chance.choice((None, 3, "auto")),
        "max_batch_prefill_tokens": chance.choice((16, 64)),
        "max_batch_total_tokens": chance.choice((128, 160, 256, 512)),
        "kv_admission": chance.choice(("demand", "reserve")),
        "max_batch_size": chance.choice((None, None, 2, 4)),
        "max_inter_token_ms": chance.choice((None, None, 5)),
    }
    if chance.random() < 0.3:
        window = (chance.randint(1, 3), chance.randint(1, 20)) if chance.random() < 0.5 else (0, 0)
        limits |= with_states((chance.randint(1, 3), chance.randint(1, 3), *window), block_size)
    if speculate := min(block_size, chance.choice((0, 4, 6, 16))):
        limits |= {"speculate": speculate, "proposals": chance.choice((0, 4)), "token_seconds": 1e-5}
    if chance.random() < 0.4:
        limits |= {"adapter_rows": chance.choice((1, 2)), "adapter_bytes": chance.choice((2, 100))}
    next_token = chance.choice((again, fake_next_token))
    deaths = {chance.randint(1, 200) for _ in range(chance.choice((0, 0, 2)))}
    shards = fake_shards(
        make_limits(**limits),
        deaths=deaths,
        renewals=len(deaths),
        failing_steps={chance.randint(1, 150): "it failed" for _ in range(chance.choice((0, 0, 2)))},
        next_token=next_token,
        propose=right_with(0.7, next_token),
        step_delay_s=chance.choice((0.0, 0.0, 1e-4)),
        adapter_delays_s={f"/{number}": chance.choice((0.0, 0.003)) for number in range(5)},
        adapter_problems={f"/{BAD}": "bad"},
        keep_requests=False,
    )
    clock = chance.choice(("real", "still", "coarse", "leaps"))
    return Drawn(limits, shards, next_token, clock, chance.choice(([""], ["a", "b"], ["a", "b", "c"])))


def draw_request(chance: random.Random, drawn: Drawn, prefix: Sequence[int]) -> ValidRequest:
    """One of any kind; its beginning may be that of others."""
    tokens = [*prefix[: chance.randint(0, len(prefix))], *(chance.randrange(256) for _ in range(60))]
    tokens = tokens[: chance.randint(1, 60)]
    if chance.random() < 0.2:
        tokens = (tokens[:3] * 30)[: len(tokens)]
    length = chance.randint(1, LONGEST - len(tokens)) if chance.random() < 0.5 else chance.randint(1, 12)
    request = request_of(tokens, length, chance.choice((0, 1, 7)), priority=chance.choice((0, 0, 0, -1, 2)))
    if chance.random() < 0.25:
        request = constrained(request)
    elif chance.random() < 0.2:
        request = replace(request, prompt_logprobs=True)
    if drawn.limits.get("adapter_rows") and chance.random() < 0.5:
        request = replace(request, adapter=adapter_of(chance.randrange(5)))
    if "speculate" in drawn.limits and chance.random() < 0.3:
        request = replace(request, speculate=chance.randint(0, 3))
    return request


def submit(at_work: Running, drawn: Drawn, request: ValidRequest, chance: random.Random) -> Entry:
    """Of any key; another server may have generated a part of it, its client may leave, or its time be over."""
    known = []
    if request.grammar is None and not request.prompt_logprobs and chance.random() < 0.1:
        alone = tokens_alone(request, next_token=drawn.next_token)
        known = [(token_id, -0.5, []) for token_id in alone[: chance.randint(1, len(alone))]]
    key, weight = chance.choice(drawn.keys), chance.choice((1.0, 1.0, 0.1, 5.0))
    entry = at_work.batcher.submit(request, owner=key, weight=weight, known=known)
    loop, what = asyncio.get_running_loop(), chance.random()
    if what < 0.15:
        loop.call_later(0.05 * chance.random(), leave, entry)
    elif what < 0.3:
        loop.call_later(0.05 * chance.random(), at_work.batcher.end, entry, DeadlinePassed(1.0))
    return entry


def leave(entry: Entry) -> None:
    entry.cancelled = not entry.is_over


async def check(entry: Entry, next_token: NextToken) -> None:
    """What came is what comes alone, and all of it or a sentence; nothing more comes for a client that has gone."""
    reading = asyncio.ensure_future(events_of(entry))
    while not (await asyncio.wait({reading}, timeout=0.05))[0]:
        if entry.cancelled:
            reading.cancel()
            return
    *events, last = reading.result()
    got, alone = [e.id for e in events if isinstance(e, Token)], tokens_alone(entry.request, next_token=next_token)
    assert alone[: len(got)] == got
    if isinstance(last, Finished):
        assert alone == got or EOS in got
    else:
        assert isinstance(last, Failed)
        is_bad = entry.request.adapter == adapter_of(BAD) and "bad" in str(last.error)
        has_failed = "it failed" in str(last.error)  # again and again
        assert is_bad or has_failed or isinstance(last.error, DeadlinePassed), last.error


@pytest.mark.parametrize(
    "seeds",
    [range(40), *(pytest.param(range(n, n + 100), marks=pytest.mark.rest) for n in (100, 200))],
    ids=str,
)
def test_everyone_gets_the_tokens_that_they_get_alone(seeds: range) -> None:
    async def story(seed: int) -> None:
        chance = random.Random(seed)
        drawn = draw(chance)
        clock = {} if drawn.clock == "real" else {"clock": clock_of(drawn.clock)}
        matching = FakeMatching([chance.randint(0, 6) for _ in range(3)])
        prefix = [chance.randrange(256) for _ in range(40)]
        async with running(drawn.shards, matching, **clock, **drawn.limits) as at_work:
            scheduler = at_work.batcher._scheduler
            if "speculate" in drawn.limits and chance.random() < 0.5:
                scheduler.speculation = Often(seed, drawn.limits["speculate"], drawn.limits["proposals"])
            if scheduler.forecast is not None and chance.random() < 0.7:
                expects_little(at_work.batcher, chance.choice(drawn.keys))
            entries = []
            for _ in range(chance.randint(6, 30)):
                entries.append(submit(at_work, drawn, draw_request(chance, drawn, prefix), chance))
                for _ in range(chance.choice((0, 0, 0, 1, 5, 20))):
                    await asyncio.sleep(0)
            async with asyncio.timeout(30):
                await asyncio.gather(*(check(entry, drawn.next_token) for entry in entries))
        assert is_clean(at_work)
        assert not (scheduler.running or scheduler.waiting or scheduler.reserved_tokens or at_work.batcher._live)

    for seed in seeds:
        try:
            asyncio.run(story(seed))
        except BaseException as error:
            error.add_note(f"of seed {seed}")
            raise
