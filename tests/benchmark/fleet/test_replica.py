"""Replicas in virtual time: the times of the real batching loop to the microsecond, refusals, and dispatch."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from benchmark.cost.step_times import StepWork
from benchmark.fleet.fleet import Conditions, Fleet, Pool
from benchmark.fleet.prediction import figures
from benchmark.fleet.replica import Tally
from benchmark.fleet.traffic import ClosedLoop, OpenLoop, Request
from benchmark.serving.outcomes import Load
from benchmark.serving.workload import arrival_times
from router.batching.batcher import Batcher
from router.scheduling.balancing import POLICIES
from router.scheduling.limits import Limits
from router.scheduling.request import Finished, Timings, ValidRequest
from router.telemetry.metrics import Metrics
from tests.router.doubles import EOS, byte_tokenizer, events_of, make_limits
from tests.router.fake_shards import FakeShardedClient, StepRequest


class Linear:
    """A cost of parts that do not interact, so that an account of each part that is wrong shows in every time."""

    def seconds(self, work: StepWork) -> float:
        return (
            1.7e-3  # of any step, an empty one too, as fake shards have it
            + 1e-4 * work.prompt_tokens
            + 3e-6 * work.prompt_pairs
            + 2e-6 * work.prompt_read
            + 4e-4 * work.decoding
            + 5e-6 * work.context
            + 7e-5 * work.sampled
        )


def requests(*lengths: tuple[int, int], at: Sequence[float] = (), asked: int = 0) -> list[Request]:
    times = at or [0.0] * len(lengths)
    return [Request(t, n_in, out, max(out, asked)) for t, (n_in, out) in zip(times, lengths, strict=True)]


def simulated(
    wanted: Sequence[Request], limits: Limits, num_replicas: int = 1, dispatch: str = "power-of-two", seed: int = 0
) -> Tally:
    pools = [Pool(limits, Linear(), num_replicas)]
    return Fleet(OpenLoop(iter(wanted)), pools, Conditions(seed=seed), dispatch).run()


def looped(traffic: ClosedLoop, limits: Limits) -> Tally:
    return Fleet(traffic, [Pool(limits, Linear(), 1)], Conditions()).run()


# ---------------------------------------------------------------------------------------- against the real loop


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        self.now = 100.0
        selector = selectors.DefaultSelector()
        select = selector.select

        def jump(timeout: float | None = None) -> Any:
            self.now += timeout or 0.0
            return select(0)

        selector.select = jump  # type: ignore[method-assign]
        super().__init__(selector)

    def time(self) -> float:
        return self.now


class CostedShards(FakeShardedClient):
    """Fake shards whose steps cost what `Linear` says, with an account of their own of what is in a step."""

    def send(self, request: StepRequest) -> None:
        prompts = {s.id: (s.computed, s.prompt_length) for s in self._sequences.values() if s.id not in request.retire}
        prompts |= {new.id: (0, len(new.token_ids)) for new in request.add}
        decoding = [done for done, prompt in prompts.values() if request.decode and done >= prompt]
        chunks = [(*prompts[id], n) for id, n in zip(request.chunk_ids, request.chunk_tokens, strict=True)]
        self.step_delay_s = Linear().seconds(
            StepWork(
                prompt_tokens=sum(n for *_, n in chunks),
                prompt_pairs=sum(n * done + n * n / 2 for done, _, n in chunks),
                prompt_read=sum(done for done, _, _ in chunks),
                decoding=len(decoding),
                context=sum(done + 1 for done in decoding),
                sampled=len(decoding) + sum(done + n == prompt for done, prompt, n in chunks),
            )
        )
        super().send(request)


def batched(wanted: Sequence[Request], limits: Limits) -> list[Timings]:
    """The same through the real loop, in virtual time."""

    async def story() -> list[Timings]:
        loop = asyncio.get_running_loop()
        shards = CostedShards(
            block_size=limits.block_size,
            max_batch_total_tokens=limits.max_batch_total_tokens,
            clock=loop.time,
            next_token=lambda ids, *_: EOS if len(ids) + 1 == ids[0] + ids[1] else 65,
            vocab_size=257,
        )
        batcher = Batcher(shards, byte_tokenizer(), limits, Metrics(limits), clock=loop.time)
        work = asyncio.create_task(batcher.run())

        async def one(request: Request) -> Timings:
            await asyncio.sleep(request.arrives_at)
            # Its first two tokens tell the shards where its end token comes: nowhere if it gets all that it asks for.
            length = request.output_length if request.output_length < request.max_new_tokens else 0
            ids = [request.input_length, length, *[0] * (request.input_length - 2)]
            last = (await events_of(batcher.submit(ValidRequest(ids, request.max_new_tokens))))[-1]
            assert isinstance(last, Finished) and last.generated_tokens == request.output_length
            return last.timings

        timings = await asyncio.gather(*map(one, wanted))
        await batcher.drain(5)
        await work
        return timings

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(story())


@pytest.mark.parametrize(
    ("overrides", "rate"),
    [
        ({}, 20),
        ({}, 80),
        ({"waiting_served_ratio": 0.0, "prefill_chunk": 16}, 60),
        ({"waiting_served_ratio": 0.0, "prefill_chunk": "auto", "max_batch_prefill_tokens": 1024}, 60),
        ({"waiting_served_ratio": 0.0, "prefill_chunk": "auto", "max_inter_token_ms": 40}, 60),
        ({"waiting_served_ratio": 1.5, "max_waiting_tokens": 4}, 60),
        ({"max_batch_total_tokens": 300, "max_batch_prefill_tokens": 24, "kv_admission": "reserve"}, 40),
        ({"max_batch_total_tokens": 300, "max_batch_prefill_tokens": 24, "kv_admission": "demand"}, 40),
        ({"max_batch_total_tokens": 120, "max_batch_prefill_tokens": 24, "kv_admission": "demand"}, 20),
        ({"max_batch_size": 3, "max_waiting_tokens": 0}, 40),
    ],
)
@pytest.mark.parametrize("asked", [0, 40])
def test_every_time_is_that_of_the_real_batching_loop(overrides: dict[str, Any], rate: float, asked: int) -> None:
    limits, random = make_limits(**overrides), Random(f"{overrides} {rate} {asked}")
    at = arrival_times(Load(request_rate=rate), 60, None, random)
    wanted = requests(*((random.randint(2, 60), random.randint(1, 30)) for _ in at), at=at, asked=asked)
    timings = batched(wanted, limits)
    tally = simulated(wanted, limits)
    for found, expected in (
        (tally.queued, [t.admitted - t.queued for t in timings]),
        (tally.ttft, [t.first_token - t.queued for t in timings]),
        (tally.e2e, [t.finished - t.queued for t in timings]),
    ):
        assert sorted(expected) == pytest.approx(sorted(found), abs=1e-6)
    assert sum(request.output_length for request in wanted) == tally.num_tokens


def test_gaps_are_counted_for_every_pair_of_tokens() -> None:
    wanted = requests((5, 1), (9, 4), (20, 7), at=[0, 0.001, 0.004], asked=12)
    tally = simulated(wanted, make_limits())
    assert (1 - 1) + (4 - 1) + (7 - 1) == sum(tally.gap_counts)
    total = sum(gap * count for gap, count in zip(tally.gaps, tally.gap_counts, strict=True))
    first_to_last = sum(e2e - ttft for e2e, ttft in zip(tally.e2e, tally.ttft, strict=True))
    assert first_to_last == pytest.approx(total)


# ---------------------------------------------------------------------------------------------------- the fleet


def test_a_full_server_refuses() -> None:
    limits = make_limits(max_concurrent_requests=2)
    tally = simulated(requests((5, 10), (5, 10), (5, 10), (5, 10), at=[0, 0, 0.001, 9]), limits)
    assert (4, 1, 3) == (tally.num_requests, tally.num_refused, len(tally.e2e))


def test_a_refused_stream_does_not_send_again_in_the_same_instant() -> None:
    """Three streams at a server for two: the third asks anew after each round trip, while the two are served."""
    wanted = requests(*[(10, 40)] * 60)
    traffic = ClosedLoop(iter(wanted), concurrency=3, refusal_s=0.01)
    tally = looped(traffic, make_limits(max_concurrent_requests=2))
    busy_s = tally.last_arrival_at - tally.started_at
    assert 60 == tally.num_requests == tally.num_refused + len(tally.e2e)
    assert 0 < tally.num_refused <= busy_s / 0.01 + 1
    at_once = looped(ClosedLoop(iter(wanted), 3, refusal_s=0), make_limits(max_concurrent_requests=2))
    assert 58 == at_once.num_refused  # which is what is not wanted: nearly all of the work gone in an instant


def test_throughput_while_requests_come_is_without_the_end() -> None:
    """One short request each second, and a long one last, whose answer alone is the end of the run."""
    wanted = requests(*[(10, 5)] * 10, (10, 400), at=list(range(11)))
    tally = simulated(wanted, make_limits())
    assert (0, 10, 10, 50) == (tally.started_at, tally.last_arrival_at, tally.ended_by_then, tally.given_by_then)
    assert 450 == tally.num_given == tally.num_tokens
    row = figures(tally, 1, (None, None))
    assert {"seconds": 10, "requests_per_second": 1.0, "output_tokens_per_second": 5.0} == row["while_arriving"]
    assert row["requests_per_second"] < 1.0
    assert figures(simulated(wanted[:1], make_limits()), 1, (None, None))["while_arriving"] is None


def test_replicas_share_the_load() -> None:
    wanted = requests(*[(30, 20)] * 40)
    one, four = (simulated(wanted, make_limits(), num_replicas=n, dispatch="round-robin") for n in (1, 4))
    assert one.ended_at > 2.5 * four.ended_at
    assert one.num_tokens == four.num_tokens == 800
    alone = simulated(wanted[::4], make_limits())
    assert alone.ended_at == four.ended_at  # each of the four had a quarter


def test_the_better_of_two_avoids_who_is_busy() -> None:
    long_ones_on_one = [(60, 60) if n % 2 else (4, 2) for n in range(60)]
    wanted = requests(*long_ones_on_one, at=[n / 60 for n in range(60)])
    waits = {
        dispatch: sum(simulated(wanted, make_limits(), num_replicas=2, dispatch=dispatch).queued)
        for dispatch in POLICIES
    }
    assert max(waits["power-of-two"], waits["least-tokens"]) < waits["round-robin"]


def test_a_closed_loop_keeps_its_streams_busy() -> None:
    tally = looped(ClosedLoop(iter(requests(*[(10, 5)] * 12)), concurrency=3), make_limits())
    assert (12, 3) == (len(tally.e2e), tally.peak_batch)
    last = Linear().seconds(StepWork())  # which only lets the last sequences go
    assert tally.ended_at - tally.started_at == pytest.approx(tally.busy - last)


def test_what_is_asked_for_is_reserved() -> None:
    limits = make_limits(max_batch_total_tokens=128, kv_admission="reserve")
    peaks = [simulated(requests(*[(16, 16)] * 8, asked=asked), limits).peak_batch for asked in (16, 48)]
    assert [4, 2] == peaks


def test_the_same_seed_is_the_same_fleet() -> None:
    wanted = requests(*[(20, 9)] * 50, at=[n / 90 for n in range(50)])
    first, second = (simulated(wanted, make_limits(), num_replicas=5, seed=3) for _ in range(2))
    assert first == second
