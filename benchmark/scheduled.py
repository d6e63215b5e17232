"""`lockstep-bench offline --schedule …`: the same prompts by several schedules on one server, in one report.

For each schedule and number of batches in a block, one row with FlexGen's headings, and beside it what the cost model
had predicted from rates that were measured before the server began. `--schedule auto` lets the model choose. What is
extrapolated (`--cut-output-length`) is called projected, and nothing else is.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmark import (
    choosing,
    diagonal,
    flexgen,
    interrupts,
    launch,
    plots,
    schedule_report,
    shards,
    streaming,
    timeline,
)
from benchmark.cost import Cost
from benchmark.generating import generate
from benchmark.progress import Progress, Stage, shown
from benchmark.prompts import Prompt, load_tokenizer, read_prompts, synthetic_prompts, warmup_prompt
from benchmark.publishing import published
from benchmark.report import BenchError, Result
from benchmark.roofline import ServedModel
from benchmark.schedules import (
    DIAGONAL,
    Phases,
    Policy,
    StreamedCost,
    largest_gang,
    length_of,
    planned,
    policies,
    predicted,
    step_seconds,
)
from benchmark.shapes import BLOCK_SIZE, ModelShape
from benchmark.streaming import Measured, Streamed
from benchmark.timed_shards import StepRecord, TimedShards
from router.client import ModelInfo, ShardedClient
from router.limits import Limits
from router.text import ModelTokenizer
from server.offload.share import Share

AUTO = "auto"
DEFAULT_BATCHES, DEFAULT_BATCH_SIZE = 4, 4  # FlexGen's default batch, and the first row of its table
PREFILL_TOKENS = 4096  # of a step at most, unless a block's prompts are more


@dataclass(frozen=True)
class Job:
    """What is to be run, decided before the server starts."""

    prompts: Sequence[Prompt]  # as they are wanted
    cut: int | None  # of their generated tokens so many are; None: all
    policies: Sequence[Policy]
    weights_on_device: str | None  # as a launcher's flag
    notes: Sequence[str]
    measured: Measured | None  # None: nothing is predicted
    prefill_tokens: int  # of a step at most
    is_encoded: bool  # an encoder reads the prompts

    @property
    def run_prompts(self) -> list[Prompt]:
        """The prompts as they are run."""
        return [replace(p, max_new_tokens=self.cut or p.max_new_tokens) for p in self.prompts]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(map(length_of, self.prompts))


def check(args: argparse.Namespace) -> None:
    """Refuse options that contradict each other, and weights that nothing can keep. Raises BenchError."""
    for name in ("num_gpu_batches", "gpu_batch_size", "shortest_output_length", "cut_output_length", "offload_memory"):
        if getattr(args, name) is not None and not args.schedule:
            raise BenchError(f"--{name.replace('_', '-')} is for schedules: give --schedule too, or leave it out")
    streaming.share_of(args.weights_on_device, 1.0)  # before anything is measured
    if not args.schedule:
        return
    if AUTO in args.schedule and len(args.schedule) > 1:
        raise BenchError("--schedule auto is one of the others that is chosen: give it alone, or the others")
    if args.max_batch_size or args.max_batch_total_tokens:
        raise BenchError(
            "--max-batch-size and --max-batch-total-tokens follow from --num-gpu-batches × --gpu-batch-size and the "
            "longest prompt where there is a --schedule: leave them out"
        )
    _check_diagonal(args)
    if args.stop_at_eos and args.cut_output_length:
        raise BenchError("--cut-output-length extrapolates, and where sequences end is not known: drop --stop-at-eos")
    if args.shortest_output_length and (args.prompts or args.shortest_output_length > args.output_length):
        raise BenchError(
            f"--shortest-output-length is {args.shortest_output_length}: it is for synthetic prompts, and at most "
            f"--output-length, {args.output_length}"
        )
    if args.offload_memory is not None and AUTO not in args.schedule:
        raise BenchError(
            "--offload-memory is what --schedule auto may fill: leave it out, or let the schedule be chosen"
        )
    if args.offload_memory is not None:
        _check_size(args.offload_memory)


def _check_diagonal(args: argparse.Namespace) -> None:
    """Refuse what contradicts lengths that are known when a sequence enters. Raises BenchError."""
    if DIAGONAL not in args.schedule:
        return
    if args.stop_at_eos:
        raise BenchError(
            "--schedule diagonal divides memory by the lengths of outputs, and with --stop-at-eos these are not known: "
            "drop it, or give --schedule continuous"
        )
    if args.cut_output_length:
        raise BenchError(
            "--cut-output-length extrapolates steps that go on alike, and in the diagonal order shorter outputs have "
            "other ones: drop it, or leave diagonal out"
        )


def _check_size(text: str) -> None:
    """Refuse a size that is none. Raises BenchError."""
    try:
        share = Share.parse(text)
    except ValueError as error:
        raise BenchError(f"--offload-memory is {text}: {error}") from None
    if not share.num_bytes:
        raise BenchError(f"--offload-memory is {text}: give a size such as 6GB")


def run(args: argparse.Namespace) -> int:
    """Run the prompts by each schedule on a server started for it, and print the report; 0. Raises BenchError."""
    with launch.model_for(args) as model:
        tokenizer = load_tokenizer(model.location, with_eos=args.stop_at_eos)
        job = plan(args, read_prompts(args, tokenizer) if args.prompts else drawn(args, tokenizer), model.location)
        for note in job.notes:
            print(note, file=sys.stderr, flush=True)
        args.weights_on_device = job.weights_on_device
        with launch.running_server([*launch.launch_flags(args, model), *_limits(job)]) as server:
            shape = shards.shape_of(model.location)
            target = shards.MeasuredShards(server.sockets, model.name, shape, model.location, server)
            interrupts.run(_measure(args, job, target, server, tokenizer))
    return 0


def drawn(args: argparse.Namespace, tokenizer: ModelTokenizer) -> list[Prompt]:
    """Synthetic prompts, whose outputs are of one length, or of any from the shortest on."""
    prompts = synthetic_prompts(args, tokenizer)
    if args.shortest_output_length is None:
        return prompts
    draw = random.Random(args.seed)
    lengths = range(args.shortest_output_length, args.output_length + 1)
    return [replace(prompt, max_new_tokens=draw.choice(lengths)) for prompt in prompts]


def _limits(job: Job) -> list[str]:
    """Launcher flags under which every policy can run."""
    sequences = max(policy.at_once(job.run_prompts, BLOCK_SIZE) for policy in job.policies)
    prompt = max(len(prompt.token_ids) for prompt in job.prompts)
    return launch.flags_of(
        {
            "--max-input-length": prompt,
            "--max-total-tokens": job.longest,
            "--max-concurrent-requests": sequences,
            "--max-batch-prefill-tokens": job.prefill_tokens,
            "--max-batch-total-tokens": BLOCK_SIZE
            * max(policy.kv_blocks(job.prompts, BLOCK_SIZE, is_encoded=job.is_encoded) for policy in job.policies),
        }
    )


# ------------------------------------------------------------------------------------------------------------- plan


def plan(args: argparse.Namespace, prompts: Sequence[Prompt], location: str) -> Job:
    """What to run with how much of the weights on the device. Raises BenchError where nothing fits."""
    shape = shards.shape_of(location)
    cut = _cut(args, prompts)
    size = args.gpu_batch_size or DEFAULT_BATCH_SIZE
    can_predict = shape is not None and shape.spec.encoder is None
    is_auto = AUTO in args.schedule
    if is_auto and (shape is None or not can_predict):
        raise BenchError("--schedule auto needs a decoder whose shape is known here: name a schedule instead")
    measured = _measured(args, shape) if shape is not None and can_predict else None
    is_encoded = shape is not None and shape.spec.encoder is not None
    if DIAGONAL in args.schedule and is_encoded:
        raise BenchError("--schedule diagonal is for decoders, and this model has an encoder: name another schedule")
    counts = args.num_gpu_batches or ([DEFAULT_BATCHES] if not is_auto else choosing.powers(-(-len(prompts) // size)))
    names = choosing.schedules_for(args) if is_auto else list(dict.fromkeys(args.schedule))
    chosen = policies(names, counts, size)
    most = max(policy.block for policy in chosen)
    if most > len(prompts) and not is_auto:
        raise BenchError(
            f"a block of --num-gpu-batches {max(counts)} × --gpu-batch-size {size} is {most} sequences, and there are "
            f"{len(prompts)} prompts: raise --num-prompts or lower one of the two"
        )
    if not is_auto:
        prefill_tokens = _prefill_tokens(args, prompts, chosen)
        return Job(prompts, cut, chosen, args.weights_on_device, (), measured, prefill_tokens, is_encoded)
    assert shape is not None and measured is not None, "refused above"
    prefill_tokens = args.max_batch_prefill_tokens or PREFILL_TOKENS
    one_step = [policy for policy in chosen if largest_gang(prompts, [policy], BLOCK_SIZE) <= prefill_tokens]
    served = ServedModel(shape, measured.dtype, args.quantize, args.kv_cache_dtype)
    memory = streaming.memory_for(args, served, measured, prefill_tokens)
    found = choosing.best(args, prompts, one_step, served, measured, memory, prefill_tokens)
    why = choosing.why(found, served, measured, memory)
    return Job(prompts, cut, [found.policy], streaming.percent(found.resident), [why], measured, prefill_tokens, False)


def _prefill_tokens(args: argparse.Namespace, prompts: Sequence[Prompt], chosen: Sequence[Policy]) -> int:
    """Prompt tokens of a step, in which a block's prompts are computed together. Raises BenchError."""
    least, given = largest_gang(prompts, chosen, BLOCK_SIZE), args.max_batch_prefill_tokens
    if given is not None and given < least:
        raise BenchError(
            f"--max-batch-prefill-tokens is {given}, and the prompts of a block, which are computed together, have "
            f"{least} tokens: raise it or leave it out, or take smaller blocks"
        )
    return int(given or max(PREFILL_TOKENS, least))


