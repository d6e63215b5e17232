"""The numbers that codes can stand for: a scale and a code of 0 for each row of each group of inputs.

`search` chooses them by the least weighted square error over ranges that are clipped more and more. Left out: which
code a weight gets where errors of other weights are to be made up for (`gptq.py`).

Shapes: F output features, D input features, G groups of n neighbouring inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from server.quantisation.stored import QuantisedWeight, contiguous_groups
from server.quantize.recipe import Recipe

CLIPPINGS = 32  # ranges that are tried, from the whole one down
LEAST_RANGE = 0.25  # of the whole one: the smallest that is tried
EVERY_ZERO_BITS = 3  # up to so many bits, every code is tried as that of 0
PIECE = 1 << 22  # numbers that are looked at together
TINY = 1e-9


@dataclass(frozen=True)
class Grid:
    """What codes stand for: (code - zero) * scale."""

    bits: int
    scale: Tensor  # [F, G] float32, a number of the dtype that is stored
    zero: Tensor  # [F, G] float32
    groups: Tensor  # [D] int64

    @property
    def most(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def codes(self, weight: Tensor) -> Tensor:
        """The nearest codes [F, D] of a weight [F, D], as floats."""
        scale, zero = self.scale[:, self.groups], self.zero[:, self.groups]
        return (weight / scale + zero).round_().clamp_(0, self.most)

    def values(self, codes: Tensor) -> Tensor:
        """What codes [F, D] stand for."""
        return (codes - self.zero[:, self.groups]) * self.scale[:, self.groups]

    def stored(self, codes: Tensor) -> QuantisedWeight:
        """Codes [F, D] as a weight."""
        return QuantisedWeight(codes.to(torch.uint8), self.bits, self.scale, self.groups, zero=self.zero)


# Rows of weights [f, G, n] → scales and zeros [f, G] to try.
Candidates = Callable[[Tensor, Recipe], Iterable[tuple[Tensor, Tensor]]]


def search(weight: Tensor, recipe: Recipe, importance: Tensor, scale_dtype: torch.dtype) -> Grid:
    """The grid of a weight [F, D] whose rounding costs least, by the `importance` of inputs.

    importance: [D] of each input's square error, or [G, n, n] of the products of errors of a group; scale_dtype: what
    scales are stored in.
    """
    if importance.dim() == 1:
        importance = importance.view(-1, _group_size(weight, recipe))
    return _grid(weight, recipe, importance, scale_dtype, _candidates)


def nearest(weight: Tensor, products: Tensor, recipe: Recipe, scale_dtype: torch.dtype) -> QuantisedWeight:
    """A weight [F, D] rounded to the nearest codes of ranges that are clipped by what that does to outputs, as in AWQ.

    products: [D, D] the mean of x xᵀ, of which those of inputs of one group count.
    """
    size = _group_size(weight, recipe)
    own = torch.stack([products[i : i + size, i : i + size] for i in range(0, len(products), size)])  # [G, n, n]
    grid = search(weight, recipe, own, scale_dtype)
    return grid.stored(grid.codes(weight))


def plain(weight: Tensor, recipe: Recipe, scale_dtype: torch.dtype) -> Grid:
    """The grid of a weight [F, D] whose ranges are not clipped."""
    importance = weight.new_ones(1, 1)
    return _grid(weight, recipe, importance, scale_dtype, lambda rows, recipe: [_whole_range(rows, recipe)])


def _grid(weight: Tensor, recipe: Recipe, importance: Tensor, scale_dtype: torch.dtype, candidates: Candidates) -> Grid:
    outputs, inputs = weight.shape
    size = _group_size(weight, recipe)
    rows = max(1, PIECE // inputs)
    parts = [
        _search_rows(weight[start : start + rows].unflatten(1, (-1, size)), recipe, importance, scale_dtype, candidates)
        for start in range(0, outputs, rows)
    ]
    scale, zero = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return Grid(recipe.bits, scale, zero, contiguous_groups(size, inputs).to(weight.device))


def _group_size(weight: Tensor, recipe: Recipe) -> int:
    return recipe.group_size if recipe.group_size > 0 else weight.shape[1]


def _search_rows(
    weight: Tensor, recipe: Recipe, importance: Tensor, scale_dtype: torch.dtype, candidates: Candidates
) -> tuple[Tensor, Tensor]:
    """Scales and zeros [f, G] of rows [f, G, n], by the importance [G, n] or [G, n, n]."""
    best: tuple[Tensor, Tensor] | None = None
    least = None
    for scale, zero in candidates(weight, recipe):
        scale = as_stored(scale, scale_dtype)
        codes = (weight / scale[..., None] + zero[..., None]).round_().clamp_(0, (1 << recipe.bits) - 1)
        error = _cost(codes.sub_(zero[..., None]).mul_(scale[..., None]).sub_(weight), importance)
        if best is None or least is None:
            best, least = (scale, zero), error
            continue
        is_better = error < least
        best = torch.where(is_better, scale, best[0]), torch.where(is_better, zero, best[1])
        least = torch.where(is_better, error, least)
    assert best is not None, "the whole range is always tried"
    return best


def _cost(error: Tensor, importance: Tensor) -> Tensor:
    """[f, G] of errors [f, G, n]."""
    if importance.dim() == 2:
        return error.square_().mul_(importance).sum(-1)
    return torch.einsum("fgn,gnm->fgm", error, importance).mul_(error).sum(-1)


def _whole_range(weight: Tensor, recipe: Recipe, kept: float = 1.0) -> tuple[Tensor, Tensor]:
    """Scales and zeros [f, G] with which codes reach so much of the range of weights [f, G, n]."""
    most = (1 << recipe.bits) - 1
    low, high = weight.amin(-1).clamp(max=0.0) * kept, weight.amax(-1).clamp(min=0.0) * kept
    if recipe.symmetric:
        # Of the codes, one more is negative than positive.
        return (torch.maximum(-low, high) * 2 / most).clamp(min=TINY), torch.full_like(
            low, float(1 << (recipe.bits - 1))
        )
    scale = ((high - low) / most).clamp(min=TINY)
    return scale, (-low / scale).round().clamp(0, most)


def _candidates(weight: Tensor, recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    """Scales and zeros [f, G] to try."""
    for kept in torch.linspace(1.0, LEAST_RANGE, CLIPPINGS).tolist():
        scale, zero = _whole_range(weight, recipe, kept)
        if recipe.symmetric or recipe.bits > EVERY_ZERO_BITS:
            yield scale, zero
        else:
            yield from ((scale, torch.full_like(zero, float(code))) for code in range(1 << recipe.bits))


def as_stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales as they are once stored in `dtype`: float32."""
    least = torch.finfo(dtype).tiny
    return scale.clamp(min=least).to(dtype).float()


def with_scale(grid: Grid, scale: Tensor) -> Grid:
    """The same zeros with other scales."""
    return replace(grid, scale=scale)
