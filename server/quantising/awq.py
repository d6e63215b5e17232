"""AWQ (Lin et al. 2023, arXiv 2306.00978): large inputs are scaled up before rounding, then ranges are clipped.

As in the paper, scales of channels are powers of the inputs' mean magnitudes, of which the best is searched, here with
and without the matrices' own magnitudes as a divisor; then each group's range is clipped to what costs least. What is
measured is the square error of the outputs, tr(E H Eᵀ), as for GPTQ (`gptq.py`), so that no inputs need to be kept;
when ranges are clipped, each group by itself. Rounding is to the nearest.

Shapes: F output features, D input features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from server.quant.stored import QuantisedWeight
from server.quantising.calibration import Inputs
from server.quantising.grids import plain, search
from server.quantising.recipe import Recipe

STEPS = 20  # of the power, from 0 to 1
LEAST_SCALE = 1e-4


def best_scale(matrices: Sequence[tuple[Tensor, Inputs]], recipe: Recipe, scale_dtype: torch.dtype) -> Tensor:
    """[D] what the inputs of all matrices [F, D] are divided by, and these multiplied; ones where nothing is better."""
    best = torch.ones(matrices[0][0].shape[1], device=matrices[0][0].device)
    least = _cost(matrices, best, recipe, scale_dtype)
    for scale in _candidates(matrices):
        cost = _cost(matrices, scale, recipe, scale_dtype)
        if cost < least:
            best, least = scale, cost
    return best


def _candidates(matrices: Sequence[tuple[Tensor, Inputs]]) -> Iterator[Tensor]:
    count = sum(inputs.count for _, inputs in matrices)
    sizes = torch.stack([inputs.magnitudes for _, inputs in matrices]).sum(0) / max(count, 1)
    widths = torch.stack([weight.abs().mean(0) for weight, _ in matrices]).mean(0)
    sizes, widths = sizes.clamp(min=LEAST_SCALE), widths.clamp(min=LEAST_SCALE)
    for step in range(1, STEPS + 1):
        power = step / STEPS
        for scale in (sizes**power, sizes**power / widths ** (1 - power)):
            yield (scale / (scale.amax() * scale.amin()).sqrt()).clamp(min=LEAST_SCALE)


def _cost(matrices: Sequence[tuple[Tensor, Inputs]], scale: Tensor, recipe: Recipe, scale_dtype: torch.dtype) -> float:
    """The square error of all outputs, if inputs are divided by `scale`."""
    total = 0.0
    for weight, inputs in matrices:
        grid = plain(weight * scale, recipe, scale_dtype)
        error = grid.values(grid.codes(weight * scale)) / scale - weight
        total += float((error @ inputs.products).mul_(error).sum())
    return total


def quantise(weight: Tensor, inputs: Inputs, recipe: Recipe, scale_dtype: torch.dtype) -> QuantisedWeight:
    """A weight [F, D] float32 rounded to the nearest codes of ranges that are clipped by what that does to outputs."""
    groups = inputs.mean_products
    size = recipe.group_size if recipe.group_size > 0 else len(groups)
    # The products of inputs of one group: [G, n, n].
    own = torch.stack([groups[start : start + size, start : start + size] for start in range(0, len(groups), size)])
    grid = search(weight, recipe, own, scale_dtype)
    return grid.stored(grid.codes(weight))
