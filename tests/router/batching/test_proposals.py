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

from router.batching.batcher import Batcher
from router.drafting.proposals import FEW, ProposeCosts
from router.drafting.speculation import Asking, Candidate, Speculation
from router.scheduling.request import ValidRequest
from router.telemetry.metrics import Metrics
from server.pb.generate_pb2 import StepRequest
from tests.router.batching.test_batcher import is_clean
from tests.router.batching.test_drafts import ARRANGEMENTS, REQUESTS, TROUBLE
from tests.router.batching.test_kv_demand import expects_little
from tests.router.doubles import (
    FakeMatching,
    NextToken,
    byte_tokenizer,
    fake_shards,
    make_limits,
    request_of,
    running,
    token_ids_of,
    tokens_alone,
)
from tests.router.fake_shards import fake_next_token
from tests.router.scheduling.test_fairness import in_virtual_time

Proposer = Callable[[Sequence[int], int, int], tuple[Sequence[int], Sequence[float]]]
MOST = 4


def right_with(chance: float, next_token: NextToken = fake_next_token) -> Proposer:
    """A model that proposes what comes with this chance each, and is as sure of it."""

    def propose(token_ids: Sequence[int], seed: int, most: int) -> tuple[Sequence[int], Sequence[float]]:
        known, found = list(token_ids), []
        drawn = random.Random(zlib.crc32(array("I", known).tobytes()))
        for _ in range(most):
            coming = next_token(known, seed, 256)
            found.append(coming if drawn.random() < chance else (coming + 1) % 256)
            known.append(coming)
        return found, [math.log(max(chance, 0.01))] * most

    return propose


class Often(Speculation):
    """Asks for as much as chance has it."""

    def __init__(self, seed: int, most: int = MOST, most_proposals: int = MOST) -> None:
        super().__init__(most, most_proposals=most_proposals)
        self._chance = random.Random(seed)

    def ask(self, candidates: Sequence[Candidate], *, may_try: bool = True) -> Asking:
        able = [place for place, one in enumerate(candidates) if self.most_proposals and one.most > 0]
        places = [place for place in able if self._chance.random() < 0.7]
        return Asking(self._chance.randint(1, self.most_proposals), places) if places else Asking()

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
    # How many there are depends on when shards die.
    assert any(len(draft.token_ids) > 1 for request in shards.requests for draft in request.drafts)
    assert is_clean(at_work)


def clock_of(kind: str) -> Callable[[], float]:
    """What a machine may show whose cores are busy, that slept, or whose clock is coarse."""
    chance, now = random.Random(kind), 0.0

    def read() -> float:
        nonlocal now
        now += chance.choice({"still": (0.0,), "coarse": (0.0,) * 9 + (0.004,), "leaps": (0.0, 1e-9, 1e-3, 9e4)}[kind])
        return now

    return read


@pytest.mark.parametrize("kind", ["still", "coarse", "leaps"])
@pytest.mark.parametrize(
    "trouble",
    [pytest.param(it, marks=[pytest.mark.rest] if it else [], id=name) for name, it in TROUBLE.items()],
)
@pytest.mark.parametrize("limits", ARRANGEMENTS, ids=str)
async def test_whatever_the_clock_says_everyone_gets_their_tokens(
    limits: dict[str, Any], trouble: dict[str, Any], kind: str
) -> None:
    """What is measured decides what is tried, and nothing else."""
    limits = limits | {"speculate": MOST, "proposals": MOST}
    shards = fake_shards(make_limits(**limits), propose=right_with(0.7), propose_delay_s=1e-5, **trouble)
    async with running(shards, FakeMatching((3,)), clock_of(kind), **limits) as at_work:
        entries = [at_work.batcher.submit(request, owner="ab"[n % 2]) for n, request in enumerate(REQUESTS)]
        got = await asyncio.wait_for(asyncio.gather(*map(token_ids_of, entries)), 30)
    assert [tokens_alone(entry.request) for entry in entries] == got
    assert is_clean(at_work)


STEP_S, ROW_S, PASS_S = 0.01, 0.0001, 0.0008  # of a step, of each row, and of each pass of the model that proposes


def served(
    chance: float,
    requests: Sequence[ValidRequest],
    *,
    pass_s: float = PASS_S,
    interruptions_s: Sequence[float] = (),
    in_turn: bool = False,
    **given: Any,
) -> tuple[list[StepRequest], list[float]]:
    """Requests whose tokens a model proposes that is right so often: the steps, and when each request was complete.

    pass_s: what each of its passes takes; interruptions_s: what its first answers take longer; in_turn: whether each
    request comes once the one before is complete. Time is virtual, and the router takes none.
    """
    limits: dict[str, Any] = {"speculate": MOST, "proposals": MOST, "speculative_method": "draft", **given}
    limits |= {"waiting_served_ratio": 0.0}
    settled = make_limits(max_total_tokens=1024, max_batch_total_tokens=16384, max_batch_prefill_tokens=256, **limits)
    ends = [0.0] * len(requests)
    sent: list[StepRequest] = []

    async def story(clock: Callable[[], float]) -> None:
        shards = fake_shards(
            settled,
            propose=right_with(chance),
            step_delay_s=STEP_S,
            row_delay_s=ROW_S,
            propose_delay_s=pass_s,
            interruptions_s=iter(interruptions_s),
            clock=clock,
        )
        batcher = Batcher(shards, byte_tokenizer(), settled, Metrics(settled), clock=clock)
        batching = asyncio.ensure_future(batcher.run())

        async def ask(number: int, request: ValidRequest) -> None:
            assert tokens_alone(request) == await token_ids_of(batcher.submit(request))
            ends[number] = clock()

        asking = [ask(number, request) for number, request in enumerate(requests)]
        if in_turn:
            for one in asking:
                await one
        await asyncio.gather(*(() if in_turn else asking))
        await batcher.drain(1)
        await batching
        sent.extend(shards.requests)

    in_virtual_time(story)
    return sent, ends


