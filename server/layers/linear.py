"""Linear layers: how they are split over ranks, and how their weights are stored.

The two are independent. `ColumnLinear` and `RowLinear` know ranks and nothing of storage (Megatron-LM's split, Shoeybi
et al. 2019, arXiv 1909.08053); a `LinearFormat` knows storage and nothing of ranks. Formats other than dense live in
`quant/` and are handed in as `make_format`.

Shapes: T tokens, D input features, F output features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from server.distributed import Shard
from server.model.spec import ArchSpec
from server.weights import Weights, split_fused


class LinearFormat(Protocol):
    """A stored weight [F, D] that can be applied."""

    @property
    def nbytes(self) -> int:
        """Memory that the weight takes."""

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, D] → x @ weightᵀ + bias, [T, F], in x's dtype."""


MakeFormat = Callable[[Tensor], LinearFormat]


class DenseFormat:
    """The weight as it is in the checkpoint: the format that defines correct."""

    def __init__(self, weight: Tensor):
        self.weight = weight

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)


@dataclass(frozen=True)
class ColumnLinear:
    """Split by output features: input whole, output this rank's part. No communication."""

    weight: LinearFormat
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight(x, self.bias)


@dataclass(frozen=True)
class RowLinear:
    """Split by input features: input this rank's part, output whole, summed over ranks."""

    weight: LinearFormat
    bias: Tensor | None
    shard: Shard

    def __call__(self, x: Tensor) -> Tensor:
        partial = self.weight(x, None)
        # The bias joins after the reduce: before it, every rank would add it once.
        summed = self.shard.all_reduce(partial)
        return summed if self.bias is None else summed.add_(self.bias)


def load_column(
    weights: Weights, role: str, size: tuple[int, int], make_format: MakeFormat, *, bias: bool
) -> ColumnLinear:
    """This rank's output rows of `role`; `size` is (outputs, inputs) of the whole layer."""
    part = weights.shard.range(size[0])
    weight = weights.read(role, "weight", size, part=part)
    return ColumnLinear(make_format(weight), weights.read(role, "bias", size[:1], part=part) if bias else None)


def load_row(weights: Weights, role: str, size: tuple[int, int], make_format: MakeFormat, *, bias: bool) -> RowLinear:
    """This rank's input columns of `role`; `size` is (outputs, inputs) of the whole layer."""
    weight = weights.read(role, "weight", size, dim=1, part=weights.shard.range(size[1]))
    return RowLinear(make_format(weight), weights.read(role, "bias", size[:1]) if bias else None, weights.shard)


def load_qkv(weights: Weights, spec: ArchSpec, make_format: MakeFormat) -> ColumnLinear:
    """This rank's heads of a fused qkv, with rows in the order [q | k | v]."""
    layout = weights.layout("qkv")
    assert layout is not None, "the families served so far fuse q, k and v"
    rows = 3 * spec.num_heads * spec.head_dim
    part = weights.shard.range(rows)
    weight = split_fused(weights.read("qkv", "weight", (rows, spec.hidden_size), part=part), layout, spec.head_dim)
    bias = weights.read("qkv", "bias", (rows,), part=part) if spec.linear_bias else None
    return ColumnLinear(make_format(weight), None if bias is None else split_fused(bias, layout, spec.head_dim))
