"""`lockstep-bench offline`: a file of prompts, or synthetic ones, through the same engine without HTTP.

The router's own batching loop admits the sequences, under the same rules and limits as in a server, on shards that are
started for this. Sequences join and leave at any step, so that prefill and decode are told apart by step and not by
phase; the report says how. Every latency is measured to the last token.

With `--schedule`, the same prompts run by several schedules on one server: for each, and for each number of batches in
a block, a row, and beside it what the cost model had predicted from rates that were measured before the server began.
`--schedule auto` lets the model choose. What is extrapolated (`--cut-output-length`) is called projected.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmark import launch, options
from benchmark.cost.devices import describe
from benchmark.cost.roofline import Ceilings, ServedModel
from benchmark.cost.shapes import BLOCK_SIZE, DTYPE_BYTES
from benchmark.cost.step_times import Cost
from benchmark.engine import schedules, shards
from benchmark.engine.generation import (
    KINDS,
    Prompt,
    StepRecord,
    TimedShards,
    generate,
    load_tokenizer,
    read_prompts,
    warmup_prompt,
)
from benchmark.engine.jobs import (
    AUTO,
    DEFAULT_BATCH_SIZE,
    DEFAULT_BATCHES,
    PREFILL_TOKENS,
    Job,
    Measured,
    Streamed,
    check_schedules,
    cost_of,
    drawn,
    planned_job,
    schedule_limits,
    sizes_of,
)
from benchmark.engine.schedules import (
    DIAGONAL,
    SCHEDULES,
    Phases,
    Policy,
    StreamedCost,
    planned,
    predicted,
    step_seconds,
)
from benchmark.report.publishing import published
from benchmark.result import (
    GIB,
    Result,
    RunContext,
    above_limit_notes,
    arguments_of,
    footer,
    prepare_output,
    table,
)
from benchmark.serving.outcomes import stretch_rates
from benchmark.terminal import Progress, Stage, shown
from router.scheduling.limits import Limits
from router.shards.client import ModelInfo, ShardedClient
from router.text.tokenizer import ModelTokenizer

SCHEDULES_RESULT = "schedules"  # what a result by schedules is called
# --------------------------------------------------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help='JSON lines, each with "prompt" or "token_ids", and "max_new_tokens" where it differs from the option',
    )  # fmt: skip
    parser.add_argument(
        "--num-prompts", type=options.positive, default=32, metavar="N", help="synthetic prompts (32)",
    )  # fmt: skip
    parser.add_argument("--input-length", type=options.positive, default=100, help="tokens of a synthetic prompt (100)")
    parser.add_argument("--output-length", type=options.positive, default=100, help="generated tokens (100)")
    parser.add_argument("--stop-at-eos", action="store_true", help="end sequences at end tokens")
    parser.add_argument("--max-batch-size", type=options.positive, help="sequences at once (default: what fits)")
    parser.add_argument(
        "--max-batch-prefill-tokens", type=options.positive, metavar="N",
        help=f"prompt tokens in one step ({PREFILL_TOKENS}; with schedules those of a whole block)",
    )  # fmt: skip
    parser.add_argument("--max-batch-total-tokens", type=options.positive, help="size of the KV cache")
    parser.add_argument("--seed", type=options.not_negative, default=0, help="random seed of the synthetic prompts (0)")
    parser.add_argument(
        "--output", type=Path, metavar="DIR",
        help="folder for result.md and result.json",
    )  # fmt: skip
    _add_schedules(parser.add_argument_group("schedules, compared on one server"))
    launch.add_server_arguments(parser)


def _add_schedules(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--schedule", nargs="+", choices=(*SCHEDULES, AUTO), metavar="NAME",
        help="row, zig-zag, diagonal, continuous, or auto: the best by a cost model; results before "
        "2026-11-24 say diagonal for continuous",
    )  # fmt: skip
    group.add_argument(
        "--num-gpu-batches", type=options.positive, nargs="+", metavar="N",
        help=f"batches that advance together as a block ({DEFAULT_BATCHES}; auto tries several); "
        "diagonal: as many as fit into the same KV memory",
    )  # fmt: skip
    group.add_argument(
        "--gpu-batch-size", type=options.positive, metavar="N",
        help=f"sequences of a batch ({DEFAULT_BATCH_SIZE})",
    )  # fmt: skip
    group.add_argument(
        "--shortest-output-length", type=options.positive, metavar="N",
        help="draw output lengths of synthetic prompts between this and --output-length",
    )  # fmt: skip
    group.add_argument(
        "--cut-output-length", type=options.at_least_two, metavar="N",
        help="generate this many tokens and extrapolate the rest, reported as projected",
    )  # fmt: skip
    group.add_argument(
        "--offload-memory", metavar="SIZE",
        help="for layers that stay, slots and KV cache with --schedule auto, such as 6GB (default: what is free beside "
        "the rest); embedding, head and what a step takes come on top",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Generate for all prompts on a server that is started for it, and print the figures; 0. Raises BenchError."""
    check_schedules(args)
    prepare_output(args.output)
    with launch.model_for(args) as model:
        tokenizer = load_tokenizer(model.location, with_eos=args.stop_at_eos)
        prompts = read_prompts(args, tokenizer) if args.prompts else drawn(args, tokenizer)
        if args.schedule:
            job = planned_job(args, prompts, model.location)
            print(*job.notes, sep="\n", end="\n" * bool(job.notes), file=sys.stderr, flush=True)
            args.weights_on_device = job.weights_on_device
            limits, measure = schedule_limits(job), partial(_measure_schedules, args, job)
        else:
            limits, measure = _limits(args, prompts), partial(_measure, args, prompts)
        with launch.running_server([*launch.launch_flags(args, model), *limits]) as server:
            shape = shards.shape_of(model.location)
            target = shards.MeasuredShards(server.sockets, model.name, shape, model.location, server)
            launch.run_interruptible(measure(target, server, tokenizer))
    return 0


