"""`lockstep-bench plan`: what a model needs, and could do at best, on hardware that one may not have yet.

Arithmetic over a shape and a data sheet: nothing is loaded or started, and torch is not imported unless the device is
`this`, whose ceilings are measured. Floors are limits, not forecasts: docs/roofline.md says what they leave out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmark import options, shapes
from benchmark.report import BenchError, Result, RunContext, arguments_of, prepare_output, published, table
from benchmark.roofline import BytesAndFlops, Ceilings, Probe, ServedModel, describe, mean_context
from server.quant import sizes

RESERVED_BYTES = 2 * 10**9  # of a GPU, for its context, libraries and fragmentation
CPU_HEADROOM = 0.2  # of the memory that is free, left to other programs; as the server leaves it
STEPS = ("Prefill", "Decode (token)", "Decode (total)")


@dataclass(frozen=True)
class DatasheetDevice:
    """One accelerator, or the whole of a CPU."""

    bytes_per_second: float
    flops_16: float  # dense matrix products in float16 or bfloat16
    flops_32: float
    memory_bytes: float
    is_cpu: bool = False  # its shards share it
    ops_int8: float = 0.0  # of products of int8; 0: as fast as in 16 bits
    ops_float8: float = 0.0  # of float8; 0: it has none, and multiplies in 16 bits

    def ceilings(self, served: ServedModel, num_shards: int) -> Ceilings:
        """What `num_shards` of this device can do at best for a model; the shards of a CPU share it."""
        ops = {"int8": self.ops_int8, "float8": self.ops_float8}.get(served.product_kind, 0.0)
        return replace(self.dense_ceilings(served.dtype, num_shards), ops_8_per_second=ops)

    def dense_ceilings(self, dtype: str, num_shards: int) -> Ceilings:
        """The same for a dtype, where nothing is quantised."""
        flops = self.flops_32 if dtype == "float32" else self.flops_16
        return Ceilings(self.bytes_per_second, flops, 1 if self.is_cpu else num_shards)

    def free_bytes(self, weights: float, activations: float, num_shards: int) -> float:
        """Bytes that one shard may take for its KV cache, beside its weights."""
        if self.is_cpu:
            return (self.memory_bytes / num_shards - weights) * (1 - CPU_HEADROOM)
        return self.memory_bytes - RESERVED_BYTES - weights - activations


# Data sheets, without sparsity; memory as CUDA reports it. The H200's figures were measured (a copy, a large product):
# its data sheet says 4.8 TB/s and 989 TFLOP/s. Those of 2020 have no float8.
DEVICES: Mapping[str, DatasheetDevice] = {
    "a100-40g": DatasheetDevice(1.555e12, 312e12, 19.5e12, 42.3e9, ops_int8=624e12),
    "a100-80g": DatasheetDevice(2.039e12, 312e12, 19.5e12, 85.0e9, ops_int8=624e12),
    "h100": DatasheetDevice(3.35e12, 989e12, 67e12, 85.0e9, ops_int8=1979e12, ops_float8=1979e12),
    "h200": DatasheetDevice(4.3e12, 790e12, 67e12, 150.1e9, ops_int8=1979e12, ops_float8=1979e12),
    "l4": DatasheetDevice(300e9, 121e12, 30.3e12, 23.6e9, ops_int8=242e12, ops_float8=242e12),
    "a6000": DatasheetDevice(768e9, 154.8e12, 38.7e12, 51.0e9, ops_int8=309.7e12),
}
THIS = "this"


@dataclass(frozen=True)
class Capacity:
    """What the memory of a device holds when the model is split over `num_shard` shards."""

    num_shard: int
    weight_bytes_per_shard: int
    kv_bytes_per_token_per_shard: int
    kv_tokens: int  # that fit, at least 0
    max_batch_total_tokens: int  # that the server would infer
    problem: str | None  # why this split cannot be served


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
    parser.add_argument("--max-total-tokens", type=options.positive, default=2048, help="as in the server (2048)")
    parser.add_argument("--max-batch-prefill-tokens", type=options.positive, default=4096, help="likewise (4096)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for result.md and result.json")


def run(args: argparse.Namespace) -> int:
    """Print what fits on the device and the floors of its steps; 0. Raises BenchError."""
    prepare_output(args.output)
    named = shapes.find(args.model_id)
    quantize = stored_as(named, args.quantize, args.quantize_head)
    dtype = args.dtype or _default_dtype(named.shape, args.device)
    on_cpu = args.device == THIS and _is_cpu()
    served = ServedModel(named.shape, dtype, quantize, args.kv_cache_dtype, on_cpu)
    device, source = _this(served) if args.device == THIS else (DEVICES[args.device], _data_sheet(args.device))
    capacities = [capacity(served, device, num_shard, args) for num_shard in args.num_shard]
    if all(found.problem for found in capacities):
        raise BenchError(f"{named.name} on {args.device}: " + "; ".join(f.problem for f in capacities if f.problem))
    result = Result(_context(args, named.name, served), notes=[source, *_notes(args)])
    result.extra["capacity"] = [asdict(found) for found in capacities]
    with published(result, lambda r: markdown(r, args, named.name, served, capacities), args.output):
        result.rows = [row for found in capacities for row in rows(args, served, device, found)]
    return 0


def stored_as(named: shapes.NamedShape, quantize: str | None, head: str = "int8") -> str | None:
    """How the model's linear layers are stored, in words; None: dense. Raises BenchError for a contradiction."""
    stored = named.shape.stored
    if stored is None:
        return None if quantize is None else sizes.in_flight(quantize, head).description
    if quantize is not None and quantize not in stored.names:
        raise BenchError(
            f"--quantize is {quantize}, but {named.name} is quantised already, as {stored.description}: leave it out"
        )
    return stored.description


