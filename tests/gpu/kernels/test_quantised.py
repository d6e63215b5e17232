"""Quantised products on a GPU: the cases of the interpreter in every dtype, torch's operators, and what is captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmark.commands.kernels import QUANTISED_KINDS, LayerShape
from server.arch.spec import Activation
from server.backends.reference.linear import stock_gate
from server.quantisation.random_weight import noise
from tests.gpu.selection import DTYPES, GPU, NEEDS_GPU, first
from tests.server.backends.cuda.kernel_cases import MANY_SPLITS, ONE_SPLIT, random
from tests.server.backends.cuda.linear_cases import close, products
from tests.server.backends.cuda.quantised_cases import (
    CUT,
    ROUNDED,
    WEIGHT_ONLY,
    WeightCase,
    check_codes,
    check_grouped,
    check_rounded,
    check_weight_only,
    check_widened,
)

pytestmark = NEEDS_GPU
BY_NAME = {case.name: case for case in (*WEIGHT_ONLY, *ROUNDED, *CUT)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", first([1, 3, 16, 40, 130], [1, 40]))
@pytest.mark.parametrize("case", WEIGHT_ONLY, ids=lambda case: case.name)
def test_weight_only_products_equal_the_reference(case: WeightCase, rows: int, dtype: torch.dtype) -> None:
    check_weight_only(case, rows, dtype, GPU)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", WEIGHT_ONLY, ids=lambda case: case.name)
def test_products_of_thousands_of_rows_take_the_weight_as_numbers(case: WeightCase, dtype: torch.dtype) -> None:
    check_widened(case, dtype, GPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", first([2, 60, 300], [60]))
@pytest.mark.parametrize("case", WEIGHT_ONLY, ids=lambda case: case.name)
def test_gated_products_equal_the_reference(case: WeightCase, rows: int, dtype: torch.dtype) -> None:
    check_weight_only(case, rows, dtype, GPU, is_gated=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", first([1, 19, 130], [19]))
@pytest.mark.parametrize("case", [*ROUNDED, *CUT], ids=lambda case: case.name)
def test_products_of_rounded_inputs_equal_the_emulation(case: WeightCase, rows: int, dtype: torch.dtype) -> None:
    check_rounded(case, rows, dtype, GPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*ROUNDED, *CUT], ids=lambda case: case.name)
def test_inputs_are_rounded_as_the_reference_does(case: WeightCase, dtype: torch.dtype) -> None:
    check_codes(case, 5, dtype, GPU)


@pytest.mark.parametrize("processors", first([ONE_SPLIT, MANY_SPLITS], [MANY_SPLITS]))
@pytest.mark.parametrize("rows", first([2, 20, 700], [20]))
@pytest.mark.parametrize("name", ["int4 in groups of 32", "int4, groups out of order", "nf4", "w8a8", "fp8, blocks"])
def test_experts_in_one_launch_equal_one_after_the_other(name: str, rows: int, processors: int) -> None:
    check_grouped(BY_NAME[name], rows, torch.float16, GPU, processors)


def layer_of(kind: str, shape: LayerShape) -> Any:
    from server.backends.cuda.quantised import CudaQuantised

    weight = noise(QUANTISED_KINDS[kind], shape.features, shape.inputs, GPU)
    shared = products(GPU, torch.cuda.get_device_properties(GPU).multi_processor_count)
    return CudaQuantised(weight, torch.bfloat16, is_gated=shape.is_gated, gate=stock_gate, products=shared)


@pytest.mark.parametrize("rows", [17, 32, 300])
@pytest.mark.parametrize("kind", ["W8A8", "fp8"])
def test_torchs_operator_equals_the_kernel(kind: str, rows: int) -> None:
    from server.backends.cuda.kernels.linear import Epilogue
    from server.backends.cuda.quantised import MOST_GATED_ROWS

    for is_gated in (False, True):
        layer = layer_of(kind, LayerShape(1024, 2048, is_gated))
        x, bias = (random(*size, dtype=torch.bfloat16, device=GPU) for size in ((rows, 2048), (1024,)))
        taken, epilogue = layer.inputs(x), Epilogue(bias, Activation.SILU)
        assert layer.operator is not None
        found = [way(taken, epilogue, torch.bfloat16) for way in (layer.by_kernel, layer.by_torch)]
        close(found[0].float(), found[1], torch.bfloat16)
        if kind == "W8A8" and not (is_gated and rows > MOST_GATED_ROWS):  # whose gate follows a sum that was rounded
            assert torch.equal(*found)


@pytest.mark.parametrize("kind", list(QUANTISED_KINDS))
def test_products_are_captured_and_replayed(kind: str) -> None:
    """Nothing asks the host: a capture would break."""
    layer = layer_of(kind, LayerShape(4096, 4096))
    x = random(4, 4096, dtype=torch.bfloat16, device=GPU)
    expected = layer(x, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer(x, None)
    for _ in range(20):
        graph.replay()
        assert torch.equal(expected, found)
