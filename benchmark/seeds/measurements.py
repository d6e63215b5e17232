"""A document's sweep as commands of this benchmark, and rows of what they found beside the document's.

Every command runs in a process of its own, on random weights, and leaves its result in a folder. A row has ours by the
names of its command; `document`, where the whole sweep was run, has the document's figures by its tables, with the
share of the limit of its hardware.

Less of a document's layers and sizes can be run, which the title then says, and no figure of the document stands beside
it. Not a reduction: the dtype, the number of shards and the streams of a load that the document does not name.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmark.cost.roofline import ServedModel
from benchmark.engine.schedules import DIAGONAL, SCHEDULES
from benchmark.launch import flags_of, started_command, stop_command
from benchmark.options import option
from benchmark.result import BenchError
from benchmark.seeds import limits
from benchmark.seeds.documents import BLOCKS, REQUESTS_PER_STREAM, Scale, Seed, Table, concurrency
from benchmark.seeds.limits import Limit, Machine, document_percents, of_document, percent

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What is run of a document on which machine. config: the file of the model's shape. cpu_kernels: as a flag."""

    seed: Seed
    scale: Scale
    machine: Machine
    dtype: str
    num_shards: Sequence[int]
    config: Path
    cpu_kernels: str | None = None

    @property
    def served(self) -> ServedModel:
        """The model as it is run."""
        return ServedModel(self.seed.model(self.scale.layers).shape, self.dtype, on_cpu=self.machine.is_cpu)

    @property
    def flags(self) -> list[str]:
        """What every command is told."""
        device = "cpu" if self.machine.is_cpu else "cuda"
        flags = ["--random-weights", str(self.config), "--dtype", self.dtype, "--device", device]
        return flags + flags_of({"--cpu-kernels": self.cpu_kernels})

    def sizes(self, *names: str) -> list[str]:
        """Options with the scale's sizes."""
        found = []
        for name in names:
            value = self.scale.sizes[name]
            found += [option(name), *map(str, value if isinstance(value, list) else [value])]
        return found

    def limit(self, num_shard: int) -> Limit:
        """The best of this machine, measured now. Asked before and after what is held against it."""
        ceilings = limits.ceilings_of(self.machine, self.served, num_shard)
        devices = 1 if self.machine.is_cpu else num_shard
        return Limit(replace(self.served, ranks=num_shard), ceilings, self.machine.free_bytes * devices)


Command = Callable[[Sequence[str]], Mapping[str, Any]]  # a command line to its result


def run_command(arguments: Sequence[str]) -> Mapping[str, Any]:
    """Run a command of this benchmark; its result. Raises BenchError with its own sentence where it fails."""
    print(f"lockstep-bench {' '.join(arguments)}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-reproduce-") as folder:
        process = started_command([*arguments, "--output", folder])
        try:
            reasons = list(_passed_on(process))
            process.wait()
        finally:
            stop_command(process)
        if process.returncode:
            raise BenchError(f"{arguments[0]} failed: {(reasons or ['it did not say why'])[-1]}")
        return dict(json.loads((Path(folder) / "result.json").read_text()))