def _limits(args: argparse.Namespace, prompts: Sequence[Prompt]) -> list[str]:
    """Launcher flags under which every prompt can run, and all of them at once if memory allows."""
    limits = {
        "--max-input-length": max(len(prompt.token_ids) for prompt in prompts),
        "--max-total-tokens": max(len(prompt.token_ids) + prompt.max_new_tokens for prompt in prompts),
        "--max-concurrent-requests": len(prompts),
        "--max-batch-prefill-tokens": args.max_batch_prefill_tokens or PREFILL_TOKENS,
        "--max-batch-total-tokens": args.max_batch_total_tokens,
    }
    return launch.flags_of(limits)


# ---------------------------------------------------------------------------------------------------------- measurement


async def _measure(
    args: argparse.Namespace,
    prompts: Sequence[Prompt],
    target: shards.MeasuredShards,
    server: launch.Server,
    tokenizer: ModelTokenizer,
) -> None:
    async with shards.connect(target) as connected:
        info, floors = connected.info, shards.floors_of(target, connected.info)
        gauge, tokens = floors.gauge, sum(prompt.max_new_tokens for prompt in prompts)
        result = Result(offline_context("offline", args, target, info, prompts), notes=_notes())
        result.notes += [f"No floors: {floors.missing}."] if floors.missing else []
        with (
            published(result, markdown, args.output),
            shown(f"{target.name}, offline", [Stage(f"{len(prompts)} prompts")]) as view,
            shards.causes_of(target),
        ):
            # What only a first request does, imports above all, is no part of what is measured.
            limits, first = _router_limits(args, connected, 1), [warmup_prompt(prompts)]
            await generate(TimedShards(connected.shards, None), tokenizer, limits, first, info.decoder_start)
            view.begin()
            limits = _router_limits(args, connected, len(prompts))
            timed = TimedShards(connected.shards, floors.served, came=lambda n: view.advance(n / tokens))
            ceilings = [] if gauge is None else [gauge.measure()]
            started = time.perf_counter()
            await generate(timed, tokenizer, limits, prompts, info.decoder_start)
            seconds = time.perf_counter() - started
            ceilings += [] if gauge is None else [gauge.measure()]
            best = ceilings[0].best_of(ceilings[1]) if ceilings else None
            result.rows = rows(timed.records, seconds, best, started)
            widest = max(record.num_tokens for record in timed.records)
            cache = limits.max_batch_total_tokens
            result.extra = {
                **measured_sizes(info, floors.served, server.shard_pids(), cache_tokens=cache, widest_step=widest),
                "ceilings": [asdict(one) for one in ceilings],
                **launch.startup_of(server),
            }
            result.notes += [describe(gauge.seen), *above_limit_notes(result.rows)] if gauge else []


