"""Requests with drafts: the same tokens whatever is guessed, beside whatever else happens in a batch."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from router.batching.batcher import Batcher
from router.drafting.drafter import Guess
from router.drafting.speculation import Candidate, Drafting, Speculation
from router.scheduling.request import ValidRequest
from router.telemetry.metrics import Metrics
from tests.router.batching.test_batcher import is_clean
from tests.router.batching.test_kv_demand import expects_little
from tests.router.doubles import (
    FakeMatching,
    byte_tokenizer,
    constrained,
    fake_shards,
    make_limits,
    request_of,
    running,
    standing,
    token_ids_of,
    tokens_alone,
    with_states,
)
from tests.router.scheduling.test_fairness import in_virtual_time

MIX = [request_of(5, 40, 3), request_of(9, 30, 1), request_of(20, 33), request_of(3, 40), request_of(40, 64, 9)]
REQUESTS = [*MIX, *(constrained(request) for request in MIX[:2]), *MIX]
ARRANGEMENTS: list[dict[str, Any]] = [
    {},
    {"prefill_chunk": 3},
    {"prefix_caching": True},
    {"num_lanes": 2},
    {"kv_admission": "demand", "waiting_served_ratio": 0.0, "max_batch_total_tokens": 160},
    {"kv_admission": "demand", "waiting_served_ratio": 0.0, "max_batch_total_tokens": 160, "block_size": 2},
    with_states((2, 2, 0, 0), 16) | {"prefix_caching": True},
    with_states((2, 2, 2, 8), 16) | {"prefix_caching": True},
]


class Oracle:
    """A `Drafter` that knows what comes, and says something else by chance."""

    def __init__(self, request: ValidRequest, chance: random.Random) -> None:
        self._coming = tokens_alone(request)
        self._chance = chance

    def extend(self, token_ids: Sequence[int]) -> None:
        assert list(token_ids) == self._coming[: len(token_ids)]
        del self._coming[: len(token_ids)]

    def guess(self, most: int) -> Guess:
        return Guess(tuple(id if self._chance.random() < 0.7 else (id + 1) % 256 for id in self._coming[:most]), 3)

    def end(self) -> None: ...


class Random(Speculation):
    """As many guesses as chance has it."""

    def __init__(self, requests: Sequence[ValidRequest], seed: int) -> None:
        super().__init__(6)
        self._chance = random.Random(seed)
        self._requests = {id(request.prompt_ids): request for request in requests}
        self.num_guesses = self.num_waits = 0

    def begin(self, token_ids: Sequence[int], *args: Any) -> Drafting:
        return Drafting(Oracle(self._requests[id(token_ids)], self._chance), 6)

    def choose(self, candidates: Sequence[Candidate], *args: Any) -> list[tuple[int, ...]]:
        found = []
        for drafting, most, is_under_way in candidates:
            num = self._chance.randint(0, max(0, most)) if self._chance.random() < 0.7 else 0
            found.append(drafting.guess(num).token_ids if num else ())
            self.num_guesses += 0 if is_under_way else len(found[-1])
            self.num_waits += is_under_way and bool(found[-1])
        return found


TROUBLE: dict[str, dict[str, Any]] = {
    "none": {},
    "deaths": {"deaths": {9, 25, 26, 60}, "renewals": 9},
    "failing steps": {"failing_steps": {7: "it failed", 20: "it failed", 41: "it failed"}},
}


@pytest.mark.parametrize("trouble", TROUBLE.values(), ids=TROUBLE)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("limits", ARRANGEMENTS, ids=str)
async def test_everyone_gets_the_tokens_that_they_get_alone(
    limits: dict[str, Any], seed: int, trouble: dict[str, Any]
) -> None:
    limits = limits | {"speculate": 6}
    requests = [replace(request, token_ids=list(request.token_ids)) for request in REQUESTS]
    async with running(fake_shards(make_limits(**limits), **trouble), FakeMatching((3,)), **limits) as at_work:
        speculation = at_work.batcher._scheduler.speculation = Random(requests, seed)
        if at_work.batcher._scheduler.forecast is not None:
            expects_little(at_work.batcher)
        entries = [at_work.batcher.submit(request, owner="ab"[n % 2]) for n, request in enumerate(requests)]
        for gone in entries[::5]:
            gone.cancelled = True
        staying = [entry for entry in entries if not entry.cancelled]
        got = await asyncio.wait_for(asyncio.gather(*map(token_ids_of, staying)), 30)
    assert [tokens_alone(entry.request) for entry in staying] == got
    assert speculation.num_guesses > 20 and speculation.num_waits
    assert is_clean(at_work)


def test_repetition_is_found_and_comes_in_fewer_steps() -> None:
    """As `--speculate` does it, once guesses have turned out right."""

    def again(token_ids: Sequence[int], seed: int, vocab_size: int) -> int:
        return token_ids[-7]

    steps: dict[int, int] = {}

    async def story(clock: Callable[[], float]) -> None:
        for speculate in (0, 6):
            limits = make_limits(speculate=speculate)
            shards = fake_shards(limits, next_token=again, step_delay_s=0.005, clock=clock)
            batcher = Batcher(shards, byte_tokenizer(), limits, Metrics(limits), clock=clock)
            batching = asyncio.ensure_future(batcher.run())
            request = request_of(40, 60)  # a long prompt: its tokens say what guesses cost at most
            assert tokens_alone(request, next_token=again) == await token_ids_of(batcher.submit(request))
            await batcher.drain(5)
            await batching
            steps[speculate] = len(shards.requests)

    in_virtual_time(story)
    assert steps[6] < steps[0] * 3 / 4


async def test_a_step_whose_sequences_were_lost_tells_no_times() -> None:
    """Of two chunks that are under way the first fails, so that the second is answered at once."""
    limits: dict[str, Any] = {"speculate": 4, "max_batch_prefill_tokens": 16, "token_seconds": 0.001}
    shards = fake_shards(make_limits(**limits), row_delay_s=0.001, failing_steps={3: "it failed"})
    async with running(shards, **limits) as at_work:
        await token_ids_of(at_work.batcher.submit(request_of(64, 4)))
        speculation = at_work.batcher._scheduler.speculation
    assert speculation is not None and 0.001 == pytest.approx(speculation.costs.prompts(1), rel=0.1)


async def test_a_step_takes_what_it_computes_however_late_its_reply_is_read() -> None:
    """By the clock of a process without a core, several replies come at once."""
    limits = make_limits(speculate=6)
    batcher = Batcher(
        fake_shards(limits, step_delay_s=0.004), byte_tokenizer(), limits, Metrics(limits), clock=lambda: 0.0
    )
    batching = asyncio.ensure_future(batcher.run())
    await token_ids_of(batcher.submit(request_of(40, 5)))
    await batcher.drain(5)
    await batching
    speculation = batcher._scheduler.speculation
    assert speculation is not None and pytest.approx(0.004) == speculation.costs.plain(1)


@pytest.mark.parametrize("wanted", [None, 2, 0])
async def test_a_request_may_want_fewer_guesses(wanted: int | None) -> None:
    shards = fake_shards(make_limits(), next_token=lambda *_: 65, step_delay_s=0.01)
    async with running(shards, clock=standing, speculate=6) as at_work:
        await token_ids_of(at_work.batcher.submit(request_of(40, 60, speculate=wanted)))
    guesses = [len(draft.token_ids) - 1 for request in at_work.shards.requests for draft in request.drafts]
    assert max(guesses, default=0) == (6 if wanted is None else wanted)


class Told(Oracle):
    """Takes its time for what the text went on with."""

    seconds = 0.01

    def __init__(self, request: ValidRequest) -> None:
        super().__init__(request, random.Random(1))
        self.left: list[int] = []  # tokens that it did not know at an end

    def extend(self, token_ids: Sequence[int]) -> None:
        time.sleep(self.seconds)
        super().extend(token_ids)

    def end(self) -> None:
        self.left.append(len(self._coming))


class Timed(Random):
    """Has one drafter, and notes what steps with guesses took."""

    def __init__(self, drafter: Told) -> None:
        super().__init__([], 1)
        self._drafter = drafter
        self.times: list[float | None] = []

    def begin(self, token_ids: Sequence[int], *args: Any) -> Drafting:
        return Drafting(self._drafter, 6)

    def stepped(self, plain: Any, verified: Any, others: int, seconds: float | None, *args: Any) -> None:
        self.times += [seconds] * any(one.num_guesses for one in verified)


async def test_a_step_with_guesses_takes_the_time_to_plan_it_and_the_last_one_is_told_too() -> None:
    """Nothing is computed while such a step is planned; and what an answer ended with may come again."""
    request = request_of(5, 30)
    drafter = Told(request)
    async with running(speculate=6) as at_work:
        at_work.batcher._scheduler.speculation = speculation = Timed(drafter)
        assert await token_ids_of(at_work.batcher.submit(request)) == tokens_alone(request)
    assert speculation.times and min(seconds or 0 for seconds in speculation.times) >= drafter.seconds
    assert drafter.left == [0]
