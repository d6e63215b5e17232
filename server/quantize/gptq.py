"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): codes that make up for each other's errors on the inputs that come.

What is made small is the square error of a layer's outputs, tr(E H Eᵀ), where E is the error of the weight and H the
mean of x xᵀ over the inputs x of calibration, with a little of its mean diagonal added. As in the paper, columns are
rounded one after the other, those that vary most first if asked, and the error of each is made up for by those not yet
rounded, through the Cholesky factor of H's inverse. Scales are chosen before, by what an error costs there
(`grids.py`).

Then two steps that can only lessen the error take turns: for given codes, the best scales are least squares, one small
system for each row; for given scales, each code in turn is set to the best one beside all others, which is coordinate
descent (QuantEase, Behdin et al. 2023, arXiv 2309.01885).

Left out: groups of inputs that are out of order. The order of rounding changes which errors are made up for by which
columns, and nothing of how weights are stored.

Shapes: F output features, D input features, G groups of n inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from server.quantisation.stored import QuantisedWeight
from server.quantize.grids import Grid, as_stored, search, with_scale
from server.quantize.recipe import Recipe

DAMPENING = 0.01  # of H's mean diagonal, added to its diagonal
MORE_DAMPENING = 10.0  # times as much, where H cannot be factored
DAMPENINGS = 16  # that are tried: the last is many times what makes a finite H of any width diagonally dominant
BLOCK = 128  # columns whose errors reach the columns behind them together
ROUNDS = 4  # of better scales and better codes
ROWS = 2048  # whose systems for scales are solved together


@dataclass(frozen=True)
class Levels:
    """A grid by columns: what each can be, as fast as it is asked again and again."""

    scale: Tensor  # [G, F]
    zero: Tensor  # [G, F]
    groups: list[int]  # [D]
    most: int

    @classmethod
    def of(cls, grid: Grid, order: Tensor) -> Levels:
        """Of columns in an order [D]."""
        return cls(grid.scale.t().contiguous(), grid.zero.t().contiguous(), grid.groups[order].tolist(), grid.most)

    def nearest(self, wanted: Tensor, index: int) -> Tensor:
        """What column `index` [F] can be that is nearest to what is wanted."""
        scale, zero = self.scale[self.groups[index]], self.zero[self.groups[index]]
        return (wanted / scale).add_(zero).round_().clamp_(0, self.most).sub_(zero).mul_(scale)


@dataclass(frozen=True)
class Curvature:
    """H as GPTQ needs it."""

    hessian: Tensor  # [D, D], dampened
    factor: Tensor  # [D, D] upper: its transpose times itself is the inverse of H in `order`
    order: Tensor  # [D] in which columns are rounded

    @classmethod
    def of(cls, hessian: Tensor, *, activation_order: bool, name: str = "a layer") -> Curvature:
        """From the mean of x xᵀ [D, D] float32. Inputs that are always 0 cost nothing but the dampening.

        name: of the layer, for the ValueError that is raised where H has numbers that are not finite or too large.
        """
        refuse_infinite(hessian, f"the products of the inputs of {name}")
        dampening = DAMPENING * hessian.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
        diagonal = hessian.diagonal()
        order = torch.arange(len(hessian), device=hessian.device)
        if activation_order:
            order = diagonal.argsort(descending=True, stable=True)
        for _ in range(DAMPENINGS):
            dampened = hessian + dampening * torch.eye(len(hessian), device=hessian.device)
            factor = _inverse_factor(dampened[order][:, order])
            if factor is not None:
                return cls(dampened, factor, order)
            dampening = dampening * MORE_DAMPENING
        raise ValueError(
            f"the products of the inputs of {name} reach {float(diagonal.max()):g}, which float32 cannot invert: "
            "give --method awq or w8a8, or weights that are not damaged"
        )

    @property
    def importance(self) -> Tensor:
        """[D] what a column's error costs once the columns behind it have made up for what they can."""
        costs = self.factor.diagonal().square().reciprocal()
        return torch.empty_like(costs).index_copy_(0, self.order, costs)

    def cost(self, error: Tensor) -> Tensor:
        """[F] the square error of outputs, of an error [F, D] of the weight."""
        return (error @ self.hessian).mul_(error).sum(1)


def refuse_infinite(tensor: Tensor, what: str) -> None:
    """Raise ValueError if a number of a tensor is not finite."""
    if not bool(tensor.isfinite().all()):
        bad = tensor[~tensor.isfinite()]
        raise ValueError(
            f"{what} have {len(bad)} of {tensor.numel()} numbers that are not finite, such as {float(bad[0])}: the "
            "model's weights are damaged or overflow float32, fetch the model again"
        )


