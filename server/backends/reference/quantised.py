"""Linear layers of quantised weights in stock torch operators: what these weights mean, and no more than that.

Where inputs are rounded too, sums of products are exact, each over those inputs whose scales are the same; then they
are scaled and added in float32.

Shapes: T tokens, D input features, F output features, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from server.backends.device import alone
from server.backends.protocol import Maximum
from server.backends.reference.linear import Gate, StockFormat, stock_gate
from server.quantisation.rounding import rounded, scale_of
from server.quantisation.stored import QuantisedWeight, RoundedInputs

# Products of int8 have 16 bits; those of float8 (E4M3) are multiples of 2^-18 below 2^18: of so many that a layer has
# inputs, sums are exact.
EXACT = torch.float64


class QuantisedFormat(StockFormat):
    """A quantised weight. maximum: over all ranks, where its inputs are divided among them."""

    def __init__(
        self, weight: QuantisedWeight, maximum: Maximum | None, *, is_gated: bool = False, gate: Gate = stock_gate
    ):
        super().__init__(is_gated=is_gated, gate=gate)
        zero = None if weight.zero is None else alone(weight.zero)
        self.weight = weight = replace(weight, held=alone(weight.codes), scale=alone(weight.scale), zero=zero)
        self._rounding = None if weight.inputs is None else InputRounding(weight, weight.inputs, maximum)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def memory(self) -> Sequence[Tensor]:
        zeros = [] if self.weight.zero is None else [self.weight.zero]
        return [self.weight.codes, self.weight.scale, *zeros]

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ids [T] int64 of the weight, [T, D] float32: what an embedding does that shares the head's weight."""
        return self.weight.rows(ids)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._rounding is None:
            return F.linear(x, self.weight.dequantised().to(x.dtype), bias)
        y = self._rounded_product(x)
        return (y if bias is None else y + bias.float()).to(x.dtype)

    def _rounded_product(self, x: Tensor) -> Tensor:
        assert self._rounding is not None
        weight, (codes, scale) = self.weight, self._rounding(x)
        y = x.new_zeros(x.shape[0], weight.shape[0], dtype=torch.float32)
        for segment in self._rounding.segments:
            ours = weight.codes[:, segment.inputs].to(EXACT)
            if weight.zero is not None:
                ours = ours - weight.zero[:, segment.group, None].to(EXACT)
            total = codes[:, segment.inputs].to(EXACT) @ ours.t()
            y += total.float() * scale[:, segment.input_group, None] * weight.scale[:, segment.group]
        return y


@dataclass(frozen=True)
class Segment:
    """Inputs whose weights have the same scale, and which have the same scale themselves."""

    inputs: slice | Tensor  # [n] int64 where they are no neighbours
    group: int  # of the weight's scales
    input_group: int  # of the inputs' scales


class InputRounding:
    """Rounds the inputs of one linear layer."""

    def __init__(self, weight: QuantisedWeight, inputs: RoundedInputs, maximum: Maximum | None):
        self._inputs = inputs
        _, width = weight.shape
        whole = weight.num_inputs or width
        size = inputs.group or whole
        self._groups = (weight.first_input + torch.arange(width, device=weight.device)) // size  # [D] of the whole row
        self._num_groups = -(-whole // size)
        self._maximum = maximum if whole > width else None
        pairs = self._groups * weight.scale.shape[1] + weight.groups
        self.segments = [
            Segment(_as_slice(of_pair), int(weight.groups[of_pair[0]]), int(self._groups[of_pair[0]]))
            for of_pair in ((pairs == pair).nonzero().squeeze(1) for pair in pairs.unique())
        ]

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D] → codes [T, D] in float32, less the code of 0, and their scales [T, G]."""
        exact = x.float()
        if self._inputs.scale is not None:
            return self._fixed(exact, self._inputs.scale)
        largest = exact.new_zeros(len(x), self._num_groups)
        largest.scatter_reduce_(1, self._groups.expand(len(x), -1), exact.abs(), "amax")
        if self._maximum is not None:
            largest = self._maximum(largest)
        scale = scale_of(largest, self._inputs.dtype)
        if self._inputs.most is not None:
            scale = scale.clamp(max=self._inputs.most)
        return rounded(exact * scale.reciprocal().index_select(1, self._groups), self._inputs.dtype).float(), scale

    def nearest(self, x: Tensor) -> Tensor:
        """x [T, D] → the numbers that its codes stand for, [T, D] in x's dtype."""
        codes, scale = self(x)
        return (codes * scale.index_select(1, self._groups)).to(x.dtype)

    def _fixed(self, exact: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        zero = self._inputs.zero
        scaled = exact * scale.reciprocal() if zero is None else exact * scale.reciprocal() + zero
        codes = rounded(scaled, self._inputs.dtype).float()
        return codes if zero is None else codes - zero, scale.expand(len(exact), self._num_groups)


def _as_slice(indices: Tensor) -> slice | Tensor:
    """The same, of ascending indices, as a slice where they are neighbours."""
    first, last = int(indices[0]), int(indices[-1])
    return slice(first, last + 1) if last - first + 1 == len(indices) else indices
