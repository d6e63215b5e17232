"""`lockstep-bench plan`: what a model needs, and could do at best, on hardware that one may not have yet.

Arithmetic over a shape and a data sheet: nothing is loaded or started, and torch is not imported unless the device is
`this`, whose ceilings are measured. Floors are limits, not forecasts: docs/benchmarking.md says what they leave out.
The expected time beside them is that of `step_times.Roofline`, as in `simulate`, so that a step has one prediction,
or of measured steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmark import options
from benchmark.cost import roofline, shapes
from benchmark.cost.devices import (
    DEVICES,
    RESERVED_BYTES,
    Capacity,
    DatasheetDevice,
    Probe,
    describe,
    least_capacity,
    stored_as,
)
from benchmark.cost.roofline import MEASURED, BytesAndFlops, Pipeline, ServedModel, mean_context, pipeline
from benchmark.cost.step_times import EFFICIENCY, MeasuredSteps, Roofline, StepWork, measured_steps
from benchmark.report.publishing import published
from benchmark.result import BenchError, Result, RunContext, arguments_of, prepare_output, table
from host.cgroups import available_bytes
from host.cpu_kinds import AUTO, good_dtypes
from router.config import UNBOUNDED_TOTAL_TOKENS
from router.scheduling.limits import Room
from router.scheduling.queue import blocks_for
from server.config import dtype_for
from server.quantisation import sizes

THIS = "this"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument(
        "--model-id", required=True, metavar="SHAPE",
        help="a config.json, a model folder, or one of " + ", ".join(shapes.names()),
    )  # fmt: skip
    parser.add_argument("--num-shard", type=options.positive, nargs="+", default=[1, 2, 4, 8], metavar="N")
    parser.add_argument("--device", choices=[*DEVICES, THIS], default=THIS, help="(default: this)")
    parser.add_argument("--dtype", choices=list(shapes.DTYPE_BYTES), help="(default: the published one)")
    parser.add_argument(
        "--quantize", choices=list(sizes.IN_FLIGHT), help="format of the linear layers, made while loading"
    )
    parser.add_argument("--quantize-head", choices=("int8", "none"), default="int8", help="as in the server (int8)")
    parser.add_argument("--kv-cache-dtype", choices=shapes.KV_CACHE_DTYPES, help="(default: auto, the model's)")
    parser.add_argument(
        "-b", "--batch-size", type=options.positive, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="N"
    )
    parser.add_argument("-s", "--sequence-length", type=options.positive, default=100, help="prompt tokens (100)")
    parser.add_argument("-d", "--decode-length", type=options.at_least_two, default=100, help="generated tokens (100)")
    parser.add_argument("--max-concurrent-requests", type=options.positive, default=128, help="as in the server (128)")
    parser.add_argument("--max-total-tokens", type=options.positive, help="as in the server (the model's longest)")
    parser.add_argument(
        "--max-batch-prefill-tokens", type=options.positive, default=4096, help="as in the server (4096)"
    )
    parser.add_argument(
        "--adapter-memory", type=options.number(at_least=0), default=0.0, metavar="GB",
        help="of each device, as in the server where it has adapters (0)",
    )  # fmt: skip
    parser.add_argument(
        "--efficiency", type=options.number(above=0, at_most=1), metavar="E",
        help=f"share of the limits that steps are expected to reach, as in simulate ({EFFICIENCY:g}, an assumption)",
    )  # fmt: skip
    parser.add_argument(
        "--overhead-ms", type=options.number(at_least=0), default=0.0, metavar="MS",
        help="added to every expected step, as in simulate (0)",
    )  # fmt: skip
    parser.add_argument(
        "--cost", type=Path, nargs="+", metavar="FILE",
        help="result.json of latency runs of this model on this device, for expected step times",
    )  # fmt: skip
    roofline.add_pipeline_arguments(parser)
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for result.md and result.json")


def run(args: argparse.Namespace) -> int:
    """Print what fits on the device and the floors of its steps; 0. Raises BenchError."""
    prepare_output(args.output)
    if args.cost and (args.efficiency or args.overhead_ms):
        raise BenchError("--cost has measured steps: leave out --efficiency and --overhead-ms")
    named = shapes.find(args.model_id)
    args.max_total_tokens = args.max_total_tokens or named.shape.spec.max_positions or UNBOUNDED_TOTAL_TOKENS
    quantize = stored_as(named, args.quantize, args.quantize_head)
    dtype = args.dtype or _default_dtype(named.shape, args.device)
    on_cpu = args.device == THIS and _is_cpu()
    served = ServedModel(named.shape, dtype, quantize, args.kv_cache_dtype, on_cpu)
    device, source = _this(served) if args.device == THIS else (DEVICES[args.device], _data_sheet(args.device))
    pipe, measured = pipeline(args, served), measured_steps(args, named.name, served)
    adapter_bytes = args.adapter_memory * 1e9
    capacities = [least_capacity(pipe, device, num_shard, args, adapter_bytes) for num_shard in args.num_shard]
    if all(found.problem for found in capacities):
        raise BenchError(f"{named.name} on {args.device}: " + "; ".join(f.problem for f in capacities if f.problem))
    result = Result(_context(args, named.name, served), notes=[source, *_notes(args, pipe)])
    result.extra["capacity"] = [asdict(found) for found in capacities]
    with published(result, lambda r: markdown(r, args, named.name, served, capacities), args.output):
        for found in capacities:
            if not found.problem:
                split = Planned(args, pipe.split(found.num_shard), device, measured)
                result.rows += rows(split, found.kv_tokens)
    return 0


def _default_dtype(shape: shapes.ModelShape, device: str) -> str:
    """The published one, or on this machine what a server takes in its place."""
    good = good_dtypes(AUTO) if device == THIS and _is_cpu() else shapes.DTYPE_BYTES
    return dtype_for(None, shape.dtype, good, device)[0]


def _is_cpu() -> bool:
    """Whether this machine has no GPU."""
    import torch

    return not torch.cuda.is_available()


def _this(served: ServedModel) -> tuple[DatasheetDevice, str]:
    """This machine's GPU, or its CPU where it has none, and where the figures come from."""
    import torch

    is_cpu = served.on_cpu
    name = "cpu" if is_cpu else torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    weights = int(served.step_weight_bytes())
    probe = Probe(
        name, served.dtype, threads=threads, num_devices=1, step_weight_bytes=weights, product_kind=served.product_kind
    )
    for _ in range(3):
        probe.measure()
    ceilings = probe.best
    memory = available_bytes() if is_cpu else torch.cuda.mem_get_info()[0]
    flops, ops = ceilings.flops_per_second, ceilings.ops_8_per_second  # of the kind that was measured
    device = DatasheetDevice(ceilings.bytes_per_second, flops, flops, memory, is_cpu, ops, ops, source=MEASURED)
    return device, f"{describe(probe.seen)} Free memory of {name}: {memory / 1e9:.1f} GB."


