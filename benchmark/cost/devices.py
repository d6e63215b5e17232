"""Accelerators by their data sheets: what floors are held against, and what fits into their memory.

The same for every device, so that two compare.
"""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmark.cost.ceilings import DATA_SHEET, Ceilings
from benchmark.cost.roofline import Pipeline, ServedModel, Sums
from benchmark.cost.shapes import BLOCK_SIZE, DTYPE_BYTES, NamedShape
from benchmark.result import BenchError
from server.arch.footprint import LOGIT_BYTES, step_bytes
from server.quantisation import sizes

RESERVED_BYTES = 2 * 10**9  # of a GPU, for its context, libraries and fragmentation
CPU_HEADROOM = 0.2  # of the memory that is free, left to other programs; as the server leaves it


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
    link_bytes_per_second: float = math.inf  # from one to the others, in one direction
    source: str = DATA_SHEET

    def ceilings(self, served: ServedModel) -> Ceilings:
        """What those of this device that a model is split over can do at best for it; the ranks of a CPU share it."""
        ops = {"int8": self.ops_int8, "float8": self.ops_float8}.get(served.product_kind, 0.0)
        return replace(self.dense_ceilings(served.dtype, served.ranks), ops_8_per_second=ops)

    def dense_ceilings(self, dtype: str, num_shards: int) -> Ceilings:
        """The same of so many for a dtype, where nothing is quantised."""
        flops = self.flops_32 if dtype == "float32" else self.flops_16
        return Ceilings(self.bytes_per_second, flops, 1 if self.is_cpu else num_shards, source=self.source)

    def sums(self, served: ServedModel) -> Sums:
        """What a model's ranks tell each other takes at least; nothing where they share memory."""
        return Sums() if self.is_cpu else Sums.of(served, self.link_bytes_per_second)

    def free_bytes(self, weights: float, activations: float, num_shards: int) -> float:
        """Bytes that one shard may take for its KV cache, beside its weights."""
        if self.is_cpu:
            return (self.memory_bytes / num_shards - weights) * (1 - CPU_HEADROOM)
        return self.memory_bytes - RESERVED_BYTES - weights - activations


# NVIDIA's, without sparsity; memory as CUDA reports it; the link is NVLink's one direction, of the last two PCIe's.
# Those of 2020 have no float8.
DEVICES: Mapping[str, DatasheetDevice] = {
    "a100-40g": DatasheetDevice(
        1.555e12, 312e12, 19.5e12, 42.3e9, ops_int8=624e12, link_bytes_per_second=300e9,
    ),
    "a100-80g": DatasheetDevice(
        2.039e12, 312e12, 19.5e12, 85.0e9, ops_int8=624e12, link_bytes_per_second=300e9,
    ),
    "h100": DatasheetDevice(
        3.35e12, 989e12, 67e12, 85.0e9, ops_int8=1979e12, ops_float8=1979e12, link_bytes_per_second=450e9,
    ),
    "h200": DatasheetDevice(
        4.8e12, 989e12, 67e12, 150.1e9, ops_int8=1979e12, ops_float8=1979e12, link_bytes_per_second=450e9,
    ),
    "l4": DatasheetDevice(
        300e9, 121e12, 30.3e12, 23.6e9, ops_int8=242e12, ops_float8=242e12, link_bytes_per_second=32e9,
    ),
    "a6000": DatasheetDevice(
        768e9, 154.8e12, 38.7e12, 51.0e9, ops_int8=309.7e12, link_bytes_per_second=32e9,
    ),
}  # fmt: skip

# Words that a driver's name for a device has, all of them: `NVIDIA H100 80GB HBM3`.
WORDS: Mapping[str, str] = {
    "a100-40g": "a100 40gb", "a100-80g": "a100 sxm4 80gb", "h100": "h100 80gb hbm3", "h200": "h200", "l4": "l4",
    "a6000": "a6000",
}  # fmt: skip


class DataSheet:
    """A gauge (`ceilings.Gauge`) that reads a data sheet."""

    def __init__(self, ceilings: Ceilings):
        self.seen = [ceilings]

    def measure(self) -> Ceilings:
        """The same at any time."""
        return self.seen[0]


