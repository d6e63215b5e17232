"""Chunks from made-up step times: what is chosen, how soon, and what noise and changes do to it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.batching.batcher import Batcher
from router.scheduling.chunks import CHUNKS, FINE_CHUNKS, FIRST_CHUNKS, OWN_STEPS, ChunkSize, StepTimes
from router.scheduling.plan import Extension, StepPlan
from router.scheduling.request import Scheduled
from router.scheduling.scheduler import Scheduler
from router.shards.client import StepRequest
from router.telemetry.metrics import Metrics, StepTrace
from tests.router.doubles import byte_tokenizer, make_limits, request_of, token_ids_of
from tests.router.fake_shards import FakeShardedClient

MOST = 4096
ENDLESS = 10**6  # prompt tokens that wait

Cost = Callable[[int, int], float]  # sequences that decode and prompt tokens -> seconds
Work = Sequence[tuple[int, int]]  # of each step: sequences that decode, and prompt tokens that wait


def cost_of(base: float, sequence: float, token: float, both: float = 0.0) -> Cost:
    """Linear costs in milliseconds, `both` of a step with prompts and sequences."""
    return lambda decoding, tokens: (
        (base + sequence * decoding + token * tokens + both * (decoding > 0 < tokens)) / 1000
    )


CPU = cost_of(55, 1.8, 1.2)
GPU = cost_of(8, 0.01, 0.02)
OVERHEAD = cost_of(8, 0.01, 0.02, both=4)


def loaded(steps: int) -> Work:
    """A burst of prompts, then about 31 sequences and every other step a prompt, or more of them than fit."""
    random = Random(7)
    burst = [(0, 100), *((min(1 + 4 * i, 31), ENDLESS) for i in range(8))]
    waiting = (0, 0, 0, 0, 36, 100, 100, ENDLESS)
    return [*burst, *((random.randint(29, 32), random.choice(waiting)) for _ in range(steps))]


def chosen(sizes: ChunkSize, work: Work, cost: Cost, noise: float = 0.0) -> list[int]:
    """The sizes for each step, which then takes what it costs; with noise, now and then a hundredth or ten times it."""
    random, found = Random(11), []
    for decoding, waiting in work:
        most = sizes.tokens(decoding) if decoding else MOST
        found.append(most)
        seconds = cost(decoding, min(waiting, most)) * random.lognormvariate(0, noise)
        strange = random.choice([1] * 48 + [0.01, 10]) if noise else 1
        sizes.note(decoding, min(waiting, most), seconds * strange)
    return found


@pytest.mark.parametrize(("cost", "fitting"), [(CPU, 91), (GPU, 415), (OVERHEAD, 215), (cost_of(1, 0, 0.001), 1000)])
def test_a_step_with_a_chunk_takes_at_most_twice_the_decodes_own(cost: Cost, fitting: int) -> None:
    assert OWN_STEPS * cost(31, 0) == pytest.approx(cost(31, fitting), rel=0.01)
    sizes = set(chosen(ChunkSize(MOST), loaded(400), cost)[-200:])
    assert max(sizes) <= fitting
    assert min(sizes) >= fitting / 2.2


@pytest.mark.parametrize(("seconds", "expected"), [(0.2, {64}), (0.33, {128}), (0.9, {512}), (0.001, {64})])
def test_a_bound_in_seconds_is_kept_where_the_least_chunk_allows_it(seconds: float, expected: set[int]) -> None:
    assert set(chosen(ChunkSize(MOST, seconds), loaded(400), CPU)[-200:]) == expected


@pytest.mark.parametrize("seconds", [0.22, 0.25, 0.26, 0.3, 0.4, 0.5, 0.7])
def test_where_nothing_is_filled_up_nearly_all_of_a_bound_is_used(seconds: float) -> None:
    """With `CHUNKS` 0.25 would mean 64 tokens where 111 fit."""
    found = chosen(ChunkSize(MOST, seconds, FINE_CHUNKS), loaded(400), CPU)[-200:]
    fitting = (1000 * seconds - 55 - 1.8 * 31) / 1.2
    assert set(found) <= set(FINE_CHUNKS)
    assert 0.75 * fitting < sum(found) / len(found) <= fitting


@pytest.mark.parametrize("cost", [CPU, GPU])
def test_noise_hardly_changes_the_size(cost: Cost) -> None:
    still = Counter(chosen(ChunkSize(MOST), loaded(800), cost)[-600:]).most_common(1)[0][0]
    noisy = Counter(chosen(ChunkSize(MOST), loaded(800), cost, noise=0.15)[-600:])
    near = CHUNKS[max(CHUNKS.index(still) - 1, 0) : CHUNKS.index(still) + 2]
    assert sum(noisy[size] for size in near) > 0.9 * 600


def test_before_anything_is_known_chunks_are_as_large_as_they_were_fixed() -> None:
    sizes = ChunkSize(MOST)
    assert chosen(sizes, [(1, ENDLESS)] * len(FIRST_CHUNKS), CPU) == list(FIRST_CHUNKS)
    assert FIRST_CHUNKS[0] == 512


@pytest.mark.parametrize("alone", [16, 300])
@pytest.mark.parametrize("cost", [CPU, GPU])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_after_one_stream_alone_many_others_do_not_wait_for_a_large_chunk(alone: int, cost: Cost, noise: float) -> None:
    """What is known of one sequence says little of fifty, and their price may be taken for the step's."""
    growing = [(decoding, ENDLESS) for decoding in range(1, 33)]
    work = [(0, 20), *[(1, 0)] * alone, *growing, *[(32, 0), (32, ENDLESS)] * 20]
    found = chosen(ChunkSize(MOST), work, cost, noise)
    times_its_own = sorted(
        cost(decoding, size) / cost(decoding, 0)
        for (decoding, wanted), size in zip(work, found, strict=True)
        if decoding and wanted
    )
    assert times_its_own[-2 if noise else -1] <= 2.5  # 64 tokens, the least, take 2.4 times as long


