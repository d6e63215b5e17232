"""`lockstep-bench latency`: how long one prefill step and one decode step take, by batch size, straight at the shards.

The counterpart of TGI's `text-generation-benchmark`, with its options, formulas and tables, and a fourth table that it
lacks: the least time that the device could need. No router, no HTTP, no text. Unlike TGI's tool it counts prompt tokens
in the prefill's throughput, sorts samples before it takes percentiles, and needs no terminal. Figures are arithmetic on
finished runs, tested with plain numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmark import launch, options
from benchmark.cost import shapes
from benchmark.cost.devices import Gauge, describe
from benchmark.cost.roofline import BytesAndFlops, Ceilings, ServedModel
from benchmark.engine import shards
from benchmark.engine.generation import PeerTimes, TransformersPeer, detokenising, peer_rows, peer_table
from benchmark.engine.shards import (
    STEPS,
    THROUGHPUT_STEPS,
    Detokenise,
    StepDriver,
    Times,
    random_prompts,
    throughputs_of,
)
from benchmark.report import pictures
from benchmark.report.publishing import published
from benchmark.result import (
    BenchError,
    Result,
    RunContext,
    SampleSummary,
    above_limit_notes,
    arguments_of,
    footer,
    percentile_notes,
    prepare_output,
    table,
)
from benchmark.terminal import Progress, Stage, shown
from router.scheduling.queue import blocks_for
from router.scheduling.request import Sampling
from router.shards.client import ModelInfo

PROMPT_TOKENS_A_STEP = 100  # that take about as long as a step of decoding
BATCH_SIZES = (1, 2, 4, 8, 16, 32)


# --------------------------------------------------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    shards.add_target_arguments(parser)
    parser.add_argument(
        "-b", "--batch-size", type=options.positive, nargs="+", action="extend", metavar="N",
        help="sequences in a batch; several sizes, or the option again (default: 1 2 4 8 16 32)",
    )  # fmt: skip
    parser.add_argument("-s", "--sequence-length", type=options.positive, default=100, help="prompt tokens (100)")
    parser.add_argument("-d", "--decode-length", type=options.at_least_two, default=100, help="generated tokens (100)")
    parser.add_argument("-r", "--runs", type=options.positive, default=10, help="recorded runs per batch size (10)")
    parser.add_argument("-w", "--warmups", type=options.not_negative, default=1, help="unrecorded runs before them (1)")
    sampling = parser.add_argument_group("sampling (default: the most likely token)")
    sampling.add_argument("--temperature", type=options.number(above=0))
    sampling.add_argument("--top-k", type=options.positive)
    sampling.add_argument("--top-p", type=options.number(above=0, at_most=1))
    sampling.add_argument("--typical-p", type=options.number(above=0, at_most=1))
    sampling.add_argument("--repetition-penalty", type=options.number(above=0))
    sampling.add_argument("--watermark", action="store_true")
    sampling.add_argument("--do-sample", action="store_true", help="implied by the four options above")
    sampling.add_argument("--top-n-tokens", type=options.positive, help="candidates to report with each token")
    sampling.add_argument(
        "--seed", type=options.not_negative, default=0, help="random seed of prompts and sampling (0)"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for result.md and result.json")
    parser.add_argument(
        "--like-tgi",
        action="store_true",
        help="measure like TGI's tool: one step at a time, detokenised before the next one is sent",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="after the recorded runs, one of each batch size under a profiler: a table of where a step's time goes, "
        "and with --output its traces",
    )
    parser.add_argument(
        "--beside-transformers",
        action="store_true",
        help="after each batch size, run the same prompts with transformers' `generate` in this process, greedily",
    )
    parser.add_argument(
        "--speculate", type=options.positive, nargs="+", action="extend", metavar="N",
        help="after each batch size, steps that check so many guesses for each sequence: how many tokens must they "
        "bring it to be worth their time?",
    )  # fmt: skip
    launch.add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure every batch size and print the tables; 0. Raises BenchError."""
    prepare_output(args.output)
    args.batch_size = options.distinct(args.batch_size or BATCH_SIZES)
    args.speculate = options.distinct(args.speculate or ())
    if args.speculate and (most := args.decode_length - 2) < max(args.speculate):
        raise BenchError(
            f"--speculate {max(args.speculate)} does not fit into --decode-length {args.decode_length}: give {most} at "
            "most"
        )
    with shards.target_for(args, _limits(args)) as target:
        launch.run_interruptible(_measure(args, target))
    return 0