# --------------------------------------------------------------------------------------------------------------- report


def _context(args: argparse.Namespace, model: str, served: ServedModel) -> RunContext:
    return RunContext.gather(
        "plan",
        model=model,
        device=args.device,
        dtype=served.dtype,
        num_shard=max(args.num_shard),
        threads=0,
        quantize=served.quantize,
        arguments=arguments_of(args),
        work={"model": model, "sequence_length": args.sequence_length, "decode_length": args.decode_length},
    )


def _data_sheet(name: str) -> str:
    device = DEVICES[name]
    return (
        f"{name}: {device.bytes_per_second / 1e12:g} TB/s, {device.flops_16 / 1e12:g} TFLOP/s in 16 bits, "
        f"{device.memory_bytes / 1e9:g} GB, {device.link_bytes_per_second / 1e9:g} GB/s to other shards: "
        "NVIDIA's data sheet, dense."
    )


def _notes(args: argparse.Namespace, pipe: Pipeline) -> list[str]:
    longest = pipe.stages[0].shape.spec.max_positions
    context = mean_context(args.sequence_length, args.decode_length)
    length = args.sequence_length + args.decode_length
    too_long = (
        f"**No server would take this**: --sequence-length and --decode-length make {length} tokens, and the model's "
        f"longest sequence is {longest}: shorten one of them."
    )
    return [
        *([too_long] if 0 < longest < length else []),
        f"Floors are limits and not forecasts, of decode steps with a context of {context:g} tokens; "
        "docs/benchmarking.md has the formulas.",
        f"max_batch_total_tokens: what fits, at most {args.max_concurrent_requests} requests of "
        f"{args.max_total_tokens} tokens. On a GPU, {RESERVED_BYTES / 1e9:g} GB, the activations of "
        f"{args.max_batch_prefill_tokens} prompt tokens and the captured decode steps are kept free.",
        *([f"{args.adapter_memory:g} GB of each device are for adapters."] if args.adapter_memory else []),
        "All-reduces: what the sums over the shards add to the floor at least; the ceilings of throughput include it. "
        + _expected(args),
        *([] if len(pipe.stages) == 1 else [pipe.sentence()]),
    ]


def _expected(args: argparse.Namespace) -> str:
    if args.cost is not None:
        return "Expected: as measured (--cost); of several stages each takes its share by the floors."
    return (
        f"Expected: {100 * (args.efficiency or EFFICIENCY):g} % of the limits and {args.overhead_ms:g} ms a step, and "
        "all-reduces, the model of `simulate`. That share is an assumption: measure (`latency`) and give --cost."
    )


