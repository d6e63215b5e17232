"""Accelerators by their data sheets, what kernels reach of those, and what the sums between shards take on them.

Floors are held against data sheets, the same for every device, so that two can be compared; achievable figures stand
beside them with their source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from benchmark.roofline import Ceilings, ServedModel
from benchmark.shapes import DTYPE_BYTES
from server.arch.spec import Residual

RESERVED_BYTES = 2 * 10**9  # of a GPU, for its context, libraries and fragmentation
CPU_HEADROOM = 0.2  # of the memory that is free, left to other programs; as the server leaves it
ALL_REDUCE_SECONDS = 5e-6  # of the smallest sum over GPUs of one machine: the messages there and back
SUMS_PER_LAYER: Mapping[Residual, int] = {
    Residual.PRE_CROSS: 3,
    Residual.PARALLEL_ONE_NORM: 1,  # attention and mlp can be summed together
    Residual.PARALLEL_TWO_NORMS: 1,
}


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
    source: str = "measured"
    reached_bytes: float = 1.0  # share of the bandwidth that kernels reach, and of the products
    reached_flops: float = 1.0
    reached_source: str = "measured here"

    def ceilings(self, served: ServedModel, num_shards: int) -> Ceilings:
        """What `num_shards` of this device can do at best for a model; the shards of a CPU share it."""
        ops = {"int8": self.ops_int8, "float8": self.ops_float8}.get(served.product_kind, 0.0)
        return replace(self.dense_ceilings(served.dtype, num_shards), ops_8_per_second=ops)

    def achievable(self, ceilings: Ceilings) -> Ceilings:
        """What kernels reach of these ceilings."""
        return replace(
            ceilings,
            bytes_per_second=ceilings.bytes_per_second * self.reached_bytes,
            flops_per_second=ceilings.flops_per_second * self.reached_flops,
            ops_8_per_second=ceilings.ops_8_per_second * self.reached_flops,
        )

    def dense_ceilings(self, dtype: str, num_shards: int) -> Ceilings:
        """The same for a dtype, where nothing is quantised."""
        flops = self.flops_32 if dtype == "float32" else self.flops_16
        return Ceilings(self.bytes_per_second, flops, 1 if self.is_cpu else num_shards)

    def free_bytes(self, weights: float, activations: float, num_shards: int) -> float:
        """Bytes that one shard may take for its KV cache, beside its weights."""
        if self.is_cpu:
            return (self.memory_bytes / num_shards - weights) * (1 - CPU_HEADROOM)
        return self.memory_bytes - RESERVED_BYTES - weights - activations


def all_reduces(served: ServedModel, device: DatasheetDevice, num_shards: int) -> tuple[float, float]:
    """Seconds that the sums over the shards take at least: of any step, and of each of its tokens besides.

    A sum moves 2 (N - 1) / N of its bytes from every shard to the others, in whichever order (Patarasuk and Yuan 2009).
    """
    if num_shards == 1 or device.is_cpu:
        return 0.0, 0.0
    spec = served.shape.spec
    sums = spec.num_layers * SUMS_PER_LAYER.get(spec.residual, 2)
    num_bytes = 2 * (num_shards - 1) / num_shards * spec.hidden_size * DTYPE_BYTES[served.dtype]
    return sums * ALL_REDUCE_SECONDS, sums * num_bytes / device.link_bytes_per_second


# Measured on an H200, by a copy and a large product: 4.3 TB/s and 790 TFLOP/s.
_Sheet = partial(
    DatasheetDevice, source="NVIDIA's data sheet, dense", reached_bytes=4.3 / 4.8, reached_flops=790 / 989,
    reached_source="taken from an H200, where they were measured",
)  # fmt: skip

# Without sparsity; memory as CUDA reports it; the link is NVLink's one direction, of the last two PCIe's. Those of 2020
# have no float8.
DEVICES: Mapping[str, DatasheetDevice] = {
    "a100-40g": _Sheet(1.555e12, 312e12, 19.5e12, 42.3e9, ops_int8=624e12, link_bytes_per_second=300e9),
    "a100-80g": _Sheet(2.039e12, 312e12, 19.5e12, 85.0e9, ops_int8=624e12, link_bytes_per_second=300e9),
    "h100": _Sheet(
        3.35e12, 989e12, 67e12, 85.0e9, ops_int8=1979e12, ops_float8=1979e12, link_bytes_per_second=450e9
    ),
    "h200": _Sheet(
        4.8e12, 989e12, 67e12, 150.1e9, ops_int8=1979e12, ops_float8=1979e12, link_bytes_per_second=450e9,
        reached_source="measured",
    ),
    "l4": _Sheet(300e9, 121e12, 30.3e12, 23.6e9, ops_int8=242e12, ops_float8=242e12, link_bytes_per_second=32e9),
    "a6000": _Sheet(768e9, 154.8e12, 38.7e12, 51.0e9, ops_int8=309.7e12, link_bytes_per_second=32e9),
}  # fmt: skip