def _draw(result: Result, folder: Path) -> list[pictures.Picture]:
    lengths = "{sequence_length} in, {decode_length} out".format_map(result.context.arguments)
    about = f"{result.context.model} on {result.context.machine}; {lengths}"
    return [pictures.plot_latency(result.rows, folder / "latency.png", about)]


def _limits(args: argparse.Namespace) -> list[str]:
    """Launcher flags of a server on which the largest batch fits into one step and into the KV cache."""
    largest = max(args.batch_size)
    # As many blocks as an encoder-decoder needs, whose prompts have their own.
    blocks = blocks_for(args.sequence_length, shapes.BLOCK_SIZE) + blocks_for(args.decode_length, shapes.BLOCK_SIZE)
    limits = {
        "--max-input-length": args.sequence_length,
        "--max-total-tokens": args.sequence_length + args.decode_length,
        "--max-batch-prefill-tokens": largest * args.sequence_length,
        "--max-batch-total-tokens": largest * blocks * shapes.BLOCK_SIZE,
        "--max-concurrent-requests": largest,
        "--max-top-n-tokens": args.top_n_tokens or 0,
        **({"--speculate": max(args.speculate)} if args.speculate else {}),
    }
    return launch.flags_of(limits)


# ---------------------------------------------------------------------------------------------------------- measurement


async def _measure(args: argparse.Namespace, target: shards.MeasuredShards) -> None:
    """Measure all batch sizes, each kept as it is done. Raises BenchError."""
    async with shards.connect(target) as connected:
        info = connected.info
        detokenise = _detokenising(target) if args.like_tgi else None
        driver = StepDriver(
            connected.shards, info.block_size, info.num_blocks, info.decoder_start, detokenise=detokenise
        )
        _check(args, info, driver)
        floors = shards.floors_of(target, info)
        gauge = floors.gauge
        result = Result(
            _context(args, target, info), notes=_notes(args, floors), extra=launch.startup_of(target.server)
        )
        num_notes = len(result.notes)
        title = f"{target.name}: {args.sequence_length} prompt tokens, {args.decode_length} generated"
        with (
            published(result, lambda result: markdown(result, args, target.name), args.output, _draw) as keep,
            shown(title, _stages(args)) as view,
            shards.causes_of(target),
        ):
            points: list[Point] = []
            peer = _peer(args, target, info)
            for batch_size in args.batch_size:
                point = Point(batch_size, args.sequence_length, args.decode_length, num_shard=info.world_size)
                await _measure_point(args, info, driver, point, view, gauge)
                points.append(point)
                result.rows = rows(points, floors.served)
                if args.speculate:
                    result.extra.setdefault("speculate", []).extend(await _guess_rows(args, info, driver, batch_size))
                if peer is not None:
                    runs = await asyncio.to_thread(_run_peer, args, info, peer, batch_size)
                    result.extra.setdefault("transformers", []).extend(peer_rows(result.rows, batch_size, runs))
                if gauge is not None:
                    result.notes[num_notes:] = [describe(gauge.seen), *above_limit_notes(result.rows)]
                keep()
            if args.profile:
                result.extra["profile"] = [
                    row for n in args.batch_size for row in await _profile_rows(args, connected, driver, n)
                ]


def _stages(args: argparse.Namespace) -> list[Stage]:
    """A stage for each batch size: its steps, prompts counted as the steps of decoding that take about as long."""
    prompt_steps = args.sequence_length / PROMPT_TOKENS_A_STEP
    return [Stage(f"batch size {size}", args.decode_length + size * prompt_steps) for size in args.batch_size]


def _detokenising(target: shards.MeasuredShards) -> Detokenise:
    if target.location is None:
        raise BenchError("--like-tgi needs the model's tokenizer: name it by --model-id or --random-weights")
    return detokenising(target.location)


def _peer(args: argparse.Namespace, target: shards.MeasuredShards, info: ModelInfo) -> TransformersPeer | None:
    if not args.beside_transformers:
        return None
    if target.location is None:
        raise BenchError("--beside-transformers needs the model: name it by --model-id or --random-weights")
    return TransformersPeer(
        target.location,
        random_weights=args.random_weights is not None,
        dtype=info.dtype,
        device=info.device,
        threads=info.threads * info.world_size if info.device == "cpu" else 0,
    )