# ---------------------------------------------------------------------------------------------------- arithmetic


def capacity(served: ServedModel, device: DatasheetDevice, num_shard: int, args: argparse.Namespace) -> Capacity:
    """How many tokens of KV cache fit beside the weights of one split."""
    shape = served.shape
    weights = shape.weight_bytes(served.dtype, served.quantize) // num_shard
    weights += shape.padding_bytes(served.quantize, num_shard)
    copies = max(1, num_shard // shape.spec.num_kv_heads)  # shards that hold the same key-value head
    kv_bytes = served.kv_bytes_per_token * copies // num_shard
    free = device.free_bytes(weights, _activation_bytes(served, num_shard, args.max_batch_prefill_tokens), num_shard)
    tokens = max(0, int(free // (kv_bytes * shapes.BLOCK_SIZE)) * shapes.BLOCK_SIZE)
    useful = args.max_concurrent_requests * -(-args.max_total_tokens // shapes.BLOCK_SIZE) * shapes.BLOCK_SIZE
    problem = shape.split_problem(num_shard)
    if problem is None and not tokens:
        problem = f"{weights / 1e9:.2f} GB of weights a shard leave no room for a KV cache with {num_shard} shards"
    return Capacity(num_shard, weights, kv_bytes, tokens, min(tokens, useful), problem)


def _activation_bytes(served: ServedModel, num_shard: int, prefill_tokens: int) -> float:
    """Bytes of the largest prompt step: the residual stream and its copies, whole, and this shard's mlp columns."""
    shape = served.shape
    width = 4 * shape.spec.hidden_size + 3 * max(layer.mlp.width for layer in shape.spec.layers) / num_shard
    return prefill_tokens * width * shapes.DTYPE_BYTES[served.dtype]


def rows(
    args: argparse.Namespace, served: ServedModel, device: DatasheetDevice, found: Capacity
) -> Iterator[dict[str, Any]]:
    """A row with its floor for each step and batch size of one split, in the order of the tables."""
    if found.problem:
        return
    ceilings = device.ceilings(served, found.num_shard)
    for step in STEPS:
        for batch_size in args.batch_size:
            needed, tokens = _step(args, served, step, batch_size)
            floor = needed.floor_ms(ceilings)
            yield {
                "num_shard": found.num_shard,
                "step": step,
                "batch_size": batch_size,
                "floor_ms": floor,
                "bound_by": needed.bound_by(ceilings),
                "tokens_per_second": 1000 * tokens / floor,
                "fits": batch_size * (args.sequence_length + args.decode_length) <= found.max_batch_total_tokens,
            }


def _step(args: argparse.Namespace, served: ServedModel, step: str, batch_size: int) -> tuple[BytesAndFlops, int]:
    """What the step needs at least, and how many tokens it covers."""
    if step == "Prefill":
        return served.prefill(batch_size, args.sequence_length), batch_size * args.sequence_length
    count = 1 if step == "Decode (token)" else args.decode_length - 1
    one = served.decode(batch_size, mean_context(args.sequence_length, args.decode_length))
    return one.times(count), batch_size * count


def _default_dtype(shape: shapes.ModelShape, device: str) -> str:
    """The published one; a CPU computes bfloat16 where it would be slow in float16."""
    if device != THIS or shape.dtype != "float16":
        return shape.dtype
    return "bfloat16" if _is_cpu() else "float16"


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
        name,
        served.dtype,
        threads=threads,
        num_devices=1,
        step_weight_bytes=weights,
        product_kind=served.product_kind,
    )
    for _ in range(3):
        probe.measure()
    ceilings = probe.best
    memory = _free_host_bytes() if is_cpu else torch.cuda.mem_get_info()[0]
    flops, ops = ceilings.flops_per_second, ceilings.ops_8_per_second  # of the kind that was measured
    device = DatasheetDevice(ceilings.bytes_per_second, flops, flops, memory, is_cpu, ops, ops)
    return device, f"{describe(probe.seen)} Free memory of {name}: {memory / 1e9:.1f} GB."


def _free_host_bytes() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


# -------------------------------------------------------------------------------------------------------- report


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
        f"{device.memory_bytes / 1e9:g} GB."
    )


def _notes(args: argparse.Namespace) -> list[str]:
    context = mean_context(args.sequence_length, args.decode_length)
    return [
        f"Floors are limits and not forecasts, of decode steps with a context of {context:g} tokens; "
        "docs/roofline.md has the formulas.",
        f"max_batch_total_tokens: what fits, at most {args.max_concurrent_requests} requests of "
        f"{args.max_total_tokens} tokens. On a GPU, {RESERVED_BYTES / 1e9:g} GB and the activations of "
        f"{args.max_batch_prefill_tokens} prompt tokens are kept free.",
    ]


def markdown(
    result: Result, args: argparse.Namespace, model: str, served: ServedModel, capacities: list[Capacity]
) -> str:
    """What fits, then one table of floors and one of ceilings for each number of shards."""
    parts = [_arguments_table(args, model, served), _capacity_table(capacities)]
    for found in capacities:
        own = [row for row in result.rows if row["num_shard"] == found.num_shard]
        title = f"# Tensor Parallel (TP) - {found.num_shard} shard{'s' if found.num_shard > 1 else ''}"
        parts.append(
            f"{title}\n{_floor_table(own)}\n\n\n{_throughput_table(own)}" if own else f"{title}\n{found.problem}"
        )
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in result.notes)])