def _router_limits(args: argparse.Namespace, connected: shards.ConnectedShards, num_prompts: int) -> Limits:
    """The limits that the started server runs under."""
    tokens = connected.info.num_blocks * connected.info.block_size
    return Limits(
        max_input_length=tokens,
        max_total_tokens=tokens,
        max_batch_total_tokens=tokens,
        max_batch_prefill_tokens=args.max_batch_prefill_tokens or PREFILL_TOKENS,
        block_size=connected.info.block_size,
        num_blocks=connected.info.num_blocks,
        max_concurrent_requests=num_prompts,
        max_batch_size=args.max_batch_size,
        waiting_served_ratio=0.0,  # the server's defaults
        max_waiting_tokens=20,
        max_best_of=1,
        max_stop_sequences=0,
        max_top_n_tokens=0,
        vocab_size=connected.info.vocab_size,
    )


# --------------------------------------------------------------------------------------------------------------- report


def rows(
    records: Sequence[StepRecord], total_seconds: float, ceilings: Ceilings | None, started: float = 0.0
) -> list[dict[str, Any]]:
    """One row each for prefill, decode and total, in which tokens / latency_s is exactly tokens_per_second.

    started: when the run began, of the records' clock.
    """
    busy = dict.fromkeys(KINDS, 0.0)
    tokens = dict.fromkeys(KINDS, 0)
    floors = dict.fromkeys(KINDS, 0.0)
    ended: dict[str, list[tuple[float, int]]] = {kind: [] for kind in KINDS}  # after how long of its kind
    free_at = 0.0  # when the shards had answered the step before
    for record in records:
        busy[record.kind] += record.answered_at - max(record.sent_at, free_at)
        free_at = record.answered_at
        tokens[record.kind] += record.prompt_tokens or record.generated_tokens
        tokens["total"] += record.generated_tokens
        ended[record.kind].append((busy[record.kind], record.prompt_tokens or record.generated_tokens))
        ended["total"].append((record.answered_at - started, record.generated_tokens))
        for kind in (record.kind, "total"):
            floors[kind] += record.needed.floor_ms(ceilings) / 1000 if record.needed and ceilings else 0.0
    busy["total"] = total_seconds
    return [
        _row(kind, busy[kind], tokens[kind], floors[kind] if ceilings else None)
        | {
            "limit": ceilings.source if ceilings else None,
            "samples": {"tokens_per_second": stretch_rates(ended[kind], busy[kind])},
        }
        for kind in KINDS
    ]


def _row(kind: str, seconds: float, tokens: int, floor: float | None) -> dict[str, Any]:
    return {
        "step": kind,
        "tokens": tokens,
        "latency_s": seconds,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "floor_s": floor,
        "percent_of_limit": 100 * floor / seconds if floor is not None and seconds else None,
    }


