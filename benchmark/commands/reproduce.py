"""`lockstep-bench reproduce SEED`: rerun a published benchmark on this machine and compare its figures.

The documents are data (`benchmark/seeds/`); their sweeps are run by the other commands, each in a process of its own,
on random weights of the model's shape and format. The report has the document's headings, both figures in each cell,
and the share of its device's limit that either reached. A reduced run says so in its title and shows no figure of the
document.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmark import launch, options
from benchmark.cost import shapes
from benchmark.report import pictures
from benchmark.report.publishing import published
from benchmark.result import BenchError, Result, RunContext, above_limit_notes, arguments_of, prepare_output
from benchmark.seeds import documents, limits, tables
from benchmark.seeds.documents import Seed
from benchmark.seeds.limits import require_room
from benchmark.seeds.measurements import Job, num_commands, rows
from benchmark.terminal import Stage, shown

Row = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("seed", metavar="SEED", help="one of " + ", ".join(documents.names()))
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(auto)")
    launch.add_kernels_argument(parser)
    parser.add_argument(
        "--dtype", choices=list(shapes.DTYPE_BYTES), help="(the document's; bfloat16 for float16 on a CPU)"
    )
    parser.add_argument(
        "--num-shard", type=options.positive, nargs="+", metavar="N",
        help="shards, for documents that vary them (default: those that fit this machine's GPUs or cores; else 1)",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for result.md, result.json and plots")
    documents.add_scale_arguments(parser.add_argument_group("reduced run, without the document's figures"))


def run(args: argparse.Namespace) -> int:
    """Run the document's sweep and print it beside the document; 0. Raises BenchError."""
    seed = documents.find(args.seed)
    scale = documents.scale_of(seed, args)
    prepare_output(args.output)
    model = seed.model(scale.layers)  # refused here where its format is not there
    here = limits.machine_at_hand(args.device)
    dtype = args.dtype or ("bfloat16" if here.is_cpu and seed.dtype == "float16" else seed.dtype)
    splits = _splits(seed, here, args.num_shard)
    for num_shard in splits:
        require_room(seed, scale, here, dtype, num_shard)
    with tempfile.TemporaryDirectory(prefix="lockstep-seed-") as folder:
        config = Path(folder) / f"{model.name.replace(', ', '-').replace(' ', '-')}.json"
        config.write_text(json.dumps(model.config))
        job = Job(seed, scale, here, dtype, splits, config, args.cpu_kernels)
        _measure(args, job)
    return 0


def _splits(seed: Seed, here: limits.Machine, given: Sequence[int] | None) -> list[int]:
    """Over how many shards the model is split, in turn. Raises BenchError for what this machine cannot do."""
    if seed.kind != "latency":
        if given not in (None, [1]):
            raise BenchError(
                f"--num-shard is {' '.join(map(str, given or ()))}, and {seed.name} has one device: leave it out"
            )
        return [1]
    wanted = options.distinct(given) if given else [n for n in seed.num_shards if n <= here.most_shards] or [1]
    shape = seed.model(None).shape
    for num_shard in wanted:
        if problem := shape.split_problem(num_shard):
            raise BenchError(f"--num-shard is {num_shard}: {problem}")
        if not here.is_cpu and num_shard > here.num_devices:
            raise BenchError(
                f"--num-shard is {num_shard}, and this machine has {here.num_devices} GPUs: give at most that"
            )
    return sorted(wanted)


def _measure(args: argparse.Namespace, job: Job) -> None:
    result = Result(_context(args, job), notes=tables.notes(job))
    if not job.scale.reductions and job.seed.kind == "serving":
        result.notes += tables.short_answers(job.seed)
    num_notes = len(result.notes)
    seed, scale = job.seed, job.scale
    result.extra = {
        "document": {"file": seed.document, "tables": [table.where for table in seed.tables]},
        "layers": scale.layers or seed.num_layers,
        "sizes": dict(scale.sizes),
        "reductions": list(scale.reductions),
    }
    hardware = result.context.machine
    render, draw = partial(tables.markdown, job=job, hardware=hardware), partial(_draw, job)
    stages = [Stage(f"command of {seed.name}") for _ in range(num_commands(job))]
    with published(result, render, args.output, draw) as keep, shown(f"reproducing {seed.name}", stages) as view:
        for part in rows(job, view.begin):
            result.rows += part
            result.notes[num_notes:] = above_limit_notes(result.rows)
            keep()


def _context(args: argparse.Namespace, job: Job) -> RunContext:
    stored = job.served.shape.stored
    return RunContext.gather(
        "reproduce",
        model=job.seed.title,
        device=job.machine.device,
        dtype=job.dtype,
        num_shard=job.num_shards,
        threads=0,
        quantize=None if stored is None else stored.description,
        arguments=arguments_of(args),
        work={"seed": job.seed.name, "layers": job.scale.layers, "sizes": dict(job.scale.sizes)},
    )


# ---------------------------------------------------------------------------------------------------------------- plots


def _draw(job: Job, result: Result, folder: Path) -> list[pictures.Picture]:
    """The drawn of the document's kind, with its figures where the whole sweep was run. Raises BenchError."""
    draw = {"latency": _draw_latency, "serving": _draw_serving}.get(job.seed.kind)
    return [] if draw is None else draw(job, result, folder, tables.short_title(job, result.context.machine))


def _draw_latency(job: Job, result: Result, folder: Path, about: str) -> list[pictures.Picture]:
    drawn = []
    lengths = f"{job.scale.one('sequence_length')} in, {job.scale.one('decode_length')} out"
    for num_shard in job.num_shards:
        own = [row for row in result.rows if row["num_shard"] == num_shard]
        shards = f"{num_shard} shard{'s' if num_shard > 1 else ''}"
        systems: dict[str, Sequence[Row]] = {f"Lockstep, {shards}": own}
        theirs = [row["document"] for row in own if row["document"]]
        if theirs:
            assumed = f" ({job.seed.device} assumed)" if job.seed.is_device_assumed else ""
            systems[f"Document, {theirs[0]['num_shard']} GPUs{assumed}"] = theirs
        path = folder / f"latency-{num_shard}.png"
        drawn.append(pictures.plot_latency_systems(systems, path, f"{about}; {shards}, {lengths}"))
    return drawn


def _draw_serving(job: Job, result: Result, folder: Path, about: str) -> list[pictures.Picture]:
    theirs: dict[str, list[Row]] = {}
    load = {"concurrency": job.scale.streams, "request_rate": None}
    for row in result.rows:
        for system, figures in (row["document"] or {}).items():
            theirs.setdefault(f"{system}, {job.seed.hardware}", []).append(figures | load)
    about = f"{about}; throughputs with {job.scale.streams} streams, latencies with one"
    return pictures.plot_serving({"Lockstep": result.rows, **theirs}, folder, about)
