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
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmark import launch, options
from benchmark.cost import shapes
from benchmark.cost.devices import Machine, machine_at_hand
from benchmark.cost.roofline import DATA_SHEET, MEASURED
from benchmark.engine.generation import KINDS
from benchmark.engine.shards import STEPS, THROUGHPUT_STEPS, throughputs_of
from benchmark.report import pictures
from benchmark.report.publishing import published
from benchmark.result import (
    GIB,
    BenchError,
    Result,
    RunContext,
    above_limit_notes,
    arguments_of,
    footer,
    prepare_output,
    table,
)
from benchmark.seeds import documents
from benchmark.seeds.documents import Seed, concurrency
from benchmark.seeds.measurements import Job, num_commands, require_room, rows
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
    here = machine_at_hand(args.device)
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


def _splits(seed: Seed, here: Machine, given: Sequence[int] | None) -> list[int]:
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
    result = Result(_context(args, job), notes=notes(job))
    if not job.scale.reductions and job.seed.kind == "serving":
        result.notes += short_answers(job.seed)
    num_notes = len(result.notes)
    seed, scale = job.seed, job.scale
    result.extra = {
        "document": {"file": seed.document, "tables": [table.where for table in seed.tables]},
        "layers": scale.layers or seed.num_layers,
        "sizes": dict(scale.sizes),
        "reductions": list(scale.reductions),
    }
    hardware = result.context.machine
    render, draw = partial(markdown, job=job, hardware=hardware), partial(_draw, job)
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
    return [] if draw is None else draw(job, result, folder, short_title(job, result.context.machine))


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


# --------------------------------------------------------------------------------------------------------------- report


LOAD_NOTE = (
    "The document names no load. If its throughput and its latency are of one run, their product is how many requests "
    "were under way on average (Little's law): {least:.1f} to {most:.1f} of them, the document's concurrency in the "
    "second table of a system, in which both of ours are from a run of that many streams, rounded. Its latencies "
    "hardly differ from length to length, as those of one request at a time would: so the first table has throughputs "
    "with {streams} streams and latencies with one, as if the document's were of two runs."
)


def title(job: Job, hardware: str) -> str:
    """What was run, on what, and what of it."""
    return _title(job, "; ".join(job.scale.reductions), hardware)


def short_title(job: Job, hardware: str) -> str:
    """The same for pictures, whose axes say the sizes."""
    reduced = [f"{job.scale.layers} of {job.seed.num_layers} layers"] if job.scale.layers else []
    return _title(job, ", ".join(["reduced", *reduced]) if job.scale.reductions else "", hardware)


def _title(job: Job, reduced: str, hardware: str) -> str:
    return f"{job.seed.title}{f' ({reduced})' if reduced else ''}: Lockstep on {hardware}"


def markdown(result: Result, job: Job, hardware: str) -> str:
    """The whole report."""
    parts = [f"# {title(job, hardware)}", _legend(job)]
    parts += {"latency": _latency, "serving": _serving, "flexgen": _flexgen}[job.seed.kind](result, job)
    return "\n\n".join(part for part in [*parts, footer(result)] if part)


def notes(job: Job) -> list[str]:
    """What to know about the figures of either side."""
    seed = job.seed
    found = [] if job.scale.reductions else list(seed.notes)
    if seed.kind == "serving":
        loads = [concurrency(row) for one in seed.tables for row in one.rows]
        found.append(LOAD_NOTE.format(streams=job.scale.streams, least=min(loads), most=max(loads)))
    if seed.is_device_assumed and not job.scale.reductions:
        found.append(f"The document names no GPU: the shares of its limit are those of {seed.device}, an assumption.")
    found.append(
        "% of limit: of the least time, or the highest throughput, that the device could have, by its data sheet or by "
        "what was measured of it, as the heading says (docs/benchmarking.md)."
    )
    return found


def short_answers(seed: Seed) -> list[str]:
    """Systems of a document whose answers had fewer tokens than were asked for, in sentences."""
    found = []
    for one in seed.tables:
        shares = [
            r["output_tokens_per_second"] / r["requests_per_second"] / r["output_length"] for r in one.rows
        ]  # to as many digits as the document has
        short = [share for share in shares if share < 0.9]
        if len(short) > len(shares) / 2:
            found.append(
                f"Answers of {one.system} were short in {len(short)} of {len(shares)} rows, with "
                f"{100 * min(short):.0f} % of their tokens at worst: compare output token/s, not requests/s."
            )
    return found


