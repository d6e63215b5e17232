"""The matrix products of the backend for GPUs through the compiler, for an H200 and without one: see `test_triton.py`.

Beside what `compiled_kernels.py` asks, the machine code must keep everything in registers, and read the weight in whole
units of memory, ahead of its use: a decode is as fast as that.
"""

from __future__ import annotations

import pytest
import torch

from benchmark.commands.kernels import launch_product
from server.backends.cuda.kernels.linear import Tiling, tilings
from server.backends.cuda.machine_code import WHOLE_UNITS, MachineCode
from tests.server.backends.cuda.compiled_cases import found
from tests.server.backends.cuda.kernel_cases import in_suite

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