def test_a_bound_on_growth_is_forgotten_where_every_step_has_prompts() -> None:
    work = [(0, 20), *[(1, 0)] * 300, *[(31, ENDLESS)] * 400]
    slower = cost_of(8, 1.0, 0.02)  # 39 ms with 31 sequences, 9 with one
    assert min(chosen(ChunkSize(MOST), work, slower)[-50:]) >= 1024  # 1950 would fit


def test_a_size_is_found_where_every_step_has_prompts() -> None:
    work = [(0, 100), *[(31, ENDLESS)] * 100]
    assert set(chosen(ChunkSize(MOST), work, CPU)[-50:]) == {64}
    assert set(chosen(ChunkSize(MOST), work, GPU)[-50:]) <= {256, 384}


def test_a_machine_that_turns_slow_gets_smaller_chunks_and_larger_ones_again() -> None:
    sizes = ChunkSize(MOST, 0.1)
    slow = cost_of(24, 0.03, 0.2)
    assert set(chosen(sizes, loaded(300), cost_of(8, 0.01, 0.1))[-50:]) == {512}
    assert set(chosen(sizes, loaded(300)[9:], slow)[-50:]) == {256}
    assert set(chosen(sizes, loaded(300)[9:], cost_of(8, 0.01, 0.1))[-50:]) == {512}


def test_sizes_do_not_alternate_where_two_are_as_good() -> None:
    sizes = ChunkSize(MOST, 0.064 + 0.0018 * 31 + 0.0012 * 128)
    random = Random(3)
    work = [(0, 100), *((31, random.choice([0, 0, 100, ENDLESS])) for _ in range(600))]
    found = chosen(sizes, work, lambda d, p: cost_of(64, 1.8, 1.2)(d, p) * random.uniform(0.98, 1.02))[-400:]
    assert sum(a != b for a, b in pairwise(found)) < 20


def test_nothing_is_learnt_from_a_step_without_tokens_or_time() -> None:
    sizes = ChunkSize(MOST)
    for step in ((0, 0, 5.0), (3, 0, 0.0)):
        sizes.note(*step)
    sizes._learn()
    assert sizes._times.seconds(3, 64) == 0


# Any steps, with any times from a microsecond to a minute.
steps = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, MOST), st.floats(1e-6, 60.0)),
    max_size=60,
)


