"""`lockstep-bench offline`: a file of prompts, or synthetic ones, through the same engine without HTTP.

The router's own batching loop admits the sequences, under the same rules and limits as in a server, on shards that are
started for this; FlexGen's figures are printed by FlexGen's names. What differs from FlexGen is that sequences join and
leave at any step, so that prefill and decode are told apart by step and not by phase; the report says how. Nothing is
projected: every latency is measured to the last token. Schedules are compared in `scheduled.py`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmark import flexgen, interrupts, launch, options, plots, scheduled, shards
from benchmark.ceilings import Ceilings, Gauge, describe
from benchmark.generating import generate
from benchmark.progress import Progress, Stage, shown
from benchmark.prompts import Prompt, load_tokenizer, read_prompts, synthetic_prompts, warmup_prompt
from benchmark.publishing import published
from benchmark.report import BenchError, Result, above_limit_notes, footer, prepare_output, table
from benchmark.roofline import ServedModel
from benchmark.schedules import SCHEDULES
from benchmark.stretches import rates
from benchmark.timed_shards import StepRecord, TimedShards
from router.limits import Limits
from router.text import ModelTokenizer

SWEEP = "offline-sweep"  # what a result of several numbers of prompts is called: `compare` knows none
SEVERAL_NOTE = (
    "All numbers of prompts ran on one server, the fewest first: its cache is that of the most, peaks only grow."
)

# --------------------------------------------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help='JSON lines, each with "prompt" or "token_ids", and "max_new_tokens" where it differs from the option',
    )  # fmt: skip
    parser.add_argument(
        "--num-prompts", type=options.positive, nargs="+", default=[32], metavar="N",
        help="synthetic prompts (32); several numbers run one after the other on one server, in one report",
    )  # fmt: skip
    parser.add_argument("--input-length", type=options.positive, default=100, help="tokens of a synthetic prompt (100)")
    parser.add_argument("--output-length", type=options.positive, default=100, help="generated tokens (100)")
    parser.add_argument("--stop-at-eos", action="store_true", help="end sequences at end tokens")
    parser.add_argument("--max-batch-size", type=options.positive, help="sequences at once (default: what fits)")
    parser.add_argument(
        "--max-batch-prefill-tokens", type=options.positive, metavar="N",
        help=f"prompt tokens in one step ({scheduled.PREFILL_TOKENS}; with schedules those of a whole block)",
    )  # fmt: skip
    parser.add_argument("--max-batch-total-tokens", type=options.positive, help="size of the KV cache")
    parser.add_argument("--seed", type=options.not_negative, default=0, help="random seed of the synthetic prompts (0)")
    parser.add_argument(
        "--output", type=Path, metavar="DIR",
        help="folder for result.md, result.json and, with --schedule, timeline.png, the activity of link and layers; "
        "with several --num-prompts throughput.png",
    )  # fmt: skip
    _add_schedules(parser.add_argument_group("schedules, compared on one server"))
    launch.add_server_arguments(parser)


def _add_schedules(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--schedule", nargs="+", choices=(*SCHEDULES, scheduled.AUTO), metavar="NAME",
        help="row, zig-zag, diagonal, continuous, or auto: the best by a cost model; results before "
        "2026-11-24 say diagonal for continuous",
    )  # fmt: skip
    group.add_argument(
        "--num-gpu-batches", type=options.positive, nargs="+", metavar="N",
        help=f"batches that advance together as a block ({scheduled.DEFAULT_BATCHES}; auto tries several); "
        "diagonal: as many as fit into the same KV memory",
    )  # fmt: skip
    group.add_argument(
        "--gpu-batch-size", type=options.positive, metavar="N",
        help=f"sequences of a batch ({scheduled.DEFAULT_BATCH_SIZE})",
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
    counts = _counts(args)
    scheduled.check(args)
    prepare_output(args.output)
    if args.schedule:
        return scheduled.run(args)
    with launch.model_for(args) as model:
        tokenizer = load_tokenizer(model.location, with_eos=args.stop_at_eos)
        prompts = read_prompts(args, tokenizer) if args.prompts else synthetic_prompts(args, tokenizer)
        parts = [prompts[:count] for count in counts] if len(counts) > 1 else [prompts]
        flags = [*launch.launch_flags(args, model), *_limits(args, prompts)]
        with launch.running_server(flags) as server:
            shape = shards.shape_of(model.location)
            target = shards.MeasuredShards(server.sockets, model.name, shape, model.location, server)
            interrupts.run(_measure(args, target, server, tokenizer, parts))
    return 0


def _counts(args: argparse.Namespace) -> list[int]:
    """The numbers of prompts in ascending order, because peaks of memory only grow; a single one stays a number.

    Raises BenchError for several where there can be one.
    """
    counts = sorted(options.distinct(args.num_prompts))
    args.num_prompts = counts if len(counts) > 1 else counts[0]
    said = f"--num-prompts {' '.join(map(str, counts))}"
    if len(counts) > 1 and args.prompts:
        raise BenchError(f"{said} is for synthetic prompts, and --prompts names those there are: leave one of them out")
    if len(counts) > 1 and args.schedule:
        raise BenchError(f"{said} with --schedule: give one number there, and several of --num-gpu-batches")
    return counts


def _limits(args: argparse.Namespace, prompts: Sequence[Prompt]) -> list[str]:
    """Launcher flags under which every prompt can run, and all of them at once if memory allows."""
    limits = {
        "--max-input-length": max(len(prompt.token_ids) for prompt in prompts),
        "--max-total-tokens": max(len(prompt.token_ids) + prompt.max_new_tokens for prompt in prompts),
        "--max-concurrent-requests": len(prompts),
        "--max-batch-prefill-tokens": args.max_batch_prefill_tokens or scheduled.PREFILL_TOKENS,
        "--max-batch-total-tokens": args.max_batch_total_tokens,
    }
    return launch.flags_of(limits)


# ----------------------------------------------------------------------------------------------------- measurement


async def _measure(
    args: argparse.Namespace,
    target: shards.MeasuredShards,
    server: launch.Server,
    tokenizer: ModelTokenizer,
    parts: Sequence[Sequence[Prompt]],
) -> None:
    """Run the parts one after the other, in ascending order of their sizes."""
    async with shards.connect(target) as connected:
        info, floors = connected.info, shards.floors_of(target, connected.info)
        served, gauge = floors.served, floors.gauge
        counts, most = [len(part) for part in parts], parts[-1]
        several: dict[str, Any] = {"num_prompts": counts} if len(counts) > 1 else {}
        name = SWEEP if several else "offline"
        result = Result(flexgen.context(name, args, target, info, most, **several), notes=_notes())
        result.notes += [SEVERAL_NOTE] if several else []
        result.notes += [f"No floors: {floors.missing}."] if floors.missing else []
        draw = partial(_draw, args) if several else None
        stages = [Stage(f"{len(part)} prompts", sum(prompt.max_new_tokens for prompt in part)) for part in parts]
        with (
            published(result, markdown, args.output, draw) as keep,
            shown(f"{target.name}, offline", stages) as view,
            shards.causes_of(target),
        ):
            # What only a first request does, imports above all, is no part of what is measured.
            limits, first = _router_limits(args, connected, 1), [warmup_prompt(most)]
            await generate(TimedShards(connected.shards, None), tokenizer, limits, first, info.decoder_start)
            num_notes = len(result.notes)
            for part in view.each(parts):
                limits = _router_limits(args, connected, len(part))
                timed, row_list, ceilings = await _run(connected, tokenizer, limits, part, served, gauge, view)
                widest = max(record.num_tokens for record in timed.records)
                cache = limits.max_batch_total_tokens
                sizes = flexgen.sizes(info, served, server.shard_pids(), cache_tokens=cache, widest_step=widest)
                found = sizes | {"ceilings": ceilings}
                if several:
                    row_list = [{"num_prompts": len(part)} | row for row in row_list]
                    found = {"runs": [*result.extra.get("runs", []), {"num_prompts": len(part)} | found]}
                result.rows += row_list
                result.extra |= found | launch.startup_of(server)
                result.notes[num_notes:] = [describe(gauge.seen), *above_limit_notes(result.rows)] if gauge else []
                keep()


async def _run(
    connected: shards.ConnectedShards,
    tokenizer: ModelTokenizer,
    limits: Limits,
    prompts: Sequence[Prompt],
    served: ServedModel | None,
    gauge: Gauge | None,
    view: Progress,
) -> tuple[TimedShards, list[dict[str, Any]], list[dict[str, Any]]]:
    """Generate for the prompts: the steps that were taken, the rows, and the ceilings before and after."""
    tokens = sum(prompt.max_new_tokens for prompt in prompts)
    timed = TimedShards(connected.shards, served, came=lambda n: view.advance(n / tokens))
    before = None if gauge is None else gauge.measure()
    started = time.perf_counter()
    await generate(timed, tokenizer, limits, prompts, connected.info.decoder_start)
    seconds = time.perf_counter() - started
    if gauge is None or before is None:
        return timed, rows(timed.records, seconds, None, started), []
    after = gauge.measure()
    found = rows(timed.records, seconds, before.best_of(after), started)
    return timed, found, [asdict(before), asdict(after)]


def _router_limits(args: argparse.Namespace, connected: shards.ConnectedShards, num_prompts: int) -> Limits:
    """The limits that the started server runs under."""
    tokens = connected.info.num_blocks * connected.info.block_size
    return Limits(
        max_input_length=tokens,
        max_total_tokens=tokens,
        max_batch_total_tokens=tokens,
        max_batch_prefill_tokens=args.max_batch_prefill_tokens or scheduled.PREFILL_TOKENS,
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


# ---------------------------------------------------------------------------------------------------------- report


def rows(
    records: Sequence[StepRecord], total_seconds: float, ceilings: Ceilings | None, started: float = 0.0
) -> list[dict[str, Any]]:
    """One row each for prefill, decode and total, in which tokens / latency_s is exactly tokens_per_second.

    started: when the run began, of the records' clock.
    """
    busy = dict.fromkeys(flexgen.KINDS, 0.0)
    tokens = dict.fromkeys(flexgen.KINDS, 0)
    floors = dict.fromkeys(flexgen.KINDS, 0.0)
    ended: dict[str, list[tuple[float, int]]] = {kind: [] for kind in flexgen.KINDS}  # after how long of its kind
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
            "samples": {"tokens_per_second": rates(ended[kind], busy[kind])},
        }
        for kind in flexgen.KINDS
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
    """The figures as FlexGen prints them, then the floors, then what to know about them."""
    if "runs" in result.extra:
        parts = [part for run in result.extra["runs"] for part in _run_parts(result, run)]
        parts.append(_sweep_table(result))
    else:
        parts = ["\n".join(_figures(result, result.extra, result.rows)), _floor_table(result.rows)]
    return "\n\n".join(part for part in [*parts, footer(result)] if part)


def _run_parts(result: Result, run: dict[str, Any]) -> Iterator[str]:
    """The figures of one of several numbers of prompts."""
    yield f"#### --num-prompts {run['num_prompts']}"
    yield "\n".join(_figures(result, run, _rows_of(result, run["num_prompts"])))


def _rows_of(result: Result, num_prompts: int) -> list[dict[str, Any]]:
    return [row for row in result.rows if row["num_prompts"] == num_prompts]


def _figures(result: Result, sizes: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    if sizes:
        yield from flexgen.size_lines(sizes, result.context.device, is_projected=False)
    for row in rows:
        yield flexgen.phase_line(row["step"], row["latency_s"], row["tokens_per_second"])


def _sweep_table(result: Result) -> str:
    """Throughputs by the number of prompts, with the share of the limit where there is one."""
    headings = ["Prompts", *(f"{kind.capitalize()} token/s" for kind in flexgen.KINDS), "Total s"]
    cells: list[list[object]] = []
    for run in result.extra["runs"]:
        own = _rows_of(result, run["num_prompts"])
        rates = [
            f"{row['tokens_per_second']:.2f}"
            + ("" if row["percent_of_limit"] is None else f" ({row['percent_of_limit']:.1f} %)")
            for row in own
        ]
        cells.append([run["num_prompts"], *rates, f"{own[-1]['latency_s']:.2f}"])
    if limit := next((row["limit"] for row in result.rows if row["percent_of_limit"] is not None), None):
        headings[1:-1] = [f"{heading} (% of limit, {limit})" for heading in headings[1:-1]]
    return table(headings, cells)


def _draw(args: argparse.Namespace, result: Result, folder: Path) -> list[plots.Picture]:
    """Throughputs over the number of prompts, and what share of the limit they were. Raises BenchError."""
    panels = []
    for title, label, key in (
        ("Throughput", "Tokens/s", "tokens_per_second"),
        ("Of the limit", "%", "percent_of_limit"),
    ):
        kinds = flexgen.KINDS[1:] if key == "tokens_per_second" else flexgen.KINDS  # a prefill's rate dwarfs the others
        lines = {
            kind.capitalize(): [
                (row["num_prompts"], row[key]) for row in result.rows if row["step"] == kind and row[key] is not None
            ]
            for kind in kinds
        }
        panels.append(plots.Panel(title, "Prompts", label, lines))
    context = result.context
    about = f"{context.model} on {context.machine}; {args.input_length} in, {args.output_length} out"
    return [plots.plot_panels(panels, "Prompts through the engine, without HTTP", folder / "throughput.png", about)]


def _floor_table(rows: Sequence[dict[str, Any]]) -> str:
    known = [row for row in rows if row["percent_of_limit"] is not None]
    cells = [
        [r["step"], r["tokens"], f"{r['latency_s']:.3f} s", f"{r['floor_s']:.3f} s", f"{r['percent_of_limit']:.1f} %"]
        for r in known
    ]
    if not known:
        return ""
    return table(("Step", "Tokens", "Latency", "Floor", f"% of limit ({known[0]['limit']})"), cells)