def _legend(job: Job) -> str:
    seed = job.seed
    if job.scale.reductions:
        return (
            f"A reduced run: no figure of the document ({seed.document}) stands beside it. Without the options that "
            "reduce it, the whole sweep is run."
        )
    places = "; ".join(dict.fromkeys(one.where for one in seed.tables))
    return f"In each cell: Lockstep / the document ({seed.document}, {seed.hardware}: {places})."


def _pair(ours: float | None, theirs: float | None, unit: str = "", digits: int = 2, *, is_full: bool = True) -> str:
    """Ours, and the document's where the whole sweep was run."""
    texts = [_number(ours, digits), *([_number(theirs, digits)] if is_full else [])]
    return " / ".join(texts) + (f" {unit}" if unit else "")


def _shares(ours: Row, theirs: Row, name: str, *, is_full: bool) -> list[str]:
    """The shares of the limit as `_share_headings` has them."""
    shares = [_number(ours[name], 1), *([_number(theirs.get(name), 1)] if is_full else [])]
    return [" / ".join(shares)] if ours["limit"] == DATA_SHEET else shares


def _share_headings(rows: Sequence[Row], of: str = "", *, is_full: bool) -> list[str]:
    """One column where both sides have a data sheet for their limit; else one each, of different limits."""
    limit = rows[0]["limit"] or MEASURED  # of a CPU for which no loops can be compiled nothing is
    ours = f"% of limit ({limit}){of}"
    return [ours] if limit == DATA_SHEET or not is_full else [ours, f"The document's % of limit ({DATA_SHEET}){of}"]


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


# -------------------------------------------------------------------------------------------------------------- latency


def _latency(result: Result, job: Job) -> Iterator[str]:
    ours = {"model": job.seed.title, **job.scale.sizes}
    cells = [
        [one["parameter"], one["document"], one["ours"].format_map(ours), f"`{one['option']}`", one["why"]]
        for one in job.seed.arguments
    ]
    yield table(("Parameter", "Document", "Lockstep", "Option of latency", "What it is"), cells)
    for num_shard in job.num_shards:
        own = [row for row in result.rows if row["num_shard"] == num_shard]
        if own:
            yield f"# Tensor Parallel (TP) - {_split(job, num_shard)}{_other_split(own)}"
            yield _times(own)
            yield _rates(own, job)


def _split(job: Job, num_shard: int) -> str:
    if job.machine.is_cpu:
        return f"{num_shard} shard{'s' if num_shard > 1 else ''} of one CPU"
    return f"{num_shard} GPU{'s' if num_shard > 1 else ''}"


def _other_split(rows: Sequence[Row]) -> str:
    document = rows[0]["document"]
    if document is None or document["num_shard"] == rows[0]["num_shard"]:
        return ""
    return f", beside the document's {document['num_shard']} GPUs"


def _times(rows: Sequence[Row]) -> str:
    names = ("mean_ms", "min_ms", "max_ms", "p50_ms", "p90_ms", "p99_ms")
    is_full = rows[0]["document"] is not None
    cells = []
    for row in rows:
        theirs = row["document"] or {}
        times = [_pair(row[name], theirs.get(name), "ms", is_full=is_full) for name in names]
        shares = _shares(row, theirs, "percent_of_limit", is_full=is_full)
        cells.append([STEPS[row["step"]], row["batch_size"], *times, *shares])
    headings = ("Step", "Batch Size", "Average", "Lowest", "Highest", "p50", "p90", "p99")
    return table([*headings, *_share_headings(rows, is_full=is_full)], cells)


def _rates(rows: Sequence[Row], job: Job) -> str:
    is_full = rows[0]["document"] is not None
    cells = []
    for row in rows:
        if row["step"] not in THROUGHPUT_STEPS:
            continue
        theirs = row["document"] or {}
        factor = job.scale.one("sequence_length") if row["step"] == "prefill" else 1  # it counts prompts
        names = ("mean_per_second", "min_per_second", "max_per_second")
        others = [None if theirs.get(name) is None else factor * theirs[name] for name in names]
        pairs = zip(throughputs_of(row), others, strict=True)
        rates = [_pair(ours, other, "tokens/secs", is_full=is_full) for ours, other in pairs]
        cells.append([THROUGHPUT_STEPS[row["step"]], row["batch_size"], *rates])
    return table(("Step", "Batch Size", "Average", "Lowest", "Highest"), cells)


# -------------------------------------------------------------------------------------------------------------- serving


SERVING_COLUMNS: Mapping[str, str] = {
    "requests_per_second": "Throughput (requests/s)",
    "output_tokens_per_second": "Throughput (output token/s)",
    "latency_per_token_ms": "Average latency per token (ms)",
    "latency_per_output_token_ms": "Average latency per output token (ms)",
}
SERVING_SHARES: Mapping[str, str] = {"throughput_percent": ", throughput", "latency_percent": ", latency"}


