"""Simulation: cost models found again from what they produced, the same times as the real batching loop to the
microsecond, loads and limits that do what they say, and whole runs of the command."""

from __future__ import annotations

import asyncio
import json
import selectors
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmark import fleet, plan, shapes
from benchmark.__main__ import main
from benchmark.cost import Curve, Fitted, Roofline, StepWork, fit, read_latency
from benchmark.fleet import Tally
from benchmark.prediction import comparison, figures
from benchmark.report import BenchError
from benchmark.roofline import ServedModel, mean_context
from benchmark.traffic import ClosedLoop, OpenLoop, Request, arrival_times, read_trace
from router.batcher import Batcher
from router.client import FakeShardedClient, StepRequest
from router.entry import Finished, Timings, ValidRequest
from router.limits import Limits
from router.metrics import Metrics
from tests.router.doubles import EOS, byte_tokenizer, events_of, make_limits

ROOT = Path(__file__).parents[2]


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


def simulated(wanted: Sequence[Request], limits: Limits, **options: Any) -> Tally:
    return fleet.simulate(OpenLoop(iter(wanted)), limits, Linear(), **options)


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
            # Its first two tokens tell the shards how long it is to become.
            ids = [request.input_length, request.output_length, *[0] * (request.input_length - 2)]
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
        ({"waiting_served_ratio": 1.5, "max_waiting_tokens": 4}, 60),
        ({"max_batch_total_tokens": 300, "max_batch_prefill_tokens": 24}, 40),
        ({"max_batch_size": 3, "max_waiting_tokens": 0}, 40),
    ],
)
@pytest.mark.parametrize("asked", [0, 40])
def test_every_time_is_that_of_the_real_batching_loop(overrides: dict[str, Any], rate: float, asked: int) -> None:
    limits, random = make_limits(**overrides), Random(f"{overrides} {rate} {asked}")
    at = arrival_times(rate, 1, 60, random)
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
        for dispatch in fleet.DISPATCHES
    }
    assert waits["better-of-two"] < waits["round-robin"]


def test_a_closed_loop_keeps_its_streams_busy() -> None:
    tally = fleet.simulate(ClosedLoop(iter(requests(*[(10, 5)] * 12)), concurrency=3), make_limits(), Linear())
    assert (12, 3) == (len(tally.e2e), tally.peak_batch)
    last = Linear().seconds(StepWork())  # which only lets the last sequences go
    assert tally.ended_at - tally.started_at == pytest.approx(tally.busy - last)


def test_what_is_asked_for_is_reserved() -> None:
    limits = make_limits(max_batch_total_tokens=128)
    peaks = [simulated(requests(*[(16, 16)] * 8, asked=asked), limits).peak_batch for asked in (16, 48)]
    assert [4, 2] == peaks


def test_the_same_seed_is_the_same_fleet() -> None:
    wanted = requests(*[(20, 9)] * 50, at=[n / 90 for n in range(50)])
    first, second = (simulated(wanted, make_limits(), num_replicas=5, seed=3) for _ in range(2))
    assert first == second


# ------------------------------------------------------------------------------------------------- cost models


def test_a_data_sheet_costs_what_the_roofline_says() -> None:
    work = ServedModel(shapes.shape("bloomz-7b1-mt"), "float16")
    ceilings = plan.DEVICES["a100-40g"].ceilings("float16", 2)
    cost = Roofline.of(work, ceilings, efficiency=0.5, overhead_s=0.001)
    decode = StepWork(decoding=32, context=32 * 150, sampled=32)
    assert work.decode(32, 150).floor_ms(ceilings) / 500 + 0.001 == pytest.approx(cost.seconds(decode))
    prefill = StepWork(prompt_tokens=3200, prompt_pairs=32 * 100**2 / 2, sampled=32)
    assert work.prefill(32, 100).floor_ms(ceilings) / 500 + 0.001 == pytest.approx(cost.seconds(prefill))
    assert 0 == cost.seconds(StepWork())


def test_a_mixed_step_reads_the_weights_once() -> None:
    work = ServedModel(shapes.shape("bloomz-7b1-mt"), "float16")
    cost = Roofline.of(work, plan.DEVICES["h200"].ceilings("float16", 1), 1.0, 0.0)
    few, decode = StepWork(prompt_tokens=8, prompt_pairs=32), StepWork(decoding=8, context=800, sampled=8)
    mixed = StepWork(prompt_tokens=8, prompt_pairs=32, decoding=8, context=800, sampled=8)
    weights = cost.weight_bytes / cost.bytes_per_second
    assert cost.seconds(few) + cost.seconds(decode) - weights == pytest.approx(cost.seconds(mixed))


