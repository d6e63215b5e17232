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

from server.weights import Ranges, Weights


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
    """Split by input features: input this rank's part, output this rank's summand of the whole.

    Who calls it sums over the ranks and adds the bias afterwards, once: several summands may share one reduction.
    """

    weight: LinearFormat
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight(x, None)


def load_column(
    weights: Weights,
    role: str,
    size: tuple[int, int],
    make_format: MakeFormat,
    *,
    bias: bool,
    ranges: Ranges | None = None,
) -> ColumnLinear:
    """This rank's output rows of `role`; `size` is (outputs, inputs) of the whole layer.

    ranges: half-open rows of this rank, where they are not simply its share.
    """
    ranges = ranges or [weights.shard.range(size[0])]
    weight = weights.rows(role, size, ranges)
    return ColumnLinear(make_format(weight), weights.bias(role, size[0], ranges=ranges) if bias else None)


def load_row(weights: Weights, role: str, size: tuple[int, int], make_format: MakeFormat, *, bias: bool) -> RowLinear:
    """This rank's input columns of `role`; `size` is (outputs, inputs) of the whole layer."""
    weight = weights.columns(role, size, weights.shard.range(size[1]))
    return RowLinear(make_format(weight), weights.bias(role, size[0]) if bias else None)
