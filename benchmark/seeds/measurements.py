"""A document's sweep as commands of this benchmark, rows of what they found beside the document's, and their limits.

Every command runs in a process of its own, on random weights, and leaves its result in a folder. A row has ours by the
names of its command; `document`, where the whole sweep was run, has the document's figures by its tables, with the
share of the limit of its hardware: the best that a device could do of that work, by the same arithmetic for the device
at hand and for the document's, by data sheets; where there is none, of a CPU, by what was measured, as the share says.

Less of a document's layers and sizes can be run, which the title then says, and no figure of the document stands beside
it. Not a reduction: the dtype, the number of shards and the streams of a load that the document does not name.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmark.cost.devices import DEVICES, Capacity, DatasheetDevice, Machine, capacity, ceilings_of
from benchmark.cost.roofline import Ceilings, ServedModel, ceiling_of
from benchmark.cost.shapes import BLOCK_SIZE
from benchmark.engine.schedules import DIAGONAL, SCHEDULES
from benchmark.launch import flags_of, started_command, stop_command
from benchmark.options import option
from benchmark.result import BenchError
from benchmark.seeds.documents import BLOCKS, REQUESTS_PER_STREAM, Scale, Seed, Table, answer_length, concurrency

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
        ceilings = ceilings_of(self.machine, self.served, num_shard)
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


# --------------------------------------------------------------------------------------------------------------- limits


MOST_SEQUENCES = 256  # at once, of a server whose load is not named


@dataclass(frozen=True)
class Limit:
    """A model on a device. free_bytes: of all devices together, before the weights are there."""

    served: ServedModel
    ceilings: Ceilings
    free_bytes: float

    @property
    def source(self) -> str:
        """Where the ceilings come from: what a share of this limit is a share of."""
        return self.ceilings.source

    def best_of(self, other: Limit) -> Limit:
        """The same with the higher ceilings of both."""
        return replace(self, ceilings=self.ceilings.best_of(other.ceilings))

    def step_ms(self, step: str, batch_size: int, sequence_length: int, decode_length: float) -> float:
        """The least milliseconds of a step of `latency`."""
        if step == "prefill":
            return self.served.prefill(batch_size, sequence_length).floor_ms(self.ceilings)
        one = self.served.mean_decode(batch_size, sequence_length, decode_length)
        return one.times(1 if step == "decode_token" else decode_length - 1).floor_ms(self.ceilings)

    def tokens_per_second(self, sequences: float, given: int, generated: float) -> float:
        """The most generated tokens a second of sequences that run together, so many as fit at their mean length."""
        weights = self.served.shape.weight_bytes(self.served.dtype, self.served.quantize)
        room = (self.free_bytes - weights) / (self.served.kv_bytes_per_token * (given + generated / 2))
        return ceiling_of(self.served, max(1.0, min(sequences, int(room))), given, generated, self.ceilings)

    def output_token_ms(self, given: int, generated: float) -> float:
        """The least milliseconds of a request that is alone, for each of its generated tokens."""
        prefill = self.step_ms("prefill", 1, given, generated)
        return (prefill + self.step_ms("decode_total", 1, given, generated)) / generated


def of_document(seed: Seed, num_shard: int) -> Limit:
    """The limit of the document's hardware, by its data sheet."""
    device = DEVICES[seed.device]
    served = ServedModel(seed.model(None).shape, seed.dtype, ranks=num_shard)
    return Limit(served, device.ceilings(served), device.memory_bytes * num_shard)


def percent(limit: float, measured: float | None, *, is_rate: bool) -> float | None:
    """The share of a limit that was reached. is_rate: of a rate; else of a time."""
    if not measured:
        return None
    return 100 * (measured / limit if is_rate else limit / measured)


