"""What matrix products on a GPU are checked on, in the interpreter and on a GPU: against the reference in float32.

The modules under test are imported by the checks, not here: see `kernel_cases.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from server.arch.spec import Activation
from server.backends.protocol import LinearFormat
from server.backends.reference.linear import DenseFormat, LoopedExperts, stock_gate
from tests.server.backends.cuda.kernel_cases import MANY_SPLITS, ONE_SPLIT, TOLERANCES, random


@dataclass(frozen=True)
class ProductCase:
    """A product of `rows` rows with a weight [F, D], and what follows it."""

    rows: int
    features: int = 72
    inputs: int = 96
    activation: Activation | None = None
    is_gated: bool = False
    has_bias: bool = True
    has_residual: bool = False
    processors: int = ONE_SPLIT

    def tensors(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """x, weight, bias and residual, such that what comes out is around 1."""
        outputs = self.features * (2 if self.is_gated else 1)
        make = partial(random, dtype=dtype, device=device)
        weight = make(outputs, self.inputs) / self.inputs**0.5
        bias = make(outputs) if self.has_bias else None
        residual = make(self.rows, self.features) if self.has_residual else None
        return make(self.rows, self.inputs), weight, bias, residual


FEW = [ProductCase(rows) for rows in range(1, 9)]
MORE = [ProductCase(rows, activation=Activation.GELU_TANH, has_residual=True) for rows in (9, 33, 65, 130)]
ACTIVATED = [ProductCase(3, activation=activation, has_bias=False) for activation in Activation]
GATED = [ProductCase(2, activation=activation, is_gated=True, has_residual=True) for activation in Activation]
# Tails in features and inputs; neither a multiple of 16 bytes in the last.
RAGGED = [
    ProductCase(3, features, inputs, Activation.SILU, is_gated, has_residual=True)
    for features, inputs in ((64, 128), (130, 200), (33, 77))
    for is_gated in (False, True)
]
SPLIT = [
    ProductCase(rows, 70, 2100, Activation.GELU, is_gated, has_residual=True, processors=MANY_SPLITS)
    for rows in (1, 8, 19)
    for is_gated in (False, True)
]
PRODUCTS = [*FEW, *MORE, *ACTIVATED, *GATED, *RAGGED, *SPLIT]


def reference(case: ProductCase, weight: Tensor) -> LinearFormat:
    """The same format in float32 and stock operators."""
    return DenseFormat(weight.float(), is_gated=case.is_gated)


def check_product(case: ProductCase, dtype: torch.dtype, device: torch.device) -> None:
    """Every tiling of the kernel computes as the reference does, and leaves its workspace as it was."""
    from server.backends.cuda.kernels.linear import Epilogue, Workspace, multiply_rows, tilings

    x, weight, bias, residual = case.tensors(dtype, device)
    exact = reference(case, weight)(*(None if t is None else t.float() for t in (x, bias)), case.activation)
    expected = exact if residual is None else exact + residual.float()
    workspace = Workspace(device, case.processors)
    epilogue = Epilogue(bias, case.activation, residual)
    for tiling in tilings(case.rows, weight.dtype, is_gated=case.is_gated):
        found = multiply_rows(x, weight, epilogue, workspace, is_gated=case.is_gated, tiling=tiling)
        close(expected, found, dtype)
        assert dtype == found.dtype
        assert not workspace.counters.any()


def check_experts(rows: int, dtype: torch.dtype, device: torch.device, processors: int) -> None:
    """All experts in one launch as one after the other; gated, then not.

    Of few rows, some experts have none; of many, one has nearly all, and so the most tiles that there may be.
    """
    from server.backends.cuda.linear import CudaGrouped

    experts, inputs, features = 5, 200, 70
    shares = [0, 1, 1, max(rows - 2, 1), rows] if rows < 40 else [1, 2, 3, rows - 1, rows]
    ends = torch.tensor(shares, dtype=torch.int32, device=device)
    for is_gated in (True, False):
        weights = random(experts, features * (2 if is_gated else 1), inputs, dtype=dtype, device=device) / inputs**0.5
        x = random(rows, inputs, dtype=dtype, device=device)
        case = ProductCase(rows, features, inputs, is_gated=is_gated)
        shared = {"is_gated": is_gated, "products": products(device, processors)}
        bias = random(*weights.shape[:2], dtype=dtype, device=device)
        made = CudaGrouped(weights, experts, gate=stock_gate, **shared)
        one_by_one = LoopedExperts([reference(case, weight) for weight in weights])
        close(one_by_one(x.float(), ends, Activation.SILU), made(x, ends, Activation.SILU), dtype)
        close(one_by_one(x.float(), ends), made(x, ends), dtype)  # what adapters change
        close(one_by_one(x.float(), ends, Activation.RELU, bias.float()), made(x, ends, Activation.RELU, bias), dtype)


def check_format(
    rows: int, activation: Activation | None, is_gated: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """A format of the backend as that of the reference, in whichever way it computes, with a bias and a residual."""
    from server.backends.cuda.linear import CudaDense

    case = ProductCase(rows, activation=activation, is_gated=is_gated, has_residual=True)
    x, weight, bias, residual = case.tensors(dtype, device)
    assert bias is not None and residual is not None
    made = CudaDense(weight, is_gated=is_gated, gate=stock_gate, products=products(device, ONE_SPLIT))
    exact = reference(case, weight)
    expected = exact(x.float(), bias.float(), activation) + residual.float()
    close(expected, made(x, bias, activation, residual), dtype)
    close(expected - residual.float(), made(x, bias, activation), dtype)
    plain = made.finest(x, bias)
    assert plain.dtype in (torch.float32, dtype)
    close(exact.finest(x.float(), bias.float()), plain, dtype)


def products(device: torch.device, processors: int) -> Any:
    """What formats share, without a clock."""
    from server.backends.cuda.choice import Chooser
    from server.backends.cuda.kernels.linear import Workspace
    from server.backends.cuda.linear import Products

    made = Products(Chooser(None))
    made._workspace = Workspace(device, processors)
    return made


def close(expected: Tensor, found: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(expected, found.float(), atol=tolerance, rtol=tolerance)
