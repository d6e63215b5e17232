"""The matrices of a mixture of experts, applied to tokens that are sorted by expert.

`GroupedDense` is one operator for all experts, which reads where each expert's tokens end on the device: the host waits
for nothing. `LoopedExperts` works with every format, asks the device for those ends once, and then calls each expert
that has tokens.

Shapes: T tokens, D input features, F output features, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from server.arch.spec import Activation
from server.backends.pages import alone
from server.backends.protocol import LinearFormat
from server.backends.reference.activation import Gate, stock_gate
from server.backends.reference.linear import activated

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