def document_percents(seed: Seed, limit: Limit, row: Mapping[str, Any]) -> dict[str, Any]:
    """Which shares of its hardware's limit a row of the document reached, by figure. limit: `of_document`."""
    sizes: Mapping[str, Any] = seed.sweep
    if seed.kind == "latency":
        floor = limit.step_ms(row["step"], row["batch_size"], sizes["sequence_length"], sizes["decode_length"])
        mean = row["mean_ms"]
        return {"percent_of_limit": percent(floor, mean, is_rate=False), "floor_ms": floor, "limit": limit.source}
    if seed.kind == "serving":
        given, generated = row["input_length"], answer_length(row)
        most = limit.tokens_per_second(MOST_SEQUENCES, given, generated)
        least = limit.output_token_ms(given, generated)
        loaded = limit.tokens_per_second(concurrency(row), given, generated)
        return {
            "throughput_percent": percent(most, row["output_tokens_per_second"], is_rate=True),
            "loaded_throughput_percent": percent(loaded, row["output_tokens_per_second"], is_rate=True),
            "latency_percent": percent(least, row["latency_per_output_token_ms"], is_rate=False),
            "limit": limit.source,
        }
    sequences = row["num_gpu_batches"] * sizes["gpu_batch_size"]
    most = limit.tokens_per_second(sequences, sizes["input_length"], sizes["output_length"])
    return {"percent_of_limit": percent(most, row["total_tokens_per_second"], is_rate=True), "limit": limit.source}


# --------------------------------------------------------------------------------------------------------------- memory


def require_room(seed: Seed, scale: Scale, machine: Machine, dtype: str, num_shard: int) -> None:
    """Refuse what the free memory cannot hold, before anything is loaded. Raises BenchError with what would fit."""
    tokens, prefill, sequences = _needed(seed, scale)
    found = _capacity(seed, scale.layers, machine, dtype, num_shard, prefill, sequences)
    if found.kv_tokens >= tokens:
        return
    whole = scale.layers or seed.num_layers
    fitting = (
        n
        for n in range(whole - 1, 0, -1)
        if _capacity(seed, n, machine, dtype, num_shard, prefill, sequences).kv_tokens >= tokens
    )
    most = next(fitting, None)
    remedy = f"give --layers {most}, which fits" if most else "give --quick, or smaller sizes"
    weights = found.weight_bytes_per_shard * num_shard / 1e9
    cache = tokens * found.kv_bytes_per_token_per_shard * num_shard / 1e9
    each = "" if machine.is_cpu else f" on each of {num_shard} GPUs" if num_shard > 1 else " on the GPU"
    kept = "a fifth is left to others" if machine.is_cpu else "a step's activations take some"
    raise BenchError(
        f"{seed.title} needs {weights:.1f} GB for {whole} layers and {cache:.1f} GB for keys and values of {tokens} "
        f"tokens, and {machine.free_bytes / 1e9:.1f} GB are free{each}, of which {kept}: {remedy}"
    )


def _needed(seed: Seed, scale: Scale) -> tuple[int, int, int]:
    """Tokens that the KV cache must hold at once, of the largest prefill, and sequences."""
    if seed.kind == "latency":
        batch, given = max(scale.several("batch_size")), scale.one("sequence_length")
        return batch * _whole(given + scale.one("decode_length")), batch * given, batch
    if seed.kind == "serving":
        longest = max(scale.several("input_length")) + max(scale.several("output_length"))
        return _whole(longest), 4096, scale.streams
    sequences = max(scale.several("num_gpu_batches")) * scale.one("gpu_batch_size")
    given = scale.one("input_length")
    return sequences * _whole(given + scale.one("output_length")), sequences * given, sequences


def _whole(tokens: int) -> int:
    """Tokens of whole blocks."""
    return -(-tokens // BLOCK_SIZE) * BLOCK_SIZE


def _capacity(
    seed: Seed, layers: int | None, machine: Machine, dtype: str, num_shard: int, prefill: int, sequences: int
) -> Capacity:
    served = ServedModel(seed.model(layers).shape, dtype, on_cpu=machine.is_cpu)
    device = DatasheetDevice(1.0, 1.0, 1.0, machine.free_bytes, machine.is_cpu)
    limits = Namespace(max_batch_prefill_tokens=prefill, max_concurrent_requests=sequences, max_total_tokens=1)
    return capacity(served, device, num_shard, limits)