def _run_peer(args: argparse.Namespace, info: ModelInfo, peer: TransformersPeer, batch_size: int) -> list[PeerTimes]:
    prompts = random_prompts(batch_size, args.sequence_length, info.vocab_size, args.seed)
    runs = [peer.run(prompts, args.decode_length) for _ in range(args.warmups + args.runs)]
    return runs[args.warmups :]


async def _profile_rows(
    args: argparse.Namespace, connected: shards.ConnectedShards, driver: StepDriver, batch_size: int
) -> list[dict[str, Any]]:
    prompts = random_prompts(batch_size, args.sequence_length, connected.info.vocab_size, args.seed)
    sampling = [sampling_of(args, args.seed + index) for index in range(batch_size)]
    profiles = await shards.profile_batch(connected.shards, driver, prompts, sampling, args.decode_length, args.output)
    return [row for one in profiles for row in one.rows()]


async def _guess_rows(
    args: argparse.Namespace, info: ModelInfo, driver: StepDriver, batch_size: int
) -> list[dict[str, Any]]:
    """Of each number of guesses, none first, the median time of a step, and what it is of one without."""
    prompts = random_prompts(batch_size, args.sequence_length, info.vocab_size, args.seed)
    sampling = [sampling_of(args, args.seed + index) for index in range(batch_size)]
    [guesses] = random_prompts(1, max(args.speculate), info.vocab_size, args.seed + 1)
    counts, steps = [0, *args.speculate], dict[int, list[float]]()
    for _ in range(args.runs):
        for count in counts:  # in turn, since a machine's speed changes
            seconds = await driver.check_guesses(prompts, args.decode_length, sampling, guesses[:count])
            steps.setdefault(count, []).append(1000 * median(seconds))
    rows = []
    for count in counts:
        ratios = [its / plain for its, plain in zip(steps[count], steps[0], strict=True)]
        rows.append(
            {"batch_size": batch_size, "guesses": count, "p50_ms": median(steps[count]), "ratio": median(ratios),
             "samples_ms": steps[count]}
        )  # fmt: skip
    return rows


def guess_table(rows: Sequence[dict[str, Any]]) -> str:
    """What checking guesses costs; empty where none was asked for."""
    cells = [[r["guesses"], r["batch_size"], f"{r['p50_ms']:.2f} ms", f"{r['ratio']:.2f}"] for r in rows]
    return table(("Guesses", "Batch Size", "p50 of a step", "Pays from tokens"), cells) if cells else ""


def _check(args: argparse.Namespace, info: ModelInfo, driver: StepDriver) -> None:
    """Refuse what cannot run before anything runs."""
    if args.speculate and not info.takes_drafts:
        raise BenchError("this model takes no guesses: leave --speculate out")
    length = args.sequence_length + args.decode_length
    if 0 < info.max_positions < length:
        raise BenchError(
            f"--sequence-length {args.sequence_length} and --decode-length {args.decode_length} make {length} tokens, "
            f"but the model's longest sequence is {info.max_positions}: shorten one of them"
        )
    for batch_size in args.batch_size:
        driver.check(batch_size, args.sequence_length, args.decode_length)


async def _measure_point(
    args: argparse.Namespace, info: ModelInfo, driver: StepDriver, point: Point, view: Progress, gauge: Gauge | None
) -> None:
    prompts = random_prompts(point.batch_size, args.sequence_length, info.vocab_size, args.seed)
    sampling = [sampling_of(args, args.seed + index) for index in range(point.batch_size)]
    view.begin()
    for _ in range(args.warmups):
        await driver.run(prompts, args.decode_length, sampling, args.top_n_tokens or 0)
    before = None if gauge is None else gauge.measure()
    for _ in range(args.runs):
        times = await driver.run(prompts, args.decode_length, sampling, args.top_n_tokens or 0)
        point.runs.append(times)
        view.advance(1 / args.runs)
        if gauge is not None and before is not None:
            after = gauge.measure()
            point.ceilings.append(before.best_of(after))
            before = after
    view.say(f"batch size {point.batch_size}: {_sentence(point)}")


def _sentence(point: Point) -> str:
    """The medians of the runs of one batch size."""
    prefill = statistics.median(times.prefill for times in point.runs)
    token = statistics.median(times.decode / len(times.intervals) for times in point.runs)
    return (
        f"prefill {1000 * prefill:.2f} ms ({point.batch_size * point.sequence_length / prefill:.0f} tokens/s), "
        f"decode {1000 * token:.2f} ms a token ({point.batch_size / token:.0f} tokens/s)"
    )