def _passed_on(process: subprocess.Popen[str]) -> Iterator[str]:
    """The command's errors; what else it says is passed on to our standard error."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("error: "):
            yield line.removeprefix("error: ").rstrip()
        else:
            print(line, end="", file=sys.stderr, flush=True)


def num_commands(job: Job) -> int:
    """How many commands the sweep is."""
    if job.seed.kind == "latency":
        return len(job.num_shards)
    if job.seed.kind == "serving":
        return 2 + len(_document_loads(job))
    return len(job.scale.several("num_gpu_batches")) * len(job.seed.tables)


def rows(job: Job, begin: Callable[[], object], run: Command = run_command) -> Iterator[list[Row]]:
    """The sweep, in parts that are finished one after the other; `begin` is called before each command.

    Raises BenchError.
    """

    def run_next(arguments: Sequence[str]) -> Mapping[str, Any]:
        begin()
        return run(arguments)

    return {"latency": _latency, "serving": _serving, "flexgen": _flexgen}[job.seed.kind](job, run_next)


# -------------------------------------------------------------------------------------------------------------- latency


def _latency(job: Job, run: Command) -> Iterator[list[Row]]:
    names = ("batch_size", "sequence_length", "decode_length", "runs", "warmups")
    for num_shard in job.num_shards:
        # The document's times are of one step at a time, text included.
        found = run(["latency", *job.flags, "--num-shard", str(num_shard), *job.sizes(*names), "--like-tgi"])
        there = num_shard if num_shard in job.seed.num_shards else job.seed.num_shards[0]
        limit = of_document(job.seed, there)
        yield [
            row | {"num_shard": num_shard, "document": _document_step(job, row, there, limit)} for row in found["rows"]
        ]


def _document_step(job: Job, row: Row, num_shard: int, limit: Limit) -> Row | None:
    """The document's figures of a step by so many devices, from its tables of times and of rates."""
    if job.scale.reductions:
        return None
    times, rates = (
        table.row(step=row["step"], batch_size=row["batch_size"])
        for table in job.seed.tables
        if table.num_shard == num_shard
    )
    if times is None:
        return None
    return {"num_shard": num_shard, **times, **(rates or {}), **document_percents(job.seed, limit, times)}


# -------------------------------------------------------------------------------------------------------------- serving


class Load(NamedTuple):
    """A load by which a document's row may have been measured."""

    given: int
    generated: int
    streams: int


def _document_loads(job: Job) -> list[Load]:
    """Those of all rows that are run, each once: throughput × latency, in whole streams."""
    lengths = [(i, o) for i in job.scale.several("input_length") for o in job.scale.several("output_length")]
    rows = [table.row(input_length=i, output_length=o) for i, o in lengths for table in job.seed.tables]
    return list(dict.fromkeys(_load(row) for row in rows if row is not None))


def _load(row: Row | Mapping[str, Any]) -> Load:
    return Load(row["input_length"], row["output_length"], max(1, round(concurrency(row))))


def _serving(job: Job, run: Command) -> Iterator[list[Row]]:
    """Throughputs from many streams and latencies from one, then both from as many as the document's figures make."""
    lengths = job.sizes("input_length", "output_length")
    single = job.scale.one("num_single_requests")
    loads = [(job.scale.streams, job.scale.one("num_requests")), (1, single)]
    limit = job.limit(1)
    found = []
    for streams, requests in loads:
        load = ["--concurrency", str(streams), "--num-requests", str(requests)]
        found.append(run(["serving", *job.flags, "--num-shard", "1", *lengths, *load])["rows"])
    at_load = {load: _at_load(job, run, load) for load in _document_loads(job)}
    limit = limit.best_of(job.limit(1))
    alone = {(row["input_length"], row["output_length"]): row for row in found[1]}
    theirs = of_document(job.seed, 1)
    cells = [_cell(job, row, alone[row["input_length"], row["output_length"]], limit) for row in found[0]]
    for cell in cells:
        given, generated = cell["input_length"], cell["output_length"]
        cell["document"] = _document_cells(job, given, generated, theirs)
        cell["at_document_load"] = {
            table.system: _loaded_cell(row, at_load[_load(row)], limit)
            for table in job.seed.tables
            if (row := table.row(input_length=given, output_length=generated)) is not None
        }
    yield cells


def _at_load(job: Job, run: Command, load: Load) -> Row:
    requests = min(REQUESTS_PER_STREAM * load.streams, job.scale.one("num_requests"))
    lengths = ["--input-length", str(load.given), "--output-length", str(load.generated)]
    streams = ["--concurrency", str(load.streams), "--num-requests", str(requests)]
    (row,) = run(["serving", *job.flags, "--num-shard", "1", *lengths, *streams])["rows"]
    return dict(row)


