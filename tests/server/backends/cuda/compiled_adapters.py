"""Adapted layers of the backend for GPUs through the compiler, for an H200 and without one: see `test_triton.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmark.commands.kernels import launch_adapted
from server.arch.spec import Activation
from server.backends.cpu.device import CpuDevice
from server.backends.cuda.backend import CudaBackend
from server.backends.cuda.machine_code import WHOLE_UNITS, MachineCode
from server.backends.protocol import LinearChange, LowRank, TokenAdapters
from tests.server.backends.cuda.compiled_cases import Operators, found, of_kernel
from tests.server.backends.cuda.kernel_cases import MANY_SPLITS, in_suite

__all__ = ["found"]

# Rows, dtype, gates.
SHAPES = [
    (8, torch.bfloat16, False),
    (8, torch.bfloat16, True),
    (64, torch.bfloat16, True),
    (8, torch.float16, True),
    (8, torch.float32, False),
    (8, torch.float32, True),
]


@pytest.mark.parametrize(("rows", "dtype", "is_gated"), in_suite(SHAPES[1:2], SHAPES))
def test_both_kernels_spill_nothing_and_multiply_in_matrix_units(
    rows: int, dtype: torch.dtype, is_gated: bool, found: list[MachineCode]
) -> None:
    launch_adapted(rows, dtype, is_gated=is_gated)
    shrink, finish = of_kernel(found, "_shrink"), of_kernel(found, "_finish")
    assert 0 == shrink.local_bytes == finish.local_bytes
    assert shrink.full_instructions[WHOLE_UNITS]
    for code in (shrink, finish):
        units = sum(code.instructions[name] for name in ("HMMA", "HGMMA"))
        assert bool(units) == (dtype != torch.float32), code
    assert shrink.programs_per_processor >= 4 and finish.programs_per_processor >= 2


def test_an_adapted_layer_is_two_launches_more_and_asks_the_host_nothing(
    found: list[MachineCode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ranks there are; the tokens are grouped once in a pass."""
    properties = SimpleNamespace(multi_processor_count=MANY_SPLITS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    backend, tokens = CudaBackend(CpuDevice(), torch.bfloat16), TokenAdapters()
    backend._products.workspace(torch.device("cpu"))  # made once
    layers = [backend.adapted(backend.linear(zeros(256, 128), is_gated=is_gated), 4, tokens, is_gated=is_gated)
              for is_gated in (False, True)]  # fmt: skip
    for layer in layers:
        layer.put(2, LinearChange((LowRank(0, zeros(24, 128), zeros(64, 24), 2.0),), torch.zeros(256)))
    x, residual, rows = zeros(2, 128), zeros(2, 256), torch.tensor([2, 0])
    with tokens.of(TokenAdapters(rows)), Operators() as operators:
        layers[0](x, None, residual=residual)
        layers[1](x, None, Activation.SILU)
        layers[0].finest(x, None)
    each = ["_shrink", "_multiply_rows", "_finish"]
    assert ["_group", "_lay_tiles", *each, *each, *each] == [code.kernel for code in found]
    assert [] == operators.names


def zeros(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.bfloat16)