def sampling_of(args: argparse.Namespace, seed: int) -> Sampling:
    """How tokens are chosen, with TGI's neutral values for what the user did not give."""
    warpers = (args.temperature, args.top_k, args.top_p, args.typical_p)
    return Sampling(
        do_sample=args.do_sample or any(value is not None for value in warpers),
        temperature=args.temperature or 1.0,
        top_k=args.top_k or 0,
        top_p=args.top_p or 1.0,
        typical_p=args.typical_p or 1.0,
        repetition_penalty=args.repetition_penalty or 1.0,
        watermark=args.watermark,
        seed=seed,
    )


# --------------------------------------------------------------------------------------------------------------- report


def _context(args: argparse.Namespace, target: shards.MeasuredShards, info: ModelInfo) -> RunContext:
    arguments = arguments_of(args)
    names = ["batch_size", "sequence_length", "decode_length", "top_n_tokens", "seed"]
    names += ["like_tgi"] if args.like_tgi else []
    names += ["speculate"] if args.speculate else []
    return RunContext.gather(
        "latency",
        model=target.name,
        device=info.device,
        dtype=info.dtype,
        num_shard=info.world_size,
        threads=info.threads,
        quantize=info.quantize,
        arguments=arguments,
        work={"model": target.name, "sampling": asdict(sampling_of(args, 0))} | {n: arguments[n] for n in names},
    )


def _notes(args: argparse.Namespace, floors: shards.Floors) -> list[str]:
    under_way = "one request under way, whose tokens are made text" if args.like_tgi else "two requests under way"
    notes = [
        f"Prefill: one step over all prompts, from request to reply. Decode: {args.decode_length - 1} steps after it, "
        f"{under_way}, from the first request to the last reply. The prefill's throughput counts prompt tokens. "
        f"{args.runs} runs after {args.warmups} that are not recorded.",
        *percentile_notes(args.runs),
    ]
    if floors.missing:
        return [*notes, f"No floors: {floors.missing}."]
    return [
        *notes,
        "Floor and % of limit = floor / time: medians over the runs, each held against the device's data sheet, or "
        "where there is none against the ceilings that were measured right before and after it.",
    ]


def markdown(result: Result, args: argparse.Namespace, model: str) -> str:
    """The tables of TGI's benchmark, then floors, then what to know about the numbers."""
    parts = [
        arguments_table(args, model),
        f"{latency_table(result.rows)}\n\n\n{throughput_table(result.rows)}",
        floor_table(result.rows),
        guess_table(result.extra.get("speculate", [])),
        peer_table(result.extra.get("transformers", []), STEPS),
        shards.profile_table(result.extra.get("profile", [])),
        footer(result),
    ]
    return "\n\n".join(part for part in parts if part)


def arguments_table(args: argparse.Namespace, model: str) -> str:
    """What was asked for, as the first table of TGI's benchmark."""
    top_n = [("Top N Tokens", args.top_n_tokens)] if args.top_n_tokens else []
    pairs = [
        ("Model", model),
        ("Sequence Length", args.sequence_length),
        ("Decode Length", args.decode_length),
        *top_n,
        ("N Runs", args.runs),
        ("Warmups", args.warmups),
        ("Temperature", args.temperature),
        ("Top K", args.top_k),
        ("Top P", args.top_p),
        ("Typical P", args.typical_p),
        ("Repetition Penalty", args.repetition_penalty),
        ("Watermark", str(args.watermark).lower()),
        ("Do Sample", str(sampling_of(args, 0).do_sample).lower()),
    ]
    return table(("Parameter", "Value"), pairs)


# -------------------------------------------------------------------------------------------------------------- figures