def _loaded_cell(document: Mapping[str, Any], ours: Row, limit: Limit) -> Row:
    """Ours at the load of a document's row."""
    load = _load(document)
    rate = ours["output_tokens_per_second"]
    most = limit.tokens_per_second(load.streams, load.given, load.generated)
    names = ("requests_per_second", "output_tokens_per_second", "latency_per_output_token_ms")
    return {
        "concurrency": concurrency(document),
        "streams": load.streams,
        **{name: ours[name] for name in names},
        "throughput_percent": percent(most, rate, is_rate=True),
        "limit": limit.source,
        "errors": ours["errors"],
        "requests": ours["requests"],
    }


def _cell(job: Job, loaded: Row, alone: Row, limit: Limit) -> Row:
    given, generated = loaded["input_length"], loaded["output_length"]
    together = min(job.scale.streams, job.scale.one("num_requests"))
    most, least = limit.tokens_per_second(together, given, generated), limit.output_token_ms(given, generated)
    latency = alone["latency_per_output_token_ms"]
    shares = {
        "throughput_percent": percent(most, loaded["output_tokens_per_second"], is_rate=True),
        "latency_percent": percent(least, latency, is_rate=False),
    }
    return {
        "input_length": given,
        "output_length": generated,
        "requests_per_second": loaded["requests_per_second"],
        "output_tokens_per_second": loaded["output_tokens_per_second"],
        "latency_per_token_ms": alone["latency_per_token_ms"],
        "latency_per_output_token_ms": latency,
        **shares,
        "limit": limit.source,
        "percent_of_limit": max((share for share in shares.values() if share is not None), default=None),
        "errors": loaded["errors"] + alone["errors"],
        "requests": loaded["requests"] + alone["requests"],
        "concurrency": job.scale.streams,
        "request_rate": None,
    }


def _document_cells(job: Job, given: int, generated: int, limit: Limit) -> dict[str, Row] | None:
    """By system. A document that lacks the lengths has none."""
    if job.scale.reductions:
        return None
    found = {table.system: table.row(input_length=given, output_length=generated) for table in job.seed.tables}
    return {name: {**row, **document_percents(job.seed, limit, row)} for name, row in found.items() if row is not None}


# -------------------------------------------------------------------------------------------------------------- flexgen


def _flexgen(job: Job, run: Command) -> Iterator[list[Row]]:
    """Runs for each number of batches: one block each, as the document's.

    In the diagonal order, which fills and empties once in a run, it is several blocks.
    """
    tables = {table.schedule: table for table in job.seed.tables}
    if missing := tables.keys() - set(SCHEDULES):
        raise BenchError(f"{job.seed.name} cannot be reproduced yet: there is no schedule {', '.join(sorted(missing))}")
    size, lengths = job.scale.one("gpu_batch_size"), job.sizes("input_length", "output_length")
    given, generated = job.scale.one("input_length"), job.scale.one("output_length")
    limit, theirs = job.limit(1), of_document(job.seed, 1)
    for count in job.scale.several("num_gpu_batches"):
        for name, table in tables.items():
            blocks = BLOCKS if name == DIAGONAL else 1
            block = ["--num-gpu-batches", str(count), "--gpu-batch-size", str(size)]
            prompts = ["--num-prompts", str(blocks * count * size)]
            found = run(["offline", *job.flags, "--num-shard", "1", "--schedule", name, *block, *prompts, *lengths])
            limit = limit.best_of(job.limit(1))
            most = limit.tokens_per_second(count * size, given, generated)
            yield [
                row
                | {
                    "num_blocks": blocks,
                    "percent_of_limit": percent(most, row["total_tokens_per_second"], is_rate=True),
                    "limit": limit.source,
                    "document": _document_block(job, table, count, theirs),
                }
                for row in found["rows"]
            ]


def _document_block(job: Job, table: Table, count: int, limit: Limit) -> Row | None:
    row = table.row(num_gpu_batches=count)
    if job.scale.reductions or row is None:
        return None
    return {"system": table.system, **row, **document_percents(job.seed, limit, row)}