def latency_result(sequence_length: int, **overrides: Any) -> dict[str, Any]:
    """What `latency` would have measured of KNOWN, with 101 generated tokens."""
    context = mean_context(sequence_length, 101)
    sizes = (1, 2, 4, 8, 16, 32)
    prefill = [StepWork(size * sequence_length, size * sequence_length**2 / 2) for size in sizes]
    decode = [StepWork(decoding=size, context=int(size * context)) for size in sizes]
    rows = [
        {"step": step, "batch_size": size, "p50_ms": 1000 * KNOWN.seconds(work), "tokens_per_sample": tokens}
        for step, works in (("prefill", prefill), ("decode_token", decode))
        for size, work in zip(sizes, works, strict=True)
        for tokens in [work.prompt_tokens or size]
    ]
    arguments = {"sequence_length": sequence_length, "decode_length": 101}
    about = {"model": "known", "device": "cpu", "dtype": "float32", "num_shard": 1, "quantize": None}
    return {"command": "latency", "rows": rows, "arguments": arguments} | about | overrides


# A curved decode time, a straight prefill time, and prices of what prompts and decoding sequences look at.
KNOWN = Fitted(
    base_ms=20.0,
    prefill_ms=Curve((0, 1000), (20.0, 320.0)),
    pair_ms=0.0004,
    decode_ms=Curve((0, 8, 32), (20.0, 28.0, 44.0)),
    context_ms=0.002,
)


@pytest.mark.parametrize(
    "work",
    [
        StepWork(prompt_tokens=150, prompt_pairs=150**2 / 2),
        StepWork(prompt_tokens=150, prompt_pairs=150**2 / 2 + 150 * 600, prompt_read=600),
        StepWork(decoding=5, context=900),
        StepWork(decoding=32, context=32 * 700),
        StepWork(decoding=40, context=40),
        StepWork(prompt_tokens=64, prompt_pairs=64**2 / 2, decoding=12, context=12 * 200),
    ],
)
def test_a_fit_to_two_contexts_finds_the_model_again(work: StepWork) -> None:
    # The intercept is that of a line through a curve, so that only a mixed step is off, by that much.
    found = fit([latency_result(100), latency_result(400)])
    assert KNOWN.pair_ms == pytest.approx(found.pair_ms, rel=0.01)
    assert KNOWN.context_ms == pytest.approx(found.context_ms, rel=0.01)
    assert KNOWN.base_ms == pytest.approx(found.base_ms, rel=0.1)
    assert KNOWN.seconds(work) == pytest.approx(found.seconds(work), rel=0.02)


def test_a_fit_to_one_context_is_right_there() -> None:
    found = fit([latency_result(100)])
    assert 0 == found.context_ms
    work = StepWork(decoding=8, context=int(8 * mean_context(100, 101)))
    assert KNOWN.seconds(work) == pytest.approx(found.seconds(work), rel=0.001)


def test_a_fit_adds_the_overhead_to_every_step_that_computes() -> None:
    plain, slower = (fit([latency_result(100)], overhead_s) for overhead_s in (0.0, 0.003))
    assert 0.003 == pytest.approx(slower.seconds(StepWork(decoding=3)) - plain.seconds(StepWork(decoding=3)))
    assert 0 == slower.seconds(StepWork())


def test_curves_go_on_beyond_their_points() -> None:
    curve = Curve((0, 2, 4), (1.0, 2.0, 6.0))
    assert [1.0, 1.5, 2.0, 4.0, 6.0, 10.0] == [curve(x) for x in (0, 1, 2, 3, 4, 6)]


def test_one_batch_size_is_not_enough() -> None:
    result = latency_result(100)
    result["rows"] = [row for row in result["rows"] if row["batch_size"] == 1]
    with pytest.raises(BenchError, match="one batch size was measured: measure several"):
        fit([result])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is no result of this benchmark"),
        ("[]", "is no result of this benchmark"),
        (json.dumps({"command": "serving", "rows": []}), "is an incomplete result, or one of `serving`"),
        (json.dumps({"command": "latency", "rows": [{"step": "prefill"}]}), "is an incomplete result"),
    ],
)
def test_what_is_no_latency_result_is_said(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=sentence):
        read_latency(path)


# ---------------------------------------------------------------------------------------------------------- work


def test_bursts_keep_the_rate() -> None:
    times = arrival_times(10, 3.0, 20_000, Random(1))
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert 0.1 == pytest.approx(mean, rel=0.1)
    assert 3.0 == pytest.approx(deviation / mean, rel=0.1)


