"""Linear layers in stock torch operators: the weight as it is in the checkpoint.

Shapes: T tokens, D input features, F output features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch.nn.functional as F
from torch import Tensor

from server.arch.spec import Activation
from server.backends.reference.activation import ACTIVATIONS, Gate, stock_gate


class StockFormat(ABC):
    """A `LinearFormat` whose product is one operator of torch; what follows are others.

    is_gated: the weight is [gate | up]; gate: what computes activation(gate) * up from its output.
    """

    def __init__(self, *, is_gated: bool, gate: Gate = stock_gate):
        self._is_gated = is_gated
        self._gate = gate

    @abstractmethod
    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, D] → x @ weightᵀ + bias, in x's dtype."""

    def __call__(
        self, x: Tensor, bias: Tensor | None, activation: Activation | None = None, residual: Tensor | None = None
    ) -> Tensor:
        y = activated(self.product(x, bias), activation, self._gate if self._is_gated else None)
        return y if residual is None else y + residual

    def finest(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.product(x, bias)


def activated(y: Tensor, activation: Activation | None, gate: Gate | None) -> Tensor:
    """What follows a product y [T, F], or [T, 2 F] where there is a gate."""
    if activation is None:
        return y
    return ACTIVATIONS[activation](y) if gate is None else gate(activation, y)


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