def _notes() -> list[str]:
    return [
        "Prefill: steps with any prompt tokens in them, and those prompt tokens. Decode: the other steps, and the "
        "tokens generated in them. Total: from the first request to the last token, and all generated tokens, the "
        "first token of each sequence included. A step's time runs from its request, or from the reply before it if "
        "that came later, to its reply. One sequence ran before, which is not recorded.",
        "GB = 2**30 bytes. Model size: parameters on all shards. Cache size: the KV cache that the shards allocated. "
        "Hidden size (p): activations between two layers in the largest step. Peak memory: most that the shard "
        "processes ever held, libraries and loading included (VmHWM of each; on GPUs what the driver reports at the "
        "end, which torch does not give back). Floors are of the steps that were taken.",
    ]


def markdown(result: Result) -> str:
    """How fast it went, what was held for it, and what to know about both."""
    if result.context.command == SCHEDULES_RESULT:
        tables = [_schedule_table(result.rows), _size_table({_label(row): row for row in result.rows})]
    else:
        tables = [_step_table(result.rows), _size_table({"all": result.extra} if result.extra else {})]
    return "\n\n".join([*tables, footer(result)])


def _step_table(rows: Sequence[dict[str, Any]]) -> str:
    """Prefill, decode and total."""
    limit = next((row["limit"] for row in rows if row["limit"]), "not known")
    headings = ("Step", "Tokens", "Latency s", "Token/s", "Floor s", f"% of limit ({limit})")
    cells = [
        [
            row["step"],
            row["tokens"],
            *(_number(row[key]) for key in ("latency_s", "tokens_per_second", "floor_s")),
            _number(row["percent_of_limit"], 1),
        ]
        for row in rows
    ]
    return table(headings, cells)


def _schedule_table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each schedule and number of batches, with what was predicted for it."""
    rates = ("prefill", "decode", "predicted_decode", "total", "predicted_total", "level", "predicted_level")
    headings = ["Predicted" if name.startswith("predicted") else f"{name.capitalize()} token/s" for name in rates]
    cells = [
        [
            row["schedule"],
            row["num_gpu_batches"],
            row["gpu_batch_size"],
            row["sequences_at_once"],
            *(_number(row[f"{name}_tokens_per_second"]) for name in rates),
            "yes" if row["projected"] else "no",
            *(_number(None if row[key] is None else 100 * row[key], 0) for key in ("link_busy", "layers_busy")),
        ]
        for row in rows
    ]
    last = ("Projected", "Link busy %", "Layers busy %")
    return table(("Schedule", "n", "Batch size", "Sequences", *headings, *last), cells)


def _size_table(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """What was allocated for each run, and the most that processes held."""
    names = ("model_size", "cache_size", "hidden_size", "peak_gpu_memory", "peak_host_memory")
    cells = [[label, *(_gib(sizes[f"{name}_bytes"]) for name in names)] for label, sizes in runs.items()]
    return table(("GB", "Model", "Cache", "Hidden (p)", "Peak GPU memory", "Peak host memory"), cells)


def _label(row: Mapping[str, Any]) -> str:
    return f"{row['schedule']}, n = {row['num_gpu_batches']}"


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _gib(num_bytes: int | None) -> str:
    return _number(None if num_bytes is None else num_bytes / GIB)


# ------------------------------------------------------------------------------------------------------------ schedules


async def _measure_schedules(
    args: argparse.Namespace, job: Job, target: shards.MeasuredShards, server: launch.Server, tokenizer: ModelTokenizer
) -> None:
    async with shards.connect(target) as connected:
        info = connected.info
        context = offline_context(SCHEDULES_RESULT, args, target, info, job.prompts, cut_output_length=job.cut)
        result = Result(context, notes=[*job.notes, *schedule_notes(info, job.measured)])
        result.extra = launch.startup_of(server)
        done: dict[Policy, dict[str, Any]] = {}
        in_order = sorted(job.policies, key=lambda one: _kv_blocks(job, one))  # peaks of memory grow with it
        names = [f"{one.schedule}, {one.num_gpu_batches} × {one.gpu_batch_size} sequences" for one in in_order]
        with (
            published(result, markdown, args.output) as keep,
            shown(f"{target.name}, by schedules", [Stage(name) for name in names]) as view,
            shards.causes_of(target),
        ):
            # What only a first request does, imports above all, is no part of what is measured.
            limits, first = _limits_of(job, in_order[0], info), [warmup_prompt(job.run_prompts)]
            await generate(TimedShards(connected.shards, None), tokenizer, limits, first, info.decoder_start)
            for policy in view.each(in_order):
                done[policy] = await _run_policy(args, job, policy, connected, server, tokenizer, target, view)
                result.rows[:] = [done[one] for one in job.policies if one in done]
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
) -> dict[str, Any]:
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
        await schedules.generate_diagonally(timed, plan, prompts, info.block_size, info.vocab_size)
    ended = time.perf_counter()
    times = Streamed.of(await client.streamed())
    phases = Phases.of(timed.records, ended - began)
    cost = _cost(job, served, info, before, args)
    foreseen = None if cost is None else predicted(planned(policy, prompts, limits), cost)
    if job.cut is not None:
        whole = job.prompts[0].max_new_tokens
        phases = phases.projected(job.cut, whole)
        foreseen = None if foreseen is None else foreseen.projected(job.cut, whole)
    sizes = schedule_sizes(policy, job.prompts, info, served, timed.records, server.shard_pids())
    row = schedule_row(policy, phases, foreseen, sizes, is_projected=job.cut is not None)
    return row | _level(plan, timed.records, cost) | streamed_figures(times, began, ended)


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
    return StreamedCost(cost_of(sizes_of(served), job.measured.rates, bytes_per_step))


def _level(plan: schedules.DiagonalPlan | None, records: Sequence[StepRecord], cost: Cost | None) -> dict[str, Any]:
    """Tokens a second while a diagonal block is whole, as measured and as predicted; null for the other schedules."""
    if plan is None:
        return level_figures(None, None)
    foreseen = None if cost is None else plan.level_rate([cost.seconds(step.work) for step in plan.steps])
    return level_figures(plan.level_rate(step_seconds(records)), foreseen)


def forget_peaks(server: launch.Server) -> None:
    """Have each shard's peak memory begin anew, where the kernel lets us: it is then that of one run."""
    for pid in server.shard_pids():
        with suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