def test_a_trace_is_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival_s": 2.5, "input_length": 7, "output_length": 3, "max_new_tokens": 9}\n\n'
        '{"arrival_s": 1, "input_length": 5, "output_length": 4}\n'
    )
    assert [Request(1, 5, 4, 4), Request(2.5, 7, 3, 9)] == read_trace(path)


@pytest.mark.parametrize(
    "line",
    [
        "1",
        '{"arrival_s": 1, "input_length": 5}',
        '{"arrival_s": -1, "input_length": 5, "output_length": 4}',
        '{"arrival_s": NaN, "input_length": 5, "output_length": 4}',
        '{"arrival_s": 1, "input_length": 5.5, "output_length": 4}',
        '{"arrival_s": 1, "input_length": 5, "output_length": 4, "max_new_tokens": 3}',
    ],
)
def test_a_wrong_line_of_a_trace_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"arrival_s": 1, "input_length": 5, "output_length": 4}}\n{line}\n')
    with pytest.raises(BenchError, match=r"trace\.jsonl:2: expected"):
        read_trace(path)


# ------------------------------------------------------------------------------------------------------- figures


def test_figures_of_two_requests_worked_out_by_hand() -> None:
    tally = Tally(num_requests=3, num_refused=1, num_tokens=12, num_steps=4, num_step_tokens=24)
    for samples, values in (
        (tally.ttft, (0.1, 0.3)), (tally.tpot, (0.02, 0.05)), (tally.e2e, (0.2, 0.5)), (tally.queued, (0.0, 0.2)),
        (tally.gaps, (0.05, 0.02)),
    ):  # fmt: skip
        samples.extend(values)
    tally.gap_counts.extend((1, 9))
    tally.started_at, tally.ended_at, tally.busy, tally.batch, tally.blocks = 1.0, 3.0, 1.0, 1.5, 16.0
    row = figures(tally, make_limits(), 2, (200.0, 30.0))
    assert (1.0, 6.0, 0.25) == tuple(row[k] for k in ("requests_per_second", "output_tokens_per_second", "busy_share"))
    assert pytest.approx({"share": 1 / 3, "requests_per_second": 0.5}) == {
        name: row["goodput"][name] for name in ("share", "requests_per_second")
    }
    assert pytest.approx({"mean": 23, "p50": 20, "p90": 50, "p99": 50}) == row["inter_token_ms"]
    assert pytest.approx(200) == row["ttft_ms"]["mean"]
    assert (1.5, 0.25, 6.0) == (row["batch_size"]["mean"], row["kv_share"]["mean"], row["tokens_per_step"])


def test_predictions_are_held_against_the_medians() -> None:
    def row(rate: float, ttft: float) -> Mapping[str, Any]:
        none = dict.fromkeys(("output_tokens_per_second", "tpot_ms", "inter_token_ms", "e2e_ms"))
        return {"requests_per_second": rate, "ttft_ms": {"p50": ttft}, **none}

    entries = comparison([row(2.0, 100.0)], [row(2.1, 125.0)])
    assert [("requests_per_second", True), ("ttft_ms", False)] == [(e["figure"], e["is_on_target"]) for e in entries]
    assert [1.05, 1.25] == pytest.approx([entry["ratio"] for entry in entries])


# --------------------------------------------------------------------------------------------------- whole runs

H200 = ("--shape", "bloomz-7b1-mt", "--device", "h200")


def run(capsys: pytest.CaptureFixture[str], *flags: object) -> tuple[list[str], dict[str, Any]]:
    assert 0 == main(["simulate", *map(str, flags)])
    *lines, last = capsys.readouterr().out.splitlines()
    return lines, json.loads(last)