def known(name: str) -> DatasheetDevice | None:
    """The device that a driver calls so; None where there is no data sheet of it here.

    A part of a device that others have parts of (MIG) is none, nor is a card with less power of the same name (NVL).
    """
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    fitting = (DEVICES[key] for key, wanted in WORDS.items() if words.issuperset(wanted.split()))
    return None if words & {"mig", "nvl"} else next(fitting, None)


# --------------------------------------------------------------------------------------------------------------- memory


CAPTURED_FORMS = 3  # in which a server captures decode steps, each with the logits of its largest batch


CAPTURED_BATCH = 256  # sequences of the largest captured step


@dataclass(frozen=True)
class Capacity:
    """What the memory of a device holds when the model, or each pipeline stage, is split over `num_shard` shards.

    Of several stages: the most weights and KV that one has, and the tokens of the one with the least room.
    """

    num_shard: int
    weight_bytes_per_shard: int
    kv_bytes_per_token_per_shard: int
    kv_tokens: int  # that fit, at least 0
    max_batch_total_tokens: int  # that the server would infer
    problem: str | None  # why this split cannot be served


def stored_as(named: NamedShape, quantize: str | None, head: str = "int8") -> str | None:
    """How the model's linear layers are stored, in words; None: dense. Raises BenchError for a contradiction."""
    stored = named.shape.stored
    if stored is None:
        return None if quantize is None else sizes.in_flight(quantize, head).description
    if quantize is not None and quantize not in stored.names:
        raise BenchError(
            f"--quantize is {quantize}, but {named.name} is quantised already, as {stored.description}: leave it out"
        )
    return stored.description


def least_capacity(pipe: Pipeline, device: DatasheetDevice, num_shard: int, args: Namespace) -> Capacity:
    """The tokens of the pipeline stage with the least room, and the most weights and KV that any stage has."""
    found = [capacity(stage, device, num_shard, args) for stage in pipe.stages]
    return replace(
        min(found, key=lambda stage: (stage.problem is None, stage.kv_tokens)),
        weight_bytes_per_shard=max(stage.weight_bytes_per_shard for stage in found),
        kv_bytes_per_token_per_shard=max(stage.kv_bytes_per_token_per_shard for stage in found),
    )


def capacity(served: ServedModel, device: DatasheetDevice, num_shard: int, args: Namespace) -> Capacity:
    """How many tokens of KV cache fit beside the weights of one split."""
    shape = served.shape
    weights = shape.weight_bytes(served.dtype, served.quantize) // num_shard
    weights += shape.padding_bytes(served.quantize, num_shard)
    weights += shape.copied_bytes(served.dtype, served.quantize, num_shard)
    kv_bytes = served.kv_bytes_per_token * replace(served, ranks=num_shard).kv_copies // num_shard
    free = device.free_bytes(weights, _step_bytes(served, num_shard, args), num_shard)
    tokens = max(0, int(free // (kv_bytes * BLOCK_SIZE)) * BLOCK_SIZE)
    useful = args.max_concurrent_requests * -(-args.max_total_tokens // BLOCK_SIZE) * BLOCK_SIZE
    problem = shape.split_problem(num_shard)
    if problem is None and not tokens:
        problem = f"{weights / 1e9:.2f} GB of weights a shard leave no room for a KV cache with {num_shard} shards"
    return Capacity(num_shard, weights, kv_bytes, tokens, min(tokens, useful), problem)


def _step_bytes(served: ServedModel, num_shard: int, args: Namespace) -> float:
    """Bytes of the largest prompt step, and of the decode steps that a GPU keeps captured: most of it their logits."""
    spec, itemsize = served.shape.spec, DTYPE_BYTES[served.dtype]
    captured = min(CAPTURED_BATCH, args.max_concurrent_requests)
    logits: int = CAPTURED_FORMS * captured * LOGIT_BYTES * spec.vocab_size
    prompts = step_bytes(spec, args.max_batch_prefill_tokens, itemsize, num_shard)
    return prompts + logits