def markdown(
    result: Result, args: argparse.Namespace, model: str, served: ServedModel, capacities: list[Capacity]
) -> str:
    """What fits, then one table of floors and one of ceilings for each number of shards."""
    parts = [_arguments_table(args, model, served), _capacity_table(capacities, args.max_total_tokens)]
    for found in capacities:
        own = [row for row in result.rows if row["num_shard"] == found.num_shard]
        has_links = args.pipeline_parallel > 1
        title = f"# Tensor Parallel (TP) - {found.num_shard} shard{'s' if found.num_shard > 1 else ''}"
        parts.append(
            f"{title}\n{_floor_table(own, has_links=has_links)}\n\n\n{_throughput_table(own)}"
            if own
            else f"{title}\n{found.problem}"
        )
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in result.notes)])


def _arguments_table(args: argparse.Namespace, model: str, served: ServedModel) -> str:
    shape = served.shape
    stages = [] if args.pipeline_parallel == 1 else [("Pipeline stages", args.pipeline_parallel)]
    pairs = [
        ("Model", model),
        ("Parameters", f"{shape.total_parameters / 1e9:.3f} B"),
        ("Device", args.device),
        ("Dtype", served.dtype),
        ("Quantize", served.quantize),
        ("KV cache dtype", served.kv_cache_dtype or "auto"),
        *stages,
        ("Sequence Length", args.sequence_length),
        ("Decode Length", args.decode_length),
    ]
    return table(("Parameter", "Value"), pairs)


def _capacity_table(capacities: list[Capacity], max_total_tokens: int) -> str:
    fitting = ("KV tokens that fit", "max_batch_total_tokens", "Longest sequence")
    has_states = any(found.state_bytes_per_sequence for found in capacities)
    states = ("Kept per sequence and shard",) if has_states else ()
    headers = ("Shards", "Weights per shard", "KV per token and shard", *states, *fitting)
    cells = [
        [
            found.num_shard,
            f"{found.weight_bytes_per_shard / 1e9:.2f} GB",
            f"{found.kv_bytes_per_token_per_shard} B",
            *([f"{found.state_bytes_per_sequence / 1e6:.1f} MB"] if has_states else []),
            found.kv_tokens,
            "-" if found.problem else found.max_batch_total_tokens,
            "-" if found.problem else min(max_total_tokens, _longest(found.kv_tokens)),
        ]
        for found in capacities
    ]
    return table(headers, cells)


def _longest(kv_tokens: int) -> int:
    return Room(kv_tokens, kv_tokens).longest(is_inferred=True)


def _floor_table(rows: list[dict[str, Any]], *, has_links: bool) -> str:
    cells = [
        [
            r["step"],
            r["batch_size"],
            _unless_too_large(r, f"{r['floor_ms']:.2f} ms"),
            r["bound_by"],
            f"{r['all_reduce_ms']:.2f} ms",
            *([f"{r['links_ms']:.2f} ms"] if has_links else []),
            f"{r['expected_ms']:.2f} ms",
        ]
        for r in rows
    ]
    links = ["Links"] if has_links else []
    return table(("Step", "Batch Size", "Floor", "Bound by", "All-reduces", *links, "Expected"), cells)


def _throughput_table(rows: list[dict[str, Any]]) -> str:
    names = {"Prefill": "Prefill", "Decode (total)": "Decode"}
    cells = [
        [names[r["step"]], r["batch_size"], _unless_too_large(r, f"{r['tokens_per_second']:.2f} tokens/secs")]
        for r in rows
        if r["step"] in names
    ]
    return table(("Step", "Batch Size", "Ceiling"), cells)


def _unless_too_large(row: dict[str, Any], text: str) -> str:
    return text if row["fits"] else "does not fit"


# ----------------------------------------------------------------------------------------------------------------- rows


STEPS = ("Prefill", "Decode (token)", "Decode (total)")


@dataclass(frozen=True)
class Planned:
    """What is planned: a pipeline whose stages know how many ranks each has, and a device for each of those."""

    args: argparse.Namespace
    pipe: Pipeline
    device: DatasheetDevice
    measured: MeasuredSteps | None = None

    @property
    def tokens_of_a_sequence(self) -> int:
        """Slots that one sequence of the planned length takes in the cache: whole blocks."""
        length = self.args.sequence_length + self.args.decode_length
        return blocks_for(length, shapes.BLOCK_SIZE) * shapes.BLOCK_SIZE


def rows(planned: Planned, kv_tokens: int) -> Iterator[dict[str, Any]]:
    """A row for each step and batch size, in the order of the tables. kv_tokens: that fit into the cache."""
    for step in STEPS:
        for batch_size in planned.args.batch_size:
            fits = batch_size * planned.tokens_of_a_sequence <= kv_tokens
            yield _Row(planned, step, batch_size).figures() | {"fits": fits}