def test_a_sweep_prints_a_row_for_each_value(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines, result = run(
        capsys, *H200, "--request-rate", 30, "--num-requests", 200, "--sweep", "max-batch-size=1,4,16",
        "--sweep", "replicas=1,2", "--ttft-objective", 300, "--tpot-objective", 30, "--output", tmp_path,
    )  # fmt: skip
    settings = [(row["settings"]["max_batch_size"], row["settings"]["replicas"]) for row in result["rows"]]
    assert [(1, 1), (1, 2), (4, 1), (4, 2), (16, 1), (16, 2)] == settings
    goodput = [row["goodput"]["share"] for row in result["rows"]]
    assert goodput[0] < goodput[2] < goodput[4]
    assert [1, 4, 16] == [row["batch_size"]["peak"] for row in result["rows"][::2]]
    (header,) = {line for line in lines if "Goodput (requests/s)" in line}
    assert "| max_batch_size | replicas |" in header
    assert result == json.loads((tmp_path / "result.json").read_text())


def test_limits_are_the_servers(capsys: pytest.CaptureFixture[str]) -> None:
    _, result = run(capsys, *H200, "--num-requests", 20, "--input-length", 1000, "--output-length", 24)
    settings = result["rows"][0]["settings"]
    assert (4096, 0.0, 20, 128) == tuple(
        settings[name]
        for name in (
            "max_batch_prefill_tokens",
            "waiting_served_ratio",
            "max_waiting_tokens",
            "max_concurrent_requests",
        )
    )
    assert 128 * 1024 == settings["max_batch_total_tokens"]  # no load could use more


def test_a_latency_result_predicts_a_serving_result(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    latency, serving = tmp_path / "latency.json", tmp_path / "serving.json"
    latency.write_text(json.dumps(latency_result(100)))
    _, measured = run(
        capsys, "--cost", latency, "--concurrency", 4, "--request-rate", 2, "--num-requests", 40, "--seed", 5
    )
    serving.write_text(json.dumps(measured | {"command": "serving"}))
    lines, result = run(capsys, "--cost", latency, "--compare", serving, "--seed", 5)
    assert {1.0} == {entry["ratio"] for entry in result["comparison"]}
    assert 12 == len(result["comparison"])
    assert any("| yes" in line or " yes " in line for line in lines)


def test_a_comparison_says_what_makes_it_unfair(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    latency, serving = tmp_path / "latency.json", tmp_path / "serving.json"
    latency.write_text(json.dumps(latency_result(100)))
    _, measured = run(capsys, "--cost", latency, "--request-rate", 2, "--num-requests", 10)
    measured["rows"][0] |= {"short": 4, "errors": 1}
    serving.write_text(json.dumps(measured | {"command": "serving", "arguments": {"warmups": 1}}))
    lines, _ = run(capsys, "--cost", latency, "--compare", serving)
    for remark in (
        "- 4 measured answers were short",
        "- 1 measured requests failed",
        "- Warm-ups were measured before",
    ):
        assert any(line.startswith(remark) for line in lines)


def test_a_trace_is_replayed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f'{{"arrival_s": {n}, "input_length": 50, "output_length": 9}}\n' for n in range(4)))
    _, result = run(capsys, *H200, "--trace", trace)
    assert (4, 50, 9) == tuple(result["rows"][0][name] for name in ("requests", "input_length", "output_length"))
    assert 3 < result["rows"][0]["seconds"] < 3.5


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "give either --cost with latency results, or --shape and --device"),
        (("--shape", "bloom-560m"), "--shape needs --device, one of a100-40g"),
        (("--shape", "gpt-17", "--device", "l4"), "no shape is called gpt-17"),
        (("--shape", "flan-t5-xxl", "--device", "h200"), ""),
        (("--shape", "baichuan2-13b", "--device", "l4"), "baichuan2-13b on l4: 27.79 GB of weights"),
        (("--cost", "/nowhere", "--device", "l4"), "--cost says how long steps take: leave out --device"),
        (("--cost", "/nowhere"), "cannot read /nowhere"),
        ((*H200, "--trace", "/nowhere"), "cannot read --trace /nowhere"),
        ((*H200, "--trace", "t", "--concurrency", "1"), "--trace brings its own requests: leave out --concurrency"),
        ((*H200, "--compare", "/nowhere"), "cannot read /nowhere"),
        ((*H200, "--compare", "c", "--sweep", "replicas=1,2"), "--compare is about one server: leave out --sweep"),
        ((*H200, "--max-batch-total-tokens", "50"), "max_total_tokens is 200 but max_batch_total_tokens is 50"),
        ((*H200, "--sweep", "replicas=1", "--sweep", "replicas=2"), "--sweep names a setting twice"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_one_sentence(
    flags: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 1 == main(["simulate", *flags])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {sentence}")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--sweep", "temperature=1,2"), "is not NAME=A,B,… with one of replicas, max_batch_total_tokens"),
        (("--sweep", "replicas"), "is not NAME=A,B,…"),
        (("--sweep", "max-batch-size=4,many"), "4,many is not a list of numbers such as 1,2,4"),
        (("--max-batch-size", "0"), "max_batch_size is 0 but must be at least 1"),
        (("--efficiency", "1.5"), "1.5 is not above 0 and at most 1"),
        (("--request-rate", "-1"), "-1 is not above 0"),
    ],
)
def test_wrong_values_name_the_bound(flags: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["simulate", *H200, *flags])
    assert 2 == end.value.code
    assert sentence in capsys.readouterr().err


def test_a_simulation_needs_no_torch() -> None:
    code = (
        "import sys; from benchmark.__main__ import main;"
        "main(['simulate', '--shape', 'mistral-7b', '--device', 'h100', '--num-requests', '10']);"
        "print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "False" == shown.splitlines()[-1]
