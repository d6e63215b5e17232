"""The matrix products of the backend for GPUs through the compiler, for an H200 and without one: see `test_triton.py`.

Beside what `compiled_kernels.py` asks, the machine code must keep everything in registers, and read the weight in whole
units of memory, ahead of its use: a decode is as fast as that.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmark.commands.kernels import launch_product
from server.arch.spec import Activation
from server.backends.cpu.device import CpuDevice
from server.backends.cuda.backend import CudaBackend
from server.backends.cuda.fused import fused_gate
from server.backends.cuda.kernels.linear import Tiling, tilings
from server.backends.cuda.linear import CudaDense
from server.backends.cuda.machine_code import WHOLE_UNITS, MachineCode
from server.layers.mlp import MoeMlp
from tests.server.backends.cuda.compiled_cases import found
from tests.server.backends.cuda.kernel_cases import MANY_SPLITS, in_suite
from tests.server.backends.cuda.linear_cases import products

__all__ = ["found"]


def check(code: MachineCode, tiling: Tiling) -> None:
    """Nothing is spilled, weights come in whole units, and as many programs fit as the grid counts on."""
    assert 0 == code.local_bytes and code.full_instructions[WHOLE_UNITS], (tiling, code)
    assert code.programs_per_processor >= tiling.resident, (tiling, code)


# Rows, dtype, gates: the first tiling of each, which is taken where nothing was measured; others are the command's.
SHAPES = [
    (64, torch.bfloat16, True),
    (8, torch.bfloat16, False),
    (8, torch.bfloat16, True),
    (16, torch.bfloat16, False),
    (8, torch.float32, True),
]


@pytest.mark.parametrize(("rows", "dtype", "is_gated"), in_suite(SHAPES[:2], SHAPES))
def test_products_read_ahead_and_spill_nothing(
    rows: int, dtype: torch.dtype, is_gated: bool, found: list[MachineCode]
) -> None:
    tiling = tilings(rows, dtype, is_gated=is_gated)[0]
    launch_product(rows, dtype, is_gated=is_gated, tiling=tiling)
    (code,) = found
    check(code, tiling)
    counts = code.full_instructions
    assert any(count for name, count in counts.items() if name.startswith(("HMMA", "HGMMA"))) == (
        dtype != torch.float32
    ), code
    if dtype == torch.bfloat16:
        copies = sum(count for name, count in counts.items() if name.startswith("LDGSTS"))
        assert copies - counts[WHOLE_UNITS] <= tiling.stages, (tiling, code)  # of the rows alone, once a stage


# Rows of all experts, and of the tile that they are computed in.
@pytest.mark.parametrize(("rows", "tile_rows", "is_gated"), in_suite([(2, 8, True)], [(64, 16, False)]))
def test_experts_read_ahead_and_spill_nothing(
    rows: int, tile_rows: int, is_gated: bool, found: list[MachineCode]
) -> None:
    launch_product(rows, torch.bfloat16, is_gated=is_gated, experts=8)
    (code,) = found
    check(code, tilings(tile_rows, torch.bfloat16, is_gated=is_gated)[0])


def test_inputs_that_are_no_whole_units_compile(found: list[MachineCode]) -> None:
    launch_product(3, torch.bfloat16, is_gated=True, inputs=77)
    (code,) = found
    assert 0 == code.local_bytes


class Operators(TorchDispatchMode):
    """Notes the operators that compute something: views and fresh memory cost no launch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func.name():
            self.names.append(func.name().removeprefix("aten::"))
        return func(*args, **kwargs or {})


def launches(found: list[MachineCode], rows: int, activation: Activation | None) -> list[str]:
    """What a product with a bias launches: "kernel" for each of ours, and the operators of torch."""
    before = len(found)
    sizes = (rows, 256), (128, 256), (128,)
    x, weight, bias = (torch.empty(*size, dtype=torch.bfloat16, device="meta") for size in sizes)
    layer = CudaDense(weight, gate=fused_gate, products=products(torch.device("meta"), MANY_SPLITS))
    with Operators() as operators:
        layer(x, bias, activation)
    return ["kernel"] * (len(found) - before) + operators.names


def test_a_decodes_product_is_one_launch_whatever_follows_it(found: list[MachineCode]) -> None:
    assert ["kernel"] == launches(found, 1, Activation.GELU)


def test_many_rows_have_bias_and_activation_in_the_product_of_cublas(found: list[MachineCode]) -> None:
    assert ["addmm"] == launches(found, 32, None)
    assert ["_addmm_activation"] == launches(found, 32, Activation.GELU_TANH)
    assert ["_addmm_activation"] == launches(found, 4096, Activation.RELU)
    assert ["addmm", "gelu"] == launches(found, 32, Activation.GELU)  # the exact one has no epilogue


def test_a_mixture_is_six_launches_and_asks_the_host_nothing(
    found: list[MachineCode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On tensors without values, from which nothing can be read."""
    properties = SimpleNamespace(multi_processor_count=MANY_SPLITS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    backend = CudaBackend(CpuDevice(), torch.bfloat16)
    make = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    mixture = MoeMlp(
        router=backend.linear(make(8, 256)),
        routing=backend.routing(8, 2, renormalise=True),
        up=backend.grouped(make(8, 256, 256), 8, is_gated=True),
        down=backend.grouped(make(8, 256, 128), 8),
        activation=Activation.SILU,
    )
    assert (1, 256) == mixture(make(1, 256)).shape
    products_and_routes = ["_multiply_rows", "_choose", "_group", "_multiply_rows", "_multiply_rows", "_weigh"]
    assert products_and_routes == [code.kernel for code in found]