# ---------------------------------------------------------------------------------------------------- rows of schedules


def schedule_sizes(
    policy: Policy,
    prompts: Sequence[Prompt],
    info: ModelInfo,
    served: ServedModel | None,
    records: Sequence[StepRecord],
    pids: Sequence[int],
) -> dict[str, Any]:
    """FlexGen's sizes, with the KV budget of the policy for these prompts, and how many it computes together."""
    blocks = policy.kv_blocks(prompts, info.block_size, is_encoded=info.decoder_start is not None)
    widest = max(record.num_tokens for record in records)
    found = measured_sizes(info, served, pids, cache_tokens=blocks * info.block_size, widest_step=widest)
    return {"sequences_at_once": policy.at_once(prompts, info.block_size), **found}


def schedule_row(
    policy: Policy, phases: Phases, foreseen: Phases | None, sizes: dict[str, Any], *, is_projected: bool
) -> dict[str, Any]:
    """One run's figures. What was predicted is null where the model knows nothing of such a model."""
    expected = foreseen.row() if foreseen is not None else {}
    return {
        "schedule": policy.schedule,
        "num_gpu_batches": policy.num_gpu_batches,
        "gpu_batch_size": policy.gpu_batch_size,
        **sizes,
        "projected": is_projected,
        **phases.row(),
        **{f"predicted_{k}_tokens_per_second": expected.get(f"{k}_tokens_per_second") for k in KINDS},
    }


def level_figures(measured: float | None, foreseen: float | None) -> dict[str, Any]:
    """Tokens a second while a diagonal block is whole."""
    return {"level_tokens_per_second": measured, "predicted_level_tokens_per_second": foreseen}


