"""Linear layers in stock torch operators, the weight as it is in the checkpoint; experts, and norms and gates between.

A mixture's tokens are sorted by expert, multiplied, and brought back. Sorted, each expert's tokens are in one run, and
the host is asked nothing (`StockRouting`). `GroupedDense` is one operator for all experts, which reads on the device
where each expert's tokens end. `LoopedExperts` works with every format, waits for those ends once, and then calls each
expert that has tokens.

Shapes: T tokens, D input features (of a router: model width), F output features, E experts, k experts per token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from server.arch.spec import Activation
from server.backends.device import alone
from server.backends.protocol import SOFTMAX, LinearFormat, Norm, RouterRule
from server.backends.reference.functions import gelu, gelu_tanh, sigmoid, silu
from server.backends.reference.router import choose

SIGMOID_SCALE, LIMIT = 1.702, 7.0  # of `Activation.CLAMPED_SWIGLU`


def _clamped_swish(gate: Tensor) -> Tensor:
    gate = gate.clamp(max=LIMIT)
    return gate * sigmoid(SIGMOID_SCALE * gate)


ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    Activation.GELU: gelu,
    Activation.GELU_TANH: gelu_tanh,
    Activation.RELU: F.relu,
    Activation.RELU_SQUARED: lambda x: F.relu(x).square(),
    Activation.SIGMOID: sigmoid,
    Activation.SILU: silu,
    Activation.CLAMPED_SWIGLU: _clamped_swish,
}

# activation, [gate | up] [T, 2 F] → activation(gate) * up, [T, F].
Gate = Callable[[Activation, Tensor], Tensor]


def stock_gate(activation: Activation, gate_up: Tensor) -> Tensor:
    """A `Gate` of three operators."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation is Activation.CLAMPED_SWIGLU:
        up = up.clamp(-LIMIT, LIMIT) + 1
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
        self.parts = parts
        self.is_gated = is_gated

    @property
    def nbytes(self) -> int:
        """Memory that all parts take."""
        return sum(part.nbytes for part in self.parts)

    @property
    def memory(self) -> Sequence[Tensor]:
        return [tensor for part in self.parts for tensor in part.memory]

    def moved(self) -> None:
        for part in self.parts:
            part.moved()

    def __call__(
        self, x: Tensor, bias: Tensor | None, activation: Activation | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x [T, D] → activation(x @ weightᵀ + bias) + residual, [T, F], in x's dtype."""
        y = activated(self.finest(x, bias).to(x.dtype), activation, stock_gate if self.is_gated else None)
        return y if residual is None else y + residual

    def finest(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, D] → x @ weightᵀ + bias, [T, F]."""
        y = torch.cat([part(x, None) for part in self.parts], dim=1)
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


@dataclass(frozen=True)
class StockRoutes:
    """See `protocol.Routes`."""

    tokens: Tensor
    ends: Tensor
    weights: Tensor  # [T, k], in the tokens' dtype
    order: Tensor  # [T * k] which pair of a token and an expert stands at each place

    def spread(self, x: Tensor) -> Tensor:
        return x.index_select(0, self.tokens)

    def weighed(self, x: Tensor) -> Tensor:
        return self.spread(x) * self.weights.flatten().index_select(0, self.order).unsqueeze(1)

    def total(self, y: Tensor) -> Tensor:
        return replace(self, weights=torch.ones_like(self.weights)).combine(y)

    def combine(self, y: Tensor) -> Tensor:
        pairs = torch.empty_like(y).index_copy_(0, self.order, y).view(*self.weights.shape, -1)
        return (pairs * self.weights.unsqueeze(2)).sum(dim=1)


@dataclass(frozen=True)
class StockRouting:
    """See `protocol.Routing`."""

    expert_ids: Tensor  # [E]: 0 … E - 1
    top_k: int
    renormalise: bool
    rule: RouterRule = SOFTMAX

    def choose(self, router: LinearFormat, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        logits = router.finest(x, bias).float()
        weights, chosen = choose(logits, self.top_k, self.rule, renormalise=self.renormalise)
        return weights.to(x.dtype), chosen

    def __call__(self, router: LinearFormat, x: Tensor, bias: Tensor | None = None) -> StockRoutes:
        weights, chosen = self.choose(router, x, bias)
        sorted_experts, order = chosen.flatten().sort(stable=True)  # of the T * k pairs of a token and an expert
        ends = torch.searchsorted(sorted_experts, self.expert_ids, right=True, out_int32=True)
        return StockRoutes(order // self.top_k, ends, weights, order)


# What the operator wants rows to be a multiple of.
ALIGNED_BYTES = 16


def padded(count: int, like: Tensor) -> int:
    """So many numbers of a tensor's dtype, filled up to whole units of memory, as grouped products have them."""
    return count + -count % (ALIGNED_BYTES // like.itemsize)


class GroupedDense:
    """A `GroupedLinear` of dense weights, stacked; inputs are filled up with zeros to whole units of memory."""

    def __init__(self, weights: Iterable[Tensor], count: int, *, is_gated: bool = False, gate: Gate = stock_gate):
        for expert, weight in enumerate(weights):
            outputs, inputs = weight.shape
            if expert == 0:
                self._padding = padded(inputs, weight) - inputs
                stacked = weight.new_zeros(count, outputs, inputs + self._padding)
            stacked[expert, :, :inputs] = weight
        self._weights = alone(stacked.transpose(1, 2))  # [E, D, F], with D in runs
        self._gate = gate if is_gated else None

    @property
    def nbytes(self) -> int:
        return self._weights.nbytes

    @property
    def memory(self) -> Sequence[Tensor]:
        return [self._weights]

    def moved(self) -> None:
        """Nothing but the tensor knows where it is."""

    def __call__(
        self, x: Tensor, ends: Tensor, activation: Activation | None = None, bias: Tensor | None = None
    ) -> Tensor:
        x = F.pad(x, (0, self._padding)) if self._padding else x
        y = F.grouped_mm(x, self._weights, offs=ends)
        if bias is not None:
            y = y + bias[torch.searchsorted(ends, torch.arange(len(y), device=ends.device), right=True)]
        return activated(y, activation, self._gate)


class LoopedExperts:
    """A `GroupedLinear` of any format, one expert after the other."""

    def __init__(self, experts: Sequence[LinearFormat]):
        self.experts = experts

    @property
    def nbytes(self) -> int:
        return sum(expert.nbytes for expert in self.experts)

    @property
    def memory(self) -> Sequence[Tensor]:
        return [tensor for expert in self.experts for tensor in expert.memory]

    def moved(self) -> None:
        for expert in self.experts:
            expert.moved()

    def __call__(
        self, x: Tensor, ends: Tensor, activation: Activation | None = None, bias: Tensor | None = None
    ) -> Tensor:
        bounds = pairwise([0, *ends.tolist()])  # the one wait for the device
        biases = [None] * len(self.experts) if bias is None else bias
        parts = [
            expert(x[start:stop], own, activation)
            for expert, own, (start, stop) in zip(self.experts, biases, bounds, strict=True)
            if stop > start
        ]
        return torch.cat(parts)
