"""Tokens that a model proposes: asked for where that pays, never in the way of anything else."""

from __future__ import annotations

import asyncio
import math
import random
import zlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from router.drafting.speculation import Asking, Candidate, Speculation
from tests.router.batching.test_batcher import is_clean
from tests.router.batching.test_drafts import ARRANGEMENTS, REQUESTS, TROUBLE
from tests.router.batching.test_kv_demand import expects_little
from tests.router.doubles import (
    FakeMatching,
    Running,
    fake_shards,
    make_limits,
    request_of,
    running,
    token_ids_of,
    tokens_alone,
)
from tests.router.fake_shards import fake_next_token

Proposer = Callable[[Sequence[int], int, int], tuple[Sequence[int], Sequence[float]]]
MOST = 4


def right_with(chance: float) -> Proposer:
    """A model that proposes what comes with this chance each, and is as sure of it."""

    def propose(token_ids: Sequence[int], seed: int, most: int) -> tuple[Sequence[int], Sequence[float]]:
        known, found = list(token_ids), []
        drawn = random.Random(zlib.crc32(array("I", known).tobytes()))
        for _ in range(most):
            coming = fake_next_token(known, seed, 256)
            found.append(coming if drawn.random() < chance else (coming + 1) % 256)
            known.append(coming)
        return found, [math.log(max(chance, 0.01))] * most

    return propose


class Often(Speculation):
    """Asks for as much as chance has it."""

    def __init__(self, seed: int) -> None:
        super().__init__(MOST, most_proposals=MOST)
        self._chance = random.Random(seed)

    def ask(self, candidates: Sequence[Candidate]) -> Asking:
        places = [place for place, one in enumerate(candidates) if one.most > 0 and self._chance.random() < 0.7]
        return Asking(self._chance.randint(1, MOST), places) if places else Asking()

    def choose(self, candidates: Sequence[Candidate], *args: Any) -> list[tuple[int, ...]]:
        most = [0 if one.is_under_way else self._chance.randint(0, max(0, one.most)) for one in candidates]
        return [one.drafting.guess(num).token_ids if num else () for one, num in zip(candidates, most, strict=True)]


@pytest.mark.parametrize("trouble", TROUBLE.values(), ids=TROUBLE)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("limits", ARRANGEMENTS, ids=str)
async def test_everyone_gets_the_tokens_that_they_get_alone(
    limits: dict[str, Any], seed: int, trouble: dict[str, Any]
) -> None:
    limits = limits | {"speculate": MOST, "proposals": MOST}
    shards = fake_shards(make_limits(**limits), propose=right_with(0.7), **trouble)
    async with running(shards, FakeMatching((3,)), **limits) as at_work:
        at_work.batcher._scheduler.speculation = Often(seed)
        if at_work.batcher._scheduler.forecast is not None:
            expects_little(at_work.batcher)
        entries = [at_work.batcher.submit(request, owner="ab"[n % 2]) for n, request in enumerate(REQUESTS)]
        for gone in entries[::5]:
            gone.cancelled = True
        staying = [entry for entry in entries if not entry.cancelled]
        got = await asyncio.wait_for(asyncio.gather(*map(token_ids_of, staying)), 30)
    assert [tokens_alone(entry.request) for entry in staying] == got
    assert sum(len(draft.token_ids) - 1 for request in shards.requests for draft in request.drafts) > 20
    assert is_clean(at_work)


async def steps_with(chance: float, at_once: int = 4, **fields: Any) -> tuple[Running, float]:
    """Requests whose tokens a model proposes that is right so often: what happened, and the seconds of the shards."""
    limits: dict[str, Any] = {"speculate": MOST, "proposals": MOST, "speculative_method": "draft"}
    shards = fake_shards(make_limits(**limits), propose=right_with(chance), step_delay_s=0.004, propose_delay_s=0.0004)
    async with running(shards, **limits) as at_work:
        requests = [request_of(30, 90, seed, **fields) for seed in range(1, at_once + 1)]
        entries = [at_work.batcher.submit(request) for request in requests]
        got = await asyncio.gather(*map(token_ids_of, entries))
    assert [tokens_alone(request) for request in requests] == got
    asked = [request.proposals for request in shards.requests if request.proposals]
    return at_work, 0.004 * len(shards.requests) + sum(0.0004 * (1 + most) for most in asked)


async def test_a_good_model_brings_several_tokens_a_step() -> None:
    at_work, seconds = await steps_with(0.9)
    assert seconds < 0.6 * 0.004 * 90
    assert MOST in {request.proposals for request in at_work.shards.requests}


async def test_a_model_that_is_never_right_is_asked_a_few_times() -> None:
    at_work, seconds = await steps_with(0.0)
    asked = [request.step for request in at_work.shards.requests if request.proposals]
    assert asked and seconds < 1.05 * 0.004 * 92


@pytest.mark.parametrize("most", [0, 1])
async def test_a_request_may_want_fewer(most: int) -> None:
    at_work, _ = await steps_with(0.9, speculate=most)
    sizes = [len(draft.token_ids) - 1 for request in at_work.shards.requests for draft in request.drafts]
    assert most == max(sizes, default=0)
    assert bool(most) == any(request.proposals for request in at_work.shards.requests)
