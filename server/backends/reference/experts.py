"""A mixture of experts in stock torch operators: tokens are sorted by expert, multiplied, and brought back.

Sorted, each expert's tokens are in one run, and the host is asked nothing (`StockRouting`). `GroupedDense` is one
operator for all experts, which reads on the device where each expert's tokens end. `LoopedExperts` works with every
format, waits for those ends once, and then calls each expert that has tokens.

Shapes: T tokens, D input features (of the router: model width), F output features, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from server.arch.spec import Activation
from server.backends.device import alone
from server.backends.protocol import LinearFormat
from server.backends.reference.linear import Gate, activated, stock_gate


@dataclass(frozen=True)
class StockRoutes:
    """See `protocol.Routes`."""

    tokens: Tensor
    ends: Tensor
    weights: Tensor  # [T, k], in the tokens' dtype
    order: Tensor  # [T * k] which pair of a token and an expert stands at each place

    def combine(self, y: Tensor) -> Tensor:
        pairs = torch.empty_like(y).index_copy_(0, self.order, y).view(*self.weights.shape, -1)
        return (pairs * self.weights.unsqueeze(2)).sum(dim=1)


@dataclass(frozen=True)
class StockRouting:
    """See `protocol.Routing`."""

    expert_ids: Tensor  # [E]: 0 … E - 1
    top_k: int
    renormalise: bool

    def choose(self, router: LinearFormat, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = router.finest(x, None).float().softmax(dim=-1).topk(self.top_k, dim=-1)
        if self.renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen

    def __call__(self, router: LinearFormat, x: Tensor) -> StockRoutes:
        weights, chosen = self.choose(router, x)
        sorted_experts, order = chosen.flatten().sort(stable=True)  # of the T * k pairs of a token and an expert
        ends = torch.searchsorted(sorted_experts, self.expert_ids, right=True, out_int32=True)
        return StockRoutes(order // self.top_k, ends, weights, order)


# What the operator wants rows to be a multiple of.
ALIGNED_BYTES = 16


class GroupedDense:
    """A `GroupedLinear` of dense weights, stacked; inputs are filled up with zeros to whole units of memory."""

    def __init__(self, weights: Iterable[Tensor], count: int, *, is_gated: bool = False, gate: Gate = stock_gate):
        for expert, weight in enumerate(weights):
            outputs, inputs = weight.shape
            if expert == 0:
                unit = ALIGNED_BYTES // weight.itemsize
                self._padding = -inputs % unit
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

    def __call__(self, x: Tensor, ends: Tensor, activation: Activation | None = None) -> Tensor:
        x = F.pad(x, (0, self._padding)) if self._padding else x
        return activated(F.grouped_mm(x, self._weights, offs=ends), activation, self._gate)


class LoopedExperts:
    """A `GroupedLinear` of any format, one expert after the other."""

    def __init__(self, experts: Sequence[LinearFormat]):
        self._experts = experts

    @property
    def nbytes(self) -> int:
        return sum(expert.nbytes for expert in self._experts)

    @property
    def memory(self) -> Sequence[Tensor]:
        return [tensor for expert in self._experts for tensor in expert.memory]

    def moved(self) -> None:
        for expert in self._experts:
            expert.moved()

    def __call__(self, x: Tensor, ends: Tensor, activation: Activation | None = None) -> Tensor:
        bounds = pairwise([0, *ends.tolist()])  # the one wait for the device
        parts = [
            expert(x[start:stop], None, activation)
            for expert, (start, stop) in zip(self._experts, bounds, strict=True)
            if stop > start
        ]
        return torch.cat(parts)