def _measured(args: argparse.Namespace, shape: ModelShape) -> Measured:
    from benchmark.rates import measure  # imports torch, which takes seconds

    print("measuring what predictions need", file=sys.stderr, flush=True)
    return measure(args, shape)


def _cut(args: argparse.Namespace, prompts: Sequence[Prompt]) -> int | None:
    cut = args.cut_output_length
    if cut is None:
        return None
    lengths = {prompt.max_new_tokens for prompt in prompts}
    if len(lengths) > 1 or cut >= min(lengths):
        raise BenchError(
            f"--cut-output-length is {cut}: it extrapolates outputs of one length, and must be less than that, "
            f"{min(lengths)} here"
        )
    return int(cut)


# ----------------------------------------------------------------------------------------------------------- measure


async def _measure(
    args: argparse.Namespace, job: Job, target: shards.MeasuredShards, server: launch.Server, tokenizer: ModelTokenizer
) -> None:
    async with shards.connect(target) as connected:
        info = connected.info
        context = flexgen.context("schedules", args, target, info, job.prompts, cut_output_length=job.cut)
        result = Result(context, notes=[*job.notes, *schedule_report.notes(info, job.measured)])
        result.extra = launch.startup_of(server)
        done: dict[Policy, tuple[dict[str, Any], timeline.Timeline]] = {}

        def draw(_: Result, folder: Path) -> list[plots.Picture]:
            timelines = [done[policy][1] for policy in job.policies if policy in done]
            has_reads = any(one.reads for one in timelines)
            return [timeline.draw(timelines, folder / "timeline.png")] if has_reads else []

        in_order = sorted(job.policies, key=lambda one: _kv_blocks(job, one))  # peaks of memory grow with it
        names = [f"{one.schedule}, {one.num_gpu_batches} × {one.gpu_batch_size} sequences" for one in in_order]
        with (
            published(result, schedule_report.markdown, args.output, draw) as keep,
            shown(f"{target.name}, by schedules", [Stage(name) for name in names]) as view,
            shards.causes_of(target),
        ):
            # What only a first request does, imports above all, is no part of what is measured.
            limits, first = _limits_of(job, in_order[0], info), [warmup_prompt(job.run_prompts)]
            await generate(TimedShards(connected.shards, None), tokenizer, limits, first, info.decoder_start)
            for policy in view.each(in_order):
                row, times = await _run_policy(args, job, policy, connected, server, tokenizer, target, view)
                done[policy] = (row, times)
                result.rows[:] = [done[one][0] for one in job.policies if one in done]
                keep()