def _inverse_factor(hessian: Tensor) -> Tensor | None:
    """The upper Cholesky factor of the inverse; None where rounding makes that impossible."""
    lower, failed = torch.linalg.cholesky_ex(hessian)
    if int(failed):
        return None
    upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    return None if int(failed) or not bool(upper.isfinite().all()) else upper


def quantise(weight: Tensor, curvature: Curvature, recipe: Recipe, scale_dtype: torch.dtype) -> QuantisedWeight:
    """A weight [F, D] float32 in codes, made for the inputs that `curvature` is of."""
    grid = search(weight, recipe, curvature.importance, scale_dtype)
    codes = _rounded_in_order(weight, grid, curvature)
    best = curvature.cost(grid.values(codes) - weight)
    for _ in range(ROUNDS):
        scale = as_stored(_best_scale(weight, codes, grid, curvature), scale_dtype)
        other = with_scale(grid, scale)
        improved = _descended(weight, codes, other, curvature)
        cost = curvature.cost(other.values(improved) - weight)
        is_better = (cost < best)[:, None]
        codes = torch.where(is_better, improved, codes)
        grid = with_scale(grid, torch.where(is_better, scale, grid.scale))
        best = torch.minimum(cost, best)
    return grid.stored(codes)


def _rounded_in_order(weight: Tensor, grid: Grid, curvature: Curvature) -> Tensor:
    """Codes [F, D]: the paper's algorithm, in blocks."""
    order, factor = curvature.order, curvature.factor
    levels = Levels.of(grid, order)
    left = weight.t()[order].contiguous()  # [D, F], so that a column of the weight is in one run
    values = torch.empty_like(left)
    for start in range(0, len(order), BLOCK):
        stop = min(start + BLOCK, len(order))
        errors = torch.empty_like(left[start:stop])
        own = factor[start:stop, start:stop]
        for place in range(stop - start):
            wanted = left[start + place]
            values[start + place] = nearest = levels.nearest(wanted, start + place)
            errors[place] = error = (wanted - nearest) / own[place, place]
            left[start + place : stop].addr_(own[place, place:], error, alpha=-1)
        left[stop:].addmm_(factor[start:stop, stop:].t(), errors, alpha=-1)
    return grid.codes(torch.empty_like(values).index_copy_(0, order, values).t())


def _best_scale(weight: Tensor, codes: Tensor, grid: Grid, curvature: Curvature) -> Tensor:
    """[F, G] the scales with the least cost for given codes; those of a row that has no such are as they were."""
    parts = []
    num_groups = grid.scale.shape[1]
    for start in range(0, len(weight), ROWS):
        rows = slice(start, start + ROWS)
        units = codes[rows] - grid.zero[rows][:, grid.groups]  # [f, D]
        by_group = units.unflatten(1, (num_groups, -1))  # [f, G, n]
        system = units.new_empty(len(units), num_groups, num_groups)
        for group in range(num_groups):
            product = by_group[:, group] @ curvature.hessian.unflatten(0, (num_groups, -1))[group]  # [f, D]
            system[:, group] = product.mul_(units).unflatten(1, (num_groups, -1)).sum(-1)
        wanted = (weight[rows] @ curvature.hessian).mul_(units).unflatten(1, (num_groups, -1)).sum(-1)
        found, failed = torch.linalg.solve_ex(system, wanted)
        is_usable = (failed == 0) & (found > 0).all(1) & found.isfinite().all(1)
        parts.append(torch.where(is_usable[:, None], found, grid.scale[rows]))
    return torch.cat(parts)


def _descended(weight: Tensor, codes: Tensor, grid: Grid, curvature: Curvature) -> Tensor:
    """Codes [F, D], each set in turn to the best beside all others."""
    hessian, diagonal = curvature.hessian, curvature.hessian.diagonal()
    levels = Levels.of(grid, torch.arange(len(hessian), device=hessian.device))
    values = grid.values(codes).t().contiguous()  # [D, F]
    slope = hessian @ (weight.t() - values)  # [D, F]
    for start in range(0, len(hessian), BLOCK):
        stop = min(start + BLOCK, len(hessian))
        changes = torch.empty_like(slope[start:stop])
        own = hessian[start:stop, start:stop]
        for place in range(stop - start):
            index = start + place
            nearest = levels.nearest(values[index] + slope[index] / diagonal[index], index)
            changes[place] = change = nearest - values[index]
            values[index] = nearest
            slope[start:stop].addr_(own[place], change, alpha=-1)
        slope[:start].addmm_(hessian[:start, start:stop], changes, alpha=-1)
        slope[stop:].addmm_(hessian[stop:, start:stop], changes, alpha=-1)
    return grid.codes(values.t())
