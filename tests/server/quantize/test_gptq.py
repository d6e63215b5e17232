"""GPTQ and the choice of scales against plain ways to compute the same: the paper's loop, and all scales tried."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from server.quantisation.packing import pack, unpack
from server.quantize import gptq
from server.quantize.grids import Grid, plain, search
from server.quantize.recipe import Recipe
from tests.server.quantisation import packers
from tests.server.quantisation.cases import in_pairs

F, D, GROUP = 12, 64, 32


def drawn() -> tuple[Tensor, Tensor]:
    """A weight [F, D] and the mean of x xᵀ [D, D] of correlated inputs of different sizes."""
    generator = torch.Generator().manual_seed(5)
    mix = torch.randn(D, D, generator=generator) / D**0.5 + torch.eye(D)
    x = torch.randn(400, D, generator=generator) @ mix * torch.logspace(-1, 1, D)
    return torch.randn(F, D, generator=generator), x.t() @ x / len(x)


def output_error(weight: Tensor, made: Tensor, hessian: Tensor) -> float:
    return float(((made - weight) @ hessian * (made - weight)).sum())


def plain_gptq(weight: Tensor, hessian: Tensor, grid: Grid) -> Tensor:
    """Algorithm 1 of the paper for one row after the other: round a column, and solve for the best of those left."""
    made = weight.double().clone()
    hessian = hessian.double()
    for column in range(D):
        scale, zero = (t[:, grid.groups[column]].double() for t in (grid.scale, grid.zero))
        code = (made[:, column] / scale + zero).round().clamp(0, grid.most)
        error = (code - zero) * scale - made[:, column]
        made[:, column] += error
        if column + 1 < D:  # the change of those left that makes up for the error best
            left = hessian[column + 1 :, column + 1 :]
            made[:, column + 1 :] -= error[:, None] * torch.linalg.solve(left, hessian[column + 1 :, column])
    return made.float()


@pytest.mark.parametrize(("bits", "block"), [(2, 16), (3, 16), (4, 128)])
def test_blocks_give_what_the_paper_s_algorithm_gives(bits: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq, "BLOCK", block)
    weight, hessian = drawn()
    grid = plain(weight, Recipe("gptq", bits, GROUP), torch.float32)
    curvature = gptq.Curvature.of(hessian, activation_order=False)
    found = grid.values(gptq._rounded_in_order(weight, grid, curvature))
    expected = plain_gptq(weight, curvature.hessian, grid)
    assert 0.99 < float((found == expected).float().mean())  # a tie may fall to either side
    assert output_error(weight, found, hessian) == pytest.approx(output_error(weight, expected, hessian), rel=0.02)


@pytest.mark.parametrize(("bits", "symmetric", "ordered"), in_pairs((2, 3, 4), (True, False), (True, False)))
def test_each_step_lessens_the_error(
    bits: int, symmetric: bool, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, hessian = drawn()
    recipe = Recipe("gptq", bits, GROUP, symmetric, ordered)
    curvature = gptq.Curvature.of(hessian, activation_order=ordered)
    nearest = plain(weight, recipe, torch.float16)
    errors = [output_error(weight, nearest.values(nearest.codes(weight)), curvature.hessian)]
    for rounds in (0, 1, 4):
        monkeypatch.setattr(gptq, "ROUNDS", rounds)
        made = gptq.quantise(weight, curvature, recipe, torch.float16)
        errors.append(output_error(weight, made.dequantised(), curvature.hessian))
        assert torch.equal(made.scale, made.scale.half().float()), "a scale is not what is stored"
        assert int(made.codes.max()) < 1 << bits
    assert errors == sorted(errors, reverse=True)
    assert errors[1] < 0.8 * errors[0] and errors[-1] < 0.97 * errors[1]


def test_scales_are_the_best_for_their_codes() -> None:
    """There the error has no slope."""
    weight, hessian = drawn()
    curvature = gptq.Curvature.of(hessian, activation_order=False)
    grid = plain(weight, Recipe("gptq", 3, GROUP), torch.float32)
    codes = grid.codes(weight)

    def slope(scale: Tensor) -> float:
        wanted = scale.double().requires_grad_()
        error = (codes - grid.zero[:, grid.groups]).double() * wanted[:, grid.groups] - weight.double()
        (found,) = torch.autograd.grad((error @ curvature.hessian.double() * error).sum(), wanted)
        return float(found.abs().max())

    assert slope(gptq._best_scale(weight, codes, grid, curvature)) < 1e-3 * slope(grid.scale)


def test_inputs_that_never_come_do_no_harm() -> None:
    weight, hessian = drawn()
    hessian[3], hessian[:, 3] = 0.0, 0.0
    made = gptq.quantise(
        weight, gptq.Curvature.of(hessian, activation_order=True), Recipe("gptq", 4, GROUP), torch.float16
    )
    assert bool(made.dequantised().isfinite().all())
    assert float((made.dequantised()[:, 3] - weight[:, 3]).abs().max()) < float(made.scale.max())
    nothing = gptq.Curvature.of(torch.zeros(D, D), activation_order=True)
    assert bool(gptq.quantise(weight, nothing, Recipe("gptq", 4, GROUP), torch.float16).dequantised().isfinite().all())


def test_a_matrix_of_sums_that_cannot_be_factored_is_dampened_more() -> None:
    indefinite = torch.eye(D)
    indefinite[0, 1] = indefinite[1, 0] = 1.05
    curvature = gptq.Curvature.of(indefinite, activation_order=False)
    assert float(curvature.hessian[0, 0]) > 1.05


@pytest.mark.parametrize("symmetric", [True, False])
def test_clipping_is_the_best_of_all_ranges_that_are_tried(symmetric: bool) -> None:
    """Beside it, a search over far more ranges for one group finds little better."""
    weight = torch.randn(1, GROUP, generator=torch.Generator().manual_seed(1)) ** 3
    importance = torch.rand(GROUP, generator=torch.Generator().manual_seed(2))
    grid = search(weight, Recipe("gptq", 2, GROUP, symmetric), importance, torch.float32)
    found = float(((grid.values(grid.codes(weight)) - weight) ** 2 * importance).sum())
    best = min(
        float((((weight / scale + zero).round().clamp(0, 3) - zero) * scale - weight).square().mul(importance).sum())
        for scale, zero in itertools.product(
            torch.linspace(0.01, 1.0, 400) * float(weight.abs().max()), [2] if symmetric else range(4)
        )
    )
    assert found < 1.05 * best + 1e-6
    wide = plain(weight, Recipe("gptq", 2, GROUP, symmetric), torch.float32)
    assert found < 0.9 * float(((wide.values(wide.codes(weight)) - weight) ** 2 * importance).sum())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("size", [32, 96, 37])
def test_packed_codes_are_those_of_the_format(bits: int, size: int) -> None:
    codes = torch.randint(0, 1 << bits, (5, size), generator=torch.Generator().manual_seed(bits))
    assert torch.equal(packers.packed_rows(codes, bits), pack(codes, bits, dim=1))
    assert torch.equal(packers.packed_rows(codes, bits).t(), pack(codes.t(), bits, dim=0))
    assert torch.equal(codes.to(torch.uint8), unpack(pack(codes, bits, dim=1), bits, dim=1)[:, :size])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_products_that_are_not_finite_are_refused(number: float) -> None:
    _, hessian = drawn()
    hessian[3, 3] = number
    with pytest.raises(ValueError, match=f"inputs of h.0.up have 1 of 4096 numbers that are not finite, .* {number}:"):
        gptq.Curvature.of(hessian, activation_order=True, name="h.0.up")


def test_dampening_ends() -> None:
    """The mean of what is finite need not be; and products that are all 0 can be dampened."""
    _, hessian = drawn()
    with pytest.raises(ValueError, match=r"inputs of h.0.up reach 3e.38, which float32 cannot invert: give --method"):
        gptq.Curvature.of(torch.diag(torch.full((D,), 3e38)), activation_order=True, name="h.0.up")
    for scale in (0.0, 1e-38, 1e-30, 1e30):
        curvature = gptq.Curvature.of(hessian * scale, activation_order=True)
        assert bool(curvature.factor.isfinite().all())
