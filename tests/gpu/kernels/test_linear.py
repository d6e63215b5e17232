"""Matrix products on a GPU: the cases of the interpreter in every dtype, cuBLAS's epilogues, and what is measured."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from server.arch.spec import Activation
from tests.gpu.selection import DTYPES, GPU, NEEDS_GPU, first
from tests.server.backends.cuda.kernel_cases import MANY_SPLITS, ONE_SPLIT, random
from tests.server.backends.cuda.linear_cases import (
    PRODUCTS,
    ProductCase,
    check_experts,
    check_format,
    check_product,
    products,
)

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_products_equal_the_reference(case: ProductCase, dtype: torch.dtype) -> None:
    check_product(case, dtype, GPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("processors", first([ONE_SPLIT, MANY_SPLITS], [MANY_SPLITS]))
@pytest.mark.parametrize("rows", first([2, 9, 40, 700], [9, 700]))
def test_experts_in_one_launch_equal_one_after_the_other(rows: int, processors: int, dtype: torch.dtype) -> None:
    check_experts(rows, dtype, GPU, processors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("activation", "is_gated"), [(None, False), *product(Activation, (False, True))])
@pytest.mark.parametrize("rows", first([1, 4, 9, 32, 300], [1, 32]))
def test_formats_equal_the_reference(
    rows: int, activation: Activation | None, is_gated: bool, dtype: torch.dtype
) -> None:
    check_format(rows, activation, is_gated, dtype, GPU)


@pytest.mark.parametrize("rows", [1, 2, 32, 4096], ids="{} rows".format)
def test_cublas_computes_the_gelu_with_tanh(rows: int) -> None:
    """In float32, where both forms of GELU can be told apart: they differ by up to 5e-4."""
    x, weight, bias = (random(*size, dtype=torch.float32, device=GPU) for size in ((rows, 96), (512, 96), (512,)))
    y = F.linear(x, weight / 10, bias)
    found = torch._addmm_activation(bias, x, (weight / 10).t(), use_gelu=True)
    torch.testing.assert_close(F.gelu(y, approximate="tanh"), found, atol=2e-5, rtol=2e-5)
    assert (F.gelu(y) - found).abs().max() > 1e-4


def test_a_split_product_is_the_same_every_time() -> None:
    """Whichever program arrives last, in a graph too; what the next product finds is clean."""
    from server.backends.cuda.kernels.linear import Epilogue, multiply_rows

    x, weight = (random(*size, dtype=torch.bfloat16, device=GPU) for size in ((3, 16384), (4096, 16384)))
    shared = products(GPU, MANY_SPLITS)
    workspace = shared.workspace(GPU)
    first = multiply_rows(x, weight, Epilogue(), workspace, is_gated=False)
    for _ in range(200):
        assert torch.equal(first, multiply_rows(x, weight, Epilogue(), workspace, is_gated=False))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = multiply_rows(x, weight, Epilogue(), workspace, is_gated=False)
    for _ in range(20):
        graph.replay()
        assert torch.equal(first, out)
    assert not workspace.counters.any()


def test_a_capture_measures_a_product_and_replays_the_fastest_way() -> None:
    from server.backends.cuda.backend import CudaBackend
    from server.backends.cuda.device import CudaDevice

    backend = CudaBackend(CudaDevice(0), torch.bfloat16)
    x, weight = (random(*size, dtype=torch.bfloat16, device=GPU) / 8 for size in ((4, 4096), (4096, 4096)))
    layer = backend.linear(weight)
    expected = layer(x, None)
    assert not backend._chooser._chosen
    replay = backend.graph_capture([4])(lambda: (layer(x, None),))
    assert 1 == len(backend._chooser._chosen)
    (found,) = replay()
    torch.testing.assert_close(expected, found, atol=3e-2, rtol=3e-2)
