"""Linear layers in stock torch operators, the weight as it is in the checkpoint, and the norms and gates between them.

Shapes: T tokens, D input features, F output features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from server.arch.spec import Activation
from server.backends.device import alone
from server.backends.protocol import LinearFormat, Norm

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.RELU: F.relu,
    Activation.SILU: F.silu,
}

# activation, [gate | up] [T, 2 F] → activation(gate) * up, [T, F].
Gate = Callable[[Activation, Tensor], Tensor]


def stock_gate(activation: Activation, gate_up: Tensor) -> Tensor:
    """A `Gate` of three operators."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


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

    @property
    def memory(self) -> Sequence[Tensor]:
        return ()

    def moved(self) -> None:
        return  # nothing but the tensors knows where they are


def activated(y: Tensor, activation: Activation | None, gate: Gate | None) -> Tensor:
    """What follows a product y [T, F], or [T, 2 F] where there is a gate."""
    if activation is None:
        return y
    return ACTIVATIONS[activation](y) if gate is None else gate(activation, y)


class DenseFormat(StockFormat):
    """The weight as it is in the checkpoint: the format that defines correct."""

    def __init__(self, weight: Tensor, *, is_gated: bool = False, gate: Gate = stock_gate):
        super().__init__(is_gated=is_gated, gate=gate)
        self.weight = alone(weight)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def memory(self) -> Sequence[Tensor]:
        return [self.weight]

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)


class StackedLinear:
    """A `LinearFormat` of several weights, one below the other, that are not stored alike."""

    def __init__(self, parts: Sequence[LinearFormat], *, is_gated: bool):
        self._parts = parts
        self._is_gated = is_gated

    @property
    def nbytes(self) -> int:
        """Memory that all parts take."""
        return sum(part.nbytes for part in self._parts)

    @property
    def memory(self) -> Sequence[Tensor]:
        return [tensor for part in self._parts for tensor in part.memory]

    def moved(self) -> None:
        for part in self._parts:
            part.moved()

    def __call__(
        self, x: Tensor, bias: Tensor | None, activation: Activation | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x [T, D] → activation(x @ weightᵀ + bias) + residual, [T, F], in x's dtype."""
        y = activated(self.finest(x, bias).to(x.dtype), activation, stock_gate if self._is_gated else None)
        return y if residual is None else y + residual

    def finest(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, D] → x @ weightᵀ + bias, [T, F]."""
        y = torch.cat([part(x, None) for part in self._parts], dim=1)
        return y if bias is None else y + bias


class LayerNorm(Norm):
    """Zero mean and unit variance, scaled and shifted, in x's dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float):
        self._weight = weight
        self._bias = bias
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)


class RmsNorm(Norm):
    """Unit root mean square, scaled; computed in float32, returned in x's dtype."""

    def __init__(self, weight: Tensor, eps: float):
        self._weight = weight.float()
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self._weight.shape, self._weight, self._eps).to(x.dtype)


def make_norm(weight: Tensor, bias: Tensor | None, eps: float, *, is_centred: bool) -> Norm:
    """LayerNorm where `is_centred`, else RMSNorm."""
    return LayerNorm(weight, bias, eps) if is_centred else RmsNorm(weight, eps)