def streamed_figures(times: Streamed, began: float, ended: float) -> dict[str, Any]:
    """What the first shard's link did in the run."""
    return {
        "streamed_bytes_per_step": times.pass_bytes,
        "streamed_bytes": times.num_bytes,
        "waited_s": times.waited_s,
        "link_busy": times.busy(times.reads, began, ended),
        "layers_busy": times.busy(times.computed, began, ended),
    }


def schedule_notes(info: ModelInfo, measured: Measured | None) -> list[str]:
    """How the figures are meant."""
    found = [
        "Prefill: steps in which nothing decodes. Decode: steps without prompts, and the tokens generated behind the "
        "first of each sequence. A step that has both counts as decode for as long as the run's median step without "
        "prompts takes, and as prefill for the rest. Total: from the first request to the last token, and all tokens "
        "generated. Level: those of the steps in which the whole of a diagonal block is under way; before these its "
        "batches enter, and behind them they end, once in a run. Before 2026-11-24 reports called continuous diagonal.",
        "GB = 2**30 bytes. Model size: parameters on all shards. Cache size: the KV budget of the schedule; in the "
        "diagonal order, whose block is as large as the memory of a zig-zag block of n allows, what is in use at once. "
        "Hidden size (p): activations between two layers in the largest step. Peak memory: most that the shard "
        "processes held while the run lasted, libraries included, and keys and values that a run before has touched: "
        "what needs less is run first. On GPUs it is the driver's figure, with all that the largest block needs. Link "
        "and layers busy: the share of the run in which something was read, or a streamed layer computed.",
    ]
    found += [f"Off the device: {info.offloaded}."] if info.offloaded else []
    if measured is None:
        return found
    link = measured.rates.link
    took = 1e12 * measured.rates.products[-1][1]
    picoseconds = f"{took:.3g}" if took < 999.5 else f"{took:.0f}"
    rate = f"{link / 1e9:.2f} GB/s from where weights wait" if link < math.inf else "nothing streams"
    found.append(
        f"Predicted from what was measured before: {rate}, {measured.rates.memory / 1e9:.1f} GB/s from memory, and for "
        f"{measured.rates.products[-1][0]} tokens {picoseconds} ps for a byte of weights."
    )
    return found


def offline_context(
    name: str,
    args: argparse.Namespace,
    target: shards.MeasuredShards,
    info: ModelInfo,
    prompts: Sequence[Prompt],
    **work: Any,
) -> RunContext:
    """What a reader must know of a run. work: what is compared besides the prompts."""
    return RunContext.gather(
        name,
        model=target.name,
        device=info.device,
        dtype=info.dtype,
        num_shard=info.world_size,
        threads=info.threads,
        quantize=info.quantize,
        arguments=arguments_of(args),
        work={
            "model": target.name,
            "num_prompts": len(prompts),
            "prompt_tokens": sum(len(prompt.token_ids) for prompt in prompts),
            "max_new_tokens": sum(prompt.max_new_tokens for prompt in prompts),
            "stop_at_eos": args.stop_at_eos,
            **work,
        },
    )


def measured_sizes(
    info: ModelInfo, served: ServedModel | None, pids: Sequence[int], *, cache_tokens: int, widest_step: int
) -> dict[str, Any]:
    """Bytes. Peak memory is measured, of all shard processes; the others are what is allocated.

    cache_tokens: what the KV cache holds. widest_step: tokens of the largest step.
    """
    width = None if served is None else served.shape.spec.hidden_size * DTYPE_BYTES[served.dtype]
    return {
        "model_size_bytes": sum(info.weight_bytes),
        "cache_size_bytes": cache_tokens * info.kv_bytes_per_token * info.world_size,
        "hidden_size_bytes": None if width is None else widest_step * width,
        "peak_gpu_memory_bytes": None if info.device == "cpu" else launch.peak_gpu_memory(pids),
        "peak_host_memory_bytes": launch.peak_host_memory(pids),
    }