async def _run_policy(
    args: argparse.Namespace,
    job: Job,
    policy: Policy,
    connected: shards.ConnectedShards,
    server: launch.Server,
    tokenizer: ModelTokenizer,
    target: shards.MeasuredShards,
    view: Progress,
) -> tuple[dict[str, Any], timeline.Timeline]:
    info, client = connected.info, connected.shards
    assert isinstance(client, ShardedClient)
    prompts, served = job.run_prompts, shards.served_model(target, info)
    limits = _limits_of(job, policy, info)
    tokens = sum(prompt.max_new_tokens for prompt in prompts)
    timed = TimedShards(client, served, came=lambda n: view.advance(n / tokens))
    plan = policy.plan(prompts, info.block_size) if policy.schedule == DIAGONAL else None
    before = Streamed.of(await client.streamed(forget=True))
    forget_peaks(server)
    began = time.perf_counter()
    if plan is None:
        await generate(timed, tokenizer, limits, prompts, info.decoder_start, policy.gang)
    else:
        await diagonal.generate(timed, plan, prompts, info.block_size, info.vocab_size)
    ended = time.perf_counter()
    times = Streamed.of(await client.streamed())
    phases = Phases.of(timed.records, ended - began)
    cost = _cost(job, served, info, before, args)
    foreseen = None if cost is None else predicted(planned(policy, prompts, limits), cost)
    if job.cut is not None:
        whole = job.prompts[0].max_new_tokens
        phases = phases.projected(job.cut, whole)
        foreseen = None if foreseen is None else foreseen.projected(job.cut, whole)
    sizes = schedule_report.sizes(policy, job.prompts, info, served, timed.records, server.shard_pids())
    row = schedule_report.row(policy, phases, foreseen, sizes, is_projected=job.cut is not None)
    row |= _level(plan, timed.records, cost)
    row |= schedule_report.streamed(times, began, ended)
    name = f"{policy.schedule}, n = {policy.num_gpu_batches}"
    ends = [record.answered_at for record in timed.records]
    return row, timeline.Timeline(name, began, ended, ends, times.reads, times.computed)


