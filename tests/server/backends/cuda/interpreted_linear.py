"""The matrix products of the backend for GPUs on a CPU, in Triton's interpreter: run by `test_triton.py`.

bfloat16 is left out: the interpreter computes on its bit patterns.
"""

from __future__ import annotations

from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from server.arch.spec import Activation
from server.backends.cuda.choice import Chooser
from server.backends.reference.linear import stock_gate
from tests.combinations import by_turns
from tests.server.backends.cuda.interpreted_cases import inside, quick_calls
from tests.server.backends.cuda.kernel_cases import MANY_SPLITS, ONE_SPLIT, in_suite
from tests.server.backends.cuda.linear_cases import (
    ACTIVATED,
    FEW,
    GATED,
    MORE,
    PRODUCTS,
    RAGGED,
    SPLIT,
    ProductCase,
    check_experts,
    check_format,
    check_product,
    products,
)

__all__ = ["inside", "quick_calls"]

# numpy, which interprets, says what a GPU leaves unsaid.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
CPU = torch.device("cpu")
# In 32 bits and in 16, whose tiles differ: every kind once in each, split products by turns.
IN_16_BITS = [FEW[0], GATED[0], SPLIT[1], FEW[4], GATED[1], SPLIT[0], *SPLIT[4:]]
IN_32_BITS = [case for case in PRODUCTS if case not in (FEW[3], FEW[4], FEW[5], *SPLIT[:2], *SPLIT[4:])]
FIRST_IN_32_BITS = [FEW[0], FEW[7], MORE[0], MORE[3], ACTIVATED[1], GATED[3], RAGGED[2], RAGGED[5], SPLIT[2]]


@pytest.mark.parametrize("case", in_suite(FIRST_IN_32_BITS, IN_32_BITS), ids=str)
def test_products_equal_the_reference(case: ProductCase) -> None:
    check_product(case, torch.float32, CPU)


@pytest.mark.parametrize("case", in_suite(IN_16_BITS[:3], IN_16_BITS), ids=str)
def test_products_in_16_bits_are_close_to_the_reference(case: ProductCase) -> None:
    check_product(case, torch.float16, CPU)


@pytest.mark.parametrize(("rows", "processors"), in_suite([(2, MANY_SPLITS), (40, MANY_SPLITS)], [(9, ONE_SPLIT)]))
def test_experts_in_one_launch_equal_one_after_the_other(rows: int, processors: int) -> None:
    check_experts(rows, torch.float16, CPU, processors)


def test_an_experts_rows_are_all_that_its_programs_write() -> None:
    """Programs run one after the other here, and would mend what an earlier one did: so nobody comes after the last."""
    from server.backends.cuda.linear import CudaGrouped

    weights, x = torch.ones(2, 16, 16), torch.ones(10, 16)
    experts = CudaGrouped(weights, 2, gate=stock_gate, products=products(CPU, ONE_SPLIT))
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    try:
        found = experts(x, torch.tensor([3, 6], dtype=torch.int32))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(torch.full((6, 16), 16.0), found[:6])
    assert found[6:].isnan().all()


@pytest.mark.parametrize(
    ("rows", "activation", "is_gated"),
    [
        (4, None, False),
        (300, None, False),
        (9, Activation.GELU, False),
        *by_turns((4, 300, 300, 4, 9), Activation, (False, True)),
    ],
)
def test_formats_equal_the_reference(rows: int, activation: Activation | None, is_gated: bool) -> None:
    check_format(rows, activation, is_gated, torch.float16, CPU)


def test_splits_fill_the_gpu_and_no_more() -> None:
    from server.backends.cuda.kernels.linear import MAX_SPLITS, choose_splits

    assert 4 == choose_splits(tiles=64, depth_tiles=32, programs=396)
    assert 1 == choose_splits(tiles=256, depth_tiles=32, programs=396)
    assert 2 == choose_splits(tiles=8, depth_tiles=9, programs=396)  # few inputs have no more to split
    assert MAX_SPLITS == choose_splits(tiles=1, depth_tiles=1000, programs=396)
    assert 1 == choose_splits(tiles=1, depth_tiles=1000, programs=1)


class KernelIsFast:
    """A clock for which our own kernel takes half the time of stock operators."""

    def __init__(self) -> None:
        self.timed_rows: list[int] = []

    def can_time(self) -> bool:
        return True

    def __call__(self, trial: partial[Tensor]) -> float:
        self.timed_rows.append(len(trial.args[0]))
        return 1.0 if trial.func.__name__ == "_few_rows" else 2.0


def test_a_format_computes_in_the_way_that_was_measured_to_be_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows up to the next power of two share a measurement; another epilogue has one of its own."""
    from server.backends.cuda import linear

    kernel = Mock(wraps=linear.multiply_rows)
    monkeypatch.setattr(linear, "multiply_rows", kernel)
    x, weight, bias, _ = ProductCase(12).tensors(torch.float16, CPU)
    shared, clock = products(CPU, ONE_SPLIT), KernelIsFast()
    shared.chooser = Chooser(clock)
    layer = linear.CudaDense(weight, gate=stock_gate, products=shared)
    layer(x, bias)
    assert 0 == kernel.call_count  # not measured yet: more rows than the kernel usually takes
    with shared.chooser.measuring():
        layer(x, bias)
    assert {16} == set(clock.timed_rows)
    [said] = shared.chooser.found
    features, inputs = weight.shape
    assert said.startswith(f"16 x {inputs} x {features} float16 + bias: kernel 16x") and "(cuBLAS 2000.0 us" in said
    for rows, activation, calls in ((12, None, 2), (9, None, 3), (12, Activation.SILU, 3), (8, None, 4)):
        layer(x[:rows], bias, activation)
        assert calls == kernel.call_count
    with shared.chooser.measuring():
        layer.finest(x, bias)  # by the rule, whatever was measured
    assert 4 == kernel.call_count
