"""Linear layers: how they are split over ranks, and how their weights are stored.

The two are independent. `ColumnLinear` and `RowLinear` know ranks and nothing of storage (Megatron-LM's split, Shoeybi
et al. 2019, arXiv 1909.08053); a `LinearFormat` knows storage and nothing of ranks. Formats other than dense live in
`quant/` and are handed in as `make_format`.

Shapes: T tokens, D input features, F output features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from server.layers.activation import ACTIVATIONS, Gate, stock_gate
from server.model.spec import Activation
from server.weights import Ranges, Weights


class LinearFormat(Protocol):
    """A stored weight [F, D] that can be applied, with what follows the product.

    A gated one is stored as [gate | up], [2 F, D], and yields activation(gate) * up.
    """

    @property
    def nbytes(self) -> int:
        """Memory that the weight takes."""

    def __call__(
        self, x: Tensor, bias: Tensor | None, activation: Activation | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x [T, D] → activation(x @ weightᵀ + bias) + residual, [T, F], in x's dtype."""

    def to_float32(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, D] → x @ weightᵀ + bias, [T, F] float32."""


class MakeFormat(Protocol):
    def __call__(self, weight: Tensor, *, is_gated: bool = False) -> LinearFormat: ...


class MakeStockFormat(Protocol):
    def __call__(self, weight: Tensor, *, is_gated: bool = False, gate: Gate = stock_gate) -> LinearFormat: ...


class StockFormat(ABC):
    """A format whose product is one operator of torch; what follows are others."""

    def __init__(self, *, is_gated: bool, gate: Gate = stock_gate):
        self._is_gated = is_gated
        self._gate = gate

    @abstractmethod
    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, D] → x @ weightᵀ + bias, in x's dtype."""

    def __call__(
        self, x: Tensor, bias: Tensor | None, activation: Activation | None = None, residual: Tensor | None = None
    ) -> Tensor:
        y = self.product(x, bias)
        if activation is not None:
            y = self._gate(activation, y) if self._is_gated else ACTIVATIONS[activation](y)
        return y if residual is None else y + residual

    def to_float32(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.product(x, bias).float()


class DenseFormat(StockFormat):
    """The weight as it is in the checkpoint: the format that defines correct."""

    def __init__(self, weight: Tensor, *, is_gated: bool = False, gate: Gate = stock_gate):
        super().__init__(is_gated=is_gated, gate=gate)
        self.weight = weight

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)


@dataclass(frozen=True)
class ColumnLinear:
    """Split by output features: input whole, output this rank's part. No communication."""

    weight: LinearFormat
    bias: Tensor | None

    def __call__(self, x: Tensor, activation: Activation | None = None) -> Tensor:
        return self.weight(x, self.bias, activation)


@dataclass(frozen=True)
class RowLinear:
    """Split by input features: input this rank's part, output this rank's summand of the whole.

    The bias belongs to the whole: `Layer.joined` adds it, once.
    """

    weight: LinearFormat
    bias: Tensor | None

    def __call__(self, x: Tensor, base: Tensor | None = None, *, with_bias: bool = False) -> Tensor:
        """base + this rank's summand; with_bias where there is one rank, whose summand is the whole."""
        return self.weight(x, self.bias if with_bias else None, residual=base)


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