def _serving(result: Result, job: Job) -> Iterator[str]:
    is_full = not job.scale.reductions
    shares = [head for of in SERVING_SHARES.values() for head in _share_headings(result.rows, of, is_full=is_full)]
    headings = ("Input Length", "Output Length", *SERVING_COLUMNS.values(), *shares)
    if job.scale.reductions:
        yield "## Lockstep"
        yield table(headings, [_cells(row, None) for row in result.rows], centred=True)
    else:
        for one in job.seed.tables:
            yield f"## {one.system}"
            yield table(headings, [_cells(row, one.system) for row in result.rows], centred=True)
    yield from _at_document_loads(result, job)
    runs = [run for row in result.rows for run in (row, *row["at_document_load"].values())]
    failed = sum(run["errors"] for run in runs)
    yield f"- {failed} of {sum(run['requests'] for run in runs)} requests failed." if failed else ""


LOADED_COLUMNS: Mapping[str, str] = {name: SERVING_COLUMNS[name] for name in (
    "requests_per_second", "output_tokens_per_second", "latency_per_output_token_ms",
)}  # fmt: skip


def _at_document_loads(result: Result, job: Job) -> Iterator[str]:
    """A table for each system whose rows have lengths of the run."""
    is_full = not job.scale.reductions
    for one in job.seed.tables:
        own = [row for row in result.rows if one.system in row["at_document_load"]]
        if not own:
            continue
        yield f"## At the concurrency of {one.system}: throughput × latency per output token"
        shares = _share_headings([row["at_document_load"][one.system] for row in own], ", throughput", is_full=is_full)
        headings = ("Input Length", "Output Length", "Concurrency", "Streams", *LOADED_COLUMNS.values(), *shares)
        yield table(headings, [_loaded_cells(row, one.system, is_full=is_full) for row in own], centred=True)


def _loaded_cells(row: Row, system: str, *, is_full: bool) -> list[object]:
    ours, theirs = row["at_document_load"][system], (row["document"] or {}).get(system, {})
    theirs = {**theirs, "throughput_percent": theirs.get("loaded_throughput_percent")}
    values = [_pair(ours[name], theirs.get(name), is_full=is_full) for name in LOADED_COLUMNS]
    shares = _shares(ours, theirs, "throughput_percent", is_full=is_full)
    return [row["input_length"], row["output_length"], f"{ours['concurrency']:.1f}", ours["streams"], *values, *shares]


def _cells(row: Row, system: str | None) -> list[object]:
    theirs = (row["document"] or {}).get(system, {})
    is_full = system is not None
    values = [_pair(row[name], theirs.get(name), is_full=is_full) for name in SERVING_COLUMNS]
    shares = [share for name in SERVING_SHARES for share in _shares(row, theirs, name, is_full=is_full)]
    return [row["input_length"], row["output_length"], *values, *shares]


# -------------------------------------------------------------------------------------------------------------- flexgen


def _flexgen(result: Result, job: Job) -> Iterator[str]:
    is_full = not job.scale.reductions
    cells = []
    for row in result.rows:
        theirs = row["document"] or {}
        rates = [
            _pair(row[f"{kind}_tokens_per_second"], theirs.get(f"{kind}_tokens_per_second"), "", 1, is_full=is_full)
            for kind in KINDS
        ]
        shares = _shares(row, theirs, "percent_of_limit", is_full=is_full)
        level = _number(row["level_tokens_per_second"], 1)
        peak = _pair(_peak_gib(row), theirs.get("peak_gpu_memory_gb"), "", 3, is_full=is_full)
        sizes = [row["sequences_at_once"], _number(_computed_gib(row), 3), peak]
        cells.append([row["schedule"], row["num_gpu_batches"], row["num_blocks"], *sizes, *rates, level, *shares])
    rates = [f"{kind} token/s".capitalize() for kind in KINDS]
    headings = ["Schedule", "n", "Blocks", "Sequences", "Computed GB", "Peak GB", *rates, "Level"]
    yield table([*headings, *_share_headings(result.rows, ", total", is_full=is_full)], cells)


def _computed_gib(row: Row) -> float:
    """Weights, keys and values, and activations between two layers; libraries and all else come on top."""
    return sum(row[f"{name}_size_bytes"] or 0 for name in ("model", "cache", "hidden")) / GIB


def _peak_gib(row: Row) -> float | None:
    """On the device, as it was measured."""
    num_bytes = row["peak_gpu_memory_bytes"] or row["peak_host_memory_bytes"]
    return None if num_bytes is None else num_bytes / GIB