def _kv_blocks(job: Job, policy: Policy) -> int:
    return policy.kv_blocks(job.run_prompts, BLOCK_SIZE, is_encoded=job.is_encoded)


def _limits_of(job: Job, policy: Policy, info: ModelInfo) -> Limits:
    return policy.limits(
        job.run_prompts,
        block_size=info.block_size,
        vocab_size=info.vocab_size,
        prefill_tokens=job.prefill_tokens,
        is_encoded=info.decoder_start is not None,
    )


def _cost(
    job: Job, served: ServedModel | None, info: ModelInfo, streamed: Streamed, args: argparse.Namespace
) -> StreamedCost | None:
    """The model of what steps cost; None where it knows nothing of such a model, or of where outputs end."""
    if job.measured is None or served is None or args.stop_at_eos:
        return None
    bytes_per_step = float(streamed.pass_bytes * info.world_size)
    return StreamedCost(streaming.cost_of(streaming.sizes_of(served), job.measured.rates, bytes_per_step))


def _level(plan: diagonal.Plan | None, records: Sequence[StepRecord], cost: Cost | None) -> dict[str, Any]:
    """Tokens a second while a diagonal block is whole, as measured and as predicted; null for the other schedules."""
    if plan is None:
        return schedule_report.level(None, None)
    foreseen = None if cost is None else plan.level_rate([cost.seconds(step.work) for step in plan.steps])
    return schedule_report.level(plan.level_rate(step_seconds(records)), foreseen)


def forget_peaks(server: launch.Server) -> None:
    """Have each shard's peak memory begin anew, where the kernel lets us: it is then that of one run."""
    for pid in server.shard_pids():
        with suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")
