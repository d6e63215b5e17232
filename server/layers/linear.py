"""Linear layers and how they are split over ranks (Megatron-LM's split, Shoeybi et al. 2019, arXiv 1909.08053).

How their weights are stored is independent of that: a `LinearFormat` knows storage and nothing of ranks. Formats belong
to the backends and are handed in as `make_linear`.

Shapes: T tokens, D input features, F output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from server.arch.spec import Activation
from server.backends.protocol import GroupedLinear, LinearFormat, MakeLinear, Maximum
from server.backends.reference.linear import StackedLinear
from server.checkpoint.formats.protocol import Ranges
from server.checkpoint.weights import Piece, Weights, placed
from server.quantisation.stored import Stored, joined
from server.ranks.collectives import Shard

# A weight as a backend stores it: of one layer, or of all experts.
Matrix = LinearFormat | GroupedLinear


@dataclass(frozen=True)
class ColumnLinear:
    """Split by output features: input whole, output this rank's part. No communication."""

    weight: LinearFormat
    bias: Tensor | None

    def __call__(self, x: Tensor, activation: Activation | None = None) -> Tensor:
        """x [T, D] → activation(x @ weightᵀ + bias), this rank's output features."""
        return self.weight(x, self.bias, activation)


@dataclass(frozen=True)
class RowLinear:
    """Split by input features: input this rank's part, output this rank's part of a sum over the ranks."""

    weight: LinearFormat
    bias: Tensor | None  # of the whole sum, to be added once

    def __call__(self, x: Tensor, base: Tensor | None = None, *, with_bias: bool = False) -> Tensor:
        """base + this rank's part; with_bias where there is one rank, whose part is the whole."""
        return self.weight(x, self.bias if with_bias else None, residual=base)


@dataclass(frozen=True)
class GatheredLinear:
    """Split by output features, which every rank has whole afterwards: for what is too small to be worth two splits."""

    part: ColumnLinear
    shard: Shard

    def __call__(self, x: Tensor, activation: Activation | None = None) -> Tensor:
        """x [T, D] → activation(x @ weightᵀ + bias), all output features."""
        own = self.part(x, activation)
        return own if self.shard.world_size == 1 else torch.cat(self.shard.all_gather(own), dim=1)

    @property
    def nbytes(self) -> int:
        """Memory of this rank's part."""
        return self.part.weight.nbytes


class Projection(Protocol):
    """What ends attention or an mlp: a `RowLinear`, or a mixture of them."""

    @property
    def bias(self) -> Tensor | None:
        """What is added once to the sum over the ranks."""

    def __call__(self, x: Tensor, base: Tensor | None = None, *, with_bias: bool = False) -> Tensor:
        """See `RowLinear`."""


@dataclass(frozen=True)
class Branch:
    """What attention or an mlp adds to the residual stream: a projection, and the input that waits for it."""

    projection: Projection
    x: Tensor

    def onto(self, base: Tensor | None, *, with_bias: bool) -> Tensor:
        """base + this rank's part of the branch."""
        return self.projection(self.x, base, with_bias=with_bias)


def load_linear(
    weights: Weights,
    pieces: Sequence[Piece],
    make_linear: MakeLinear,
    *,
    is_gated: bool = False,
    maximum: Maximum | None = None,
) -> LinearFormat:
    """Weights of the same inputs as one, their rows one below the other."""
    parts = [_read(weights, piece) for piece in pieces]
    layer = _stacked(parts, make_linear, is_gated=is_gated, maximum=maximum)
    return layer if weights.adapting is None else weights.adapting.linear(layer, placed(pieces), is_gated=is_gated)


def load_dense(weights: Weights, pieces: Sequence[Piece], make_linear: MakeLinear) -> LinearFormat:
    """The same, dense however others are stored: for what is small and on every rank."""
    parts = [weights.rows(piece.role, piece.size, piece.rows) for piece in pieces]
    layer = make_linear(torch.cat(parts) if len(parts) > 1 else parts[0])
    return layer if weights.adapting is None else weights.adapting.linear(layer, placed(pieces), is_gated=False)


def _read(weights: Weights, piece: Piece) -> Stored:
    outputs, inputs = piece.size
    rows = None if list(piece.rows) == [(0, outputs)] else piece.rows
    columns = None if piece.columns == (0, inputs) else piece.columns
    return weights.linear(piece.role, piece.size, rows=rows, columns=columns)


def _stacked(
    parts: Sequence[Stored], make_linear: MakeLinear, *, is_gated: bool, maximum: Maximum | None
) -> LinearFormat:
    whole = joined(parts)
    if whole is not None:
        return make_linear(whole, is_gated=is_gated, maximum=maximum)
    return StackedLinear([make_linear(part) for part in parts], is_gated=is_gated)


def load_column(
    weights: Weights,
    role: str,
    size: tuple[int, int],
    make_linear: MakeLinear,
    *,
    bias: bool,
    ranges: Ranges | None = None,
    is_gated: bool = False,
) -> ColumnLinear:
    """This rank's output rows of `role`; `size` is (outputs, inputs) of the whole layer.

    ranges: half-open rows of this rank, where they are not simply its share.
    """
    ranges = ranges or [weights.shard.range(size[0])]
    layer = load_linear(weights, [weights.piece(role, size, rows=ranges)], make_linear, is_gated=is_gated)
    return ColumnLinear(layer, weights.bias(role, size[0], ranges=ranges) if bias else None)


def load_gathered(
    weights: Weights, role: str, size: tuple[int, int], make_linear: MakeLinear, *, bias: bool
) -> GatheredLinear:
    """The same, to be put together again."""
    return GatheredLinear(load_column(weights, role, size, make_linear, bias=bias), weights.shard)


def load_row(weights: Weights, role: str, size: tuple[int, int], make_linear: MakeLinear, *, bias: bool) -> RowLinear:
    """This rank's input columns of `role`; `size` is (outputs, inputs) of the whole layer."""
    piece = weights.piece(role, size, columns=weights.shard.range(size[1]))
    layer = load_linear(weights, [piece], make_linear, maximum=weights.shard.all_reduce_max)
    return RowLinear(layer, weights.bias(role, size[0]) if bias else None)