@dataclass(frozen=True)
class _Row:
    """One step of so many sequences, which are divided into the pipeline's micro-batches."""

    planned: Planned
    step: str
    batch_size: int

    def figures(self) -> dict[str, Any]:
        """Milliseconds of the whole step, or of all decode steps; what a micro-batch takes is multiplied here."""
        pipe, device = self.planned.pipe, self.planned.device
        ceilings = [device.ceilings(stage) for stage in pipe.stages]
        needs = [self._needs(stage) for stage in pipe.stages]
        floors = [needed.floor_ms(most) for needed, most in zip(needs, ceilings, strict=True)]
        with_sums = [floor + self._sums_ms(stage) for floor, stage in zip(floors, pipe.stages, strict=True)]
        slowest, near = floors.index(max(floors)), pipe.without_links()
        floor_ms = self._whole_ms(floors, near)
        return {
            "num_shard": pipe.stages[0].ranks,
            "step": self.step,
            "batch_size": self.batch_size,
            "floor_ms": floor_ms,
            "bound_by": needs[slowest].bound_by(ceilings[slowest]),
            "expected_ms": self._whole_ms(self._expected_ms(floors), pipe),
            "all_reduce_ms": self._whole_ms(with_sums, near) - floor_ms,
            "links_ms": self._count * pipe.links_ms(self._sequences, self._length)[0],
            "tokens_per_second": 1000 * self.batch_size * self._length * self._count / self._whole_ms(with_sums, pipe),
        }

    @property
    def _is_prefill(self) -> bool:
        return self.step == "Prefill"

    @property
    def _sequences(self) -> int:
        """Of one micro-batch."""
        return -(-self.batch_size // self.planned.pipe.lanes(self.batch_size))

    @property
    def _length(self) -> int:
        """Tokens of a sequence in the step."""
        return self.planned.args.sequence_length if self._is_prefill else 1

    @property
    def _count(self) -> int:
        return self.planned.args.decode_length - 1 if self.step == "Decode (total)" else 1

    def _whole_ms(self, stages_ms: Sequence[float], links: Pipeline) -> float:
        """From what one micro-batch takes on each stage."""
        if self._is_prefill:
            return links.prefill_ms(stages_ms, self.batch_size, self._length)
        return self._count * links.decode_ms(stages_ms, self.batch_size)

    def _needs(self, stage: ServedModel) -> BytesAndFlops:
        """What a micro-batch needs at least; of all decode steps, one."""
        args = self.planned.args
        if self._is_prefill:
            return stage.prefill(self._sequences, args.sequence_length)
        return stage.mean_decode(self._sequences, args.sequence_length, args.decode_length)

    def _sums_ms(self, stage: ServedModel) -> float:
        """What the exchanges of a micro-batch take at least."""
        tokens, encoded = self._sequences * self._length, 0
        if self._is_prefill and stage.shape.spec.encoder is not None:
            tokens, encoded = self._sequences, tokens
        return 1000 * self.planned.device.sums(stage).seconds(tokens, self._sequences, encoded)

    def _expected_ms(self, floors: Sequence[float]) -> list[float]:
        """What a micro-batch is expected to take on each stage."""
        args, stages, measured = self.planned.args, self.planned.pipe.stages, self.planned.measured
        if measured is None:
            return [self._modelled_ms(stage) for stage in stages]
        whole = measured.step_ms(self._is_prefill, self._sequences, args.sequence_length, args.decode_length)
        return [whole * floor / sum(floors) for floor in floors]

    def _modelled_ms(self, stage: ServedModel) -> float:
        """By the cost model; what an encoder does, which that does not know, by the same share of the limits."""
        args, device, count = self.planned.args, self.planned.device, self._sequences
        efficiency, ceilings, sums = args.efficiency or EFFICIENCY, device.ceilings(stage), device.sums(stage)
        cost = Roofline.of(stage, ceilings, efficiency, args.overhead_ms / 1000, sums)
        length, keys = args.sequence_length, mean_context(args.sequence_length, args.decode_length)
        if not self._is_prefill:
            return 1000 * cost.seconds(StepWork(decoding=count, context=int(count * keys), sampled=count))
        if stage.shape.spec.encoder is None:
            work = StepWork(prompt_tokens=count * length, prompt_pairs=count * length**2 / 2, sampled=count)
            return 1000 * cost.seconds(work)
        decoder = cost.seconds(StepWork(decoding=count, context=count * (length + 1), sampled=count))
        encoder_ms = stage.encode([length] * count).floor_ms(ceilings) / efficiency
        return 1000 * (decoder + sums.seconds(0, 0, count * length) - sums.seconds(0, 0)) + encoder_ms