def _arguments_table(args: argparse.Namespace, model: str, served: ServedModel) -> str:
    shape = served.shape
    pairs = [
        ("Model", model),
        ("Parameters", f"{shape.total_parameters / 1e9:.3f} B"),
        ("Device", args.device),
        ("Dtype", served.dtype),
        ("Quantize", served.quantize),
        ("KV cache dtype", served.kv_cache_dtype or "auto"),
        ("Sequence Length", args.sequence_length),
        ("Decode Length", args.decode_length),
    ]
    return table(("Parameter", "Value"), pairs)


def _capacity_table(capacities: list[Capacity]) -> str:
    headers = ("Shards", "Weights per shard", "KV per token and shard", "KV tokens that fit", "max_batch_total_tokens")
    cells = [
        [
            found.num_shard,
            f"{found.weight_bytes_per_shard / 1e9:.2f} GB",
            f"{found.kv_bytes_per_token_per_shard} B",
            found.kv_tokens,
            "-" if found.problem else found.max_batch_total_tokens,
        ]
        for found in capacities
    ]
    return table(headers, cells)


def _floor_table(rows: list[dict[str, Any]]) -> str:
    cells = [[r["step"], r["batch_size"], _unless_too_large(r, f"{r['floor_ms']:.2f} ms"), r["bound_by"]] for r in rows]
    return table(("Step", "Batch Size", "Floor", "Bound by"), cells)


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