@given(steps, st.integers(1, 20_000), st.none() | st.floats(0.001, 10.0))
def test_a_size_is_never_below_64_nor_above_the_most(
    history: list[tuple[int, int, float]], most: int, seconds: float | None
) -> None:
    sizes = ChunkSize(most, seconds)
    for decoding, tokens, took in history:
        assert min(CHUNKS[0], most) <= sizes.tokens(max(1, decoding)) <= most
        sizes.note(decoding, tokens, took)


@given(steps, st.floats(0.001, 10.0), st.floats(1.0, 100.0))
def test_a_longer_bound_never_gives_a_smaller_chunk(
    history: list[tuple[int, int, float]], seconds: float, times: float
) -> None:
    strict, lenient = ChunkSize(MOST, seconds), ChunkSize(MOST, seconds * times)
    for decoding, tokens, took in history:
        assert strict.tokens(max(1, decoding)) <= lenient.tokens(max(1, decoding))
        strict.note(decoding, tokens, took)
        lenient.note(decoding, tokens, took)


@given(steps)
def test_no_cost_is_negative_or_no_number(history: list[tuple[int, int, float]]) -> None:
    times = StepTimes()
    for decoding, tokens, took in history:
        if decoding or tokens:
            times.note(decoding, tokens, took)
            assert 0 <= times.seconds(decoding, tokens) <= 60 * (1 + decoding + tokens)
            assert times.prompt_tokens(decoding, took) >= 0


# ------------------------------------------------------------------------------------------------ in the batching loop


class CostedShards(FakeShardedClient):
    """Fake shards whose steps take what `CPU` says."""

    def send(self, request: StepRequest) -> None:
        running = [s for s in self._sequences.values() if s.id not in request.retire]
        decoding = sum(s.computed >= s.prompt_length for s in running) if request.decode else 0
        self.step_delay_s = CPU(decoding, sum(request.chunk_tokens))
        super().send(request)


def test_the_batching_loop_learns_from_its_steps() -> None:
    now = 0.0
    traces: list[StepTrace] = []

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += max(seconds, 0.0)
        await asyncio.sleep(0)

    async def story() -> None:
        limits = make_limits(
            max_input_length=2000,
            max_total_tokens=2400,
            max_batch_total_tokens=40_000,
            max_batch_prefill_tokens=MOST,
            waiting_served_ratio=0.0,
            prefill_chunk="auto",
        )
        shards = CostedShards(
            block_size=limits.block_size,
            max_batch_total_tokens=limits.max_batch_total_tokens,
            clock=lambda: now,
            sleep=sleep,
        )
        batcher = Batcher(shards, byte_tokenizer(), limits, Metrics(limits), clock=lambda: now, trace=traces.append)
        work = asyncio.create_task(batcher.run())
        streams = [batcher.submit(request_of(8, 200)) for _ in range(31)]
        for joins_at in (2, 60, 110):
            while len(traces) < joins_at:
                await asyncio.sleep(0)
            streams.append(batcher.submit(request_of(1500, 2)))
        await asyncio.gather(*map(token_ids_of, streams))
        await batcher.drain(5)
        await work

    asyncio.run(story())
    mixed = [trace.prefill_tokens for trace in traces if trace.num_decoding and trace.prefill_tokens]
    assert mixed[0] == FIRST_CHUNKS[0]  # while nothing is known
    assert set(mixed[len(FIRST_CHUNKS) :]) == {64, 1500 % 64}  # 91 would fit


def test_steps_with_guesses_are_learnt_from() -> None:
    """Their rows cost what others cost: else no chunk were small enough for as long as all steps have guesses."""
    scheduler: Scheduler[Scheduled] = Scheduler(
        make_limits(prefill_chunk="auto", max_inter_token_ms=50, max_batch_prefill_tokens=MOST)
    )
    took, seconds = [], cost_of(20, 0.5, 0.2)
    for number in range(2 * len(FIRST_CHUNKS)):
        plan = StepPlan[Scheduled](
            number, drafts={1: Extension(5, [1] * 9, ())}, prefill_tokens=scheduler._prefill_budget(9)
        )
        took.append(seconds(9, plan.prefill_tokens))
        scheduler.timed(plan, took[-1])
    assert max(took[len(FIRST_CHUNKS) :]) <= 0.05 < took[0]