def num_proposals(steps: Sequence[StepRequest]) -> list[int]:
    """How many were asked for in each step that asked for any."""
    return [step.proposals for step in steps if step.proposals]


def plain_seconds(batch: int, tokens: int) -> float:
    """What so many tokens of each take without guesses, prompts aside."""
    return tokens * (STEP_S + batch * ROW_S)


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_a_good_model_brings_several_tokens_a_step(batch: int) -> None:
    steps, ends = served(0.9, [request_of(30, 120, seed) for seed in range(1, batch + 1)])
    assert max(ends) < 0.65 * plain_seconds(batch, 120) + 2 * (STEP_S + batch * 30 * ROW_S)
    assert MOST in num_proposals(steps)


@pytest.mark.parametrize("chance", [0.0, 0.1])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_poor_model_is_asked_a_few_times(batch: int, chance: float) -> None:
    steps, ends = served(chance, [request_of(30, 400, seed) for seed in range(1, batch + 1)])
    prompts = 2 * (STEP_S + batch * 30 * ROW_S)
    assert num_proposals(steps) and max(ends) < 1.02 * plain_seconds(batch, 400) + prompts


@pytest.mark.parametrize("most", [0, 1])
def test_a_request_may_want_fewer(most: int) -> None:
    steps, _ = served(0.9, [request_of(30, 90, seed, speculate=most) for seed in range(1, 5)])
    assert most == max((len(draft.token_ids) - 1 for step in steps for draft in step.drafts), default=0)
    assert bool(most) == bool(num_proposals(steps))


def test_who_wants_no_guesses_hardly_waits_for_those_of_others() -> None:
    requests = [request_of(30, 400, seed) for seed in range(1, 8)] + [request_of(30, 400, 8, speculate=0)]
    _, ends = served(0.9, requests)
    assert ends[-1] < 1.04 * plain_seconds(8, 400) + 2 * (STEP_S + 8 * 30 * ROW_S)


@pytest.mark.parametrize("num_slow", [1, 2])
@pytest.mark.parametrize("slow", [4, 30])
def test_slow_first_answers_say_little(slow: int, num_slow: int) -> None:
    """A machine is busy when a model that is always right, and twelve times as quick, is asked for the first times."""
    requests = [request_of(30, 120, seed) for seed in range(1, 4)]
    slow_s = [slow * STEP_S] * num_slow
    steps, ends = served(1.0, requests, pass_s=STEP_S / 12, interruptions_s=slow_s, in_turn=True)
    assert len(num_proposals(steps[:60])) > 10
    lengths = [end - begun for end, begun in zip(ends, [0.0, *ends], strict=False)]
    assert lengths[0] < 0.7 * plain_seconds(1, 120) + num_slow * slow * STEP_S
    assert max(lengths[1:]) < 0.5 * plain_seconds(1, 120)


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_a_slow_model_is_asked_a_few_times(chance: float) -> None:
    """One that takes twice as long for a token as the served one gains nothing, however good it is."""
    requests = [request_of(30, 400, seed) for seed in range(1, 4)]
    steps, ends = served(chance, requests, pass_s=2 * STEP_S, in_turn=True)
    assert 1 <= len(num_proposals(steps)) <= 6
    assert ends[-1] < 1.02 * 3 * plain_seconds(1, 400) + 6 * (STEP_S + 30 * ROW_S)


def test_what_several_proposals_take_is_no_less_than_what_fewer_do_and_is_learnt_again() -> None:
    costs = ProposeCosts()
    assert math.inf == costs.seconds(1, 2) and not costs.is_sure(1)
    for _ in range(FEW):
        costs.note(1, 2, 9.0)
    assert costs.is_sure(1) and 15.0 == pytest.approx(costs.seconds(1, 4))
    costs.note(1, 4, 0.5)
    assert 0.5 == pytest.approx(costs.seconds(1, 4)) and costs.seconds(1, 2) < 0.5


def test_it_is_not_tried_beside_prompts_what_proposals_are_worth() -> None:
    """Such a step would not say what they took."""
    steps, _ = served(0.0, [request_of(30, 10 + 2 * seed, seed) for seed in range(1, 20)], max_batch_size=4)
    asked = [step for step in steps if step.proposals]
    assert len(asked) > 2 and not any(step.chunk_ids for step in asked)