@dataclass
class Point:
    """The runs of one batch size, in milliseconds."""

    batch_size: int
    sequence_length: int
    decode_length: int
    runs: list[Times] = field(default_factory=list)
    ceilings: list[Ceilings] = field(default_factory=list)  # beside each run; empty where no floor is known
    num_shard: int = 1

    @property
    def samples_ms(self) -> dict[str, list[float]]:
        """One value per run for each step of `STEPS`, to a tenth of a microsecond."""
        totals = [round(1000 * times.decode, 4) for times in self.runs]
        return {
            "prefill": [round(1000 * times.prefill, 4) for times in self.runs],
            "decode_token": [round(total / (self.decode_length - 1), 4) for total in totals],
            "decode_total": totals,
        }

    @property
    def computed_ms(self) -> dict[str, list[float]]:
        """For each sample the milliseconds in which, as it says, the first rank computed."""
        totals = [1000 * times.decode_computed for times in self.runs]
        return {
            "prefill": [1000 * times.prefill_computed for times in self.runs],
            "decode_token": [total / (self.decode_length - 1) for total in totals],
            "decode_total": totals,
        }

    def tokens(self, step: str) -> int:
        """Tokens that one sample of the step covers."""
        counts = {"prefill": self.sequence_length, "decode_token": 1, "decode_total": self.decode_length - 1}
        return self.batch_size * counts[step]

    def throughputs(self, step: str) -> list[float]:
        """Tokens per second of the step in each run."""
        return [1000 * self.tokens(step) / sample for sample in self.samples_ms[step]]

    def needed(self, step: str, served: ServedModel) -> BytesAndFlops:
        """What one sample of the step needs at least."""
        if step == "prefill":
            return served.prefill(self.batch_size, self.sequence_length)
        one = served.mean_decode(self.batch_size, self.sequence_length, self.decode_length)
        return one.times(1 if step == "decode_token" else self.decode_length - 1)


def rows(points: Sequence[Point], served: ServedModel | None) -> list[dict[str, Any]]:
    """The rows of the JSON, in the order of the tables."""
    return [_row(point, step, served) for step in STEPS for point in points]


def _row(point: Point, step: str, served: ServedModel | None) -> dict[str, Any]:
    samples = point.samples_ms[step]
    summary = SampleSummary.of(samples)
    floors = [] if served is None else [point.needed(step, served).floor_ms(ceilings) for ceilings in point.ceilings]
    percents = [100 * floor / sample for floor, sample in zip(floors, samples, strict=True)] if floors else []
    return {
        "step": step,
        "num_shard": point.num_shard,
        "batch_size": point.batch_size,
        "mean_ms": summary.mean,
        "min_ms": summary.min,
        "max_ms": summary.max,
        "p50_ms": summary.p50,
        "p90_ms": summary.p90,
        "p99_ms": summary.p99,
        "computed_p50_ms": SampleSummary.of(point.computed_ms[step]).p50,
        "tokens_per_second": SampleSummary.of(point.throughputs(step)).mean,
        "floor_ms": median(floors) if floors else None,
        "percent_of_limit": median(percents) if percents else None,
        "limit": point.ceilings[0].source if point.ceilings else None,  # what the share is a share of
        "ceilings": [asdict(ceilings) for ceilings in point.ceilings],  # beside each sample
        "samples_ms": samples,
        "tokens_per_sample": point.tokens(step),
    }


def latency_table(rows: Sequence[dict[str, Any]]) -> str:
    """Times of each step in milliseconds, as TGI's benchmark prints them."""
    names = ("mean_ms", "min_ms", "max_ms", "p50_ms", "p90_ms", "p99_ms")
    cells = [[STEPS[r["step"]], r["batch_size"], *(f"{r[name]:.2f} ms" for name in names)] for r in rows]
    return table(("Step", "Batch Size", "Average", "Lowest", "Highest", "p50", "p90", "p99"), cells)


def throughput_table(rows: Sequence[dict[str, Any]]) -> str:
    """Tokens per second of prefill and decode, as TGI's benchmark prints them."""
    cells = [[THROUGHPUT_STEPS[r["step"]], r["batch_size"], *_rates(r)] for r in rows if r["step"] in THROUGHPUT_STEPS]
    return table(("Step", "Batch Size", "Average", "Lowest", "Highest"), cells)


def _rates(row: dict[str, Any]) -> list[str]:
    return [f"{rate:.2f} tokens/secs" for rate in throughputs_of(row)]


def floor_table(rows: Sequence[dict[str, Any]]) -> str:
    """The floor of each row and how near it came; empty where no floor is known."""
    known = [row for row in rows if row["floor_ms"] is not None]
    cells = [
        [STEPS[r["step"]], r["batch_size"], f"{r['p50_ms']:.2f} ms", f"{r['floor_ms']:.2f} ms", _percent(r)]
        for r in known
    ]
    if not known:
        return ""
    return table(("Step", "Batch Size", "p50", "Floor", f"% of limit ({known[0]['limit']})"), cells)


def _percent(row: dict[str, Any]) -> str:
    return f"{row['percent_of_limit']:.1f} %"
