"""The quantised products of the backend for GPUs through the compiler, for an H200: see `test_triton.py`.

As for dense ones, the machine code must keep everything in registers and read the weight in whole units of memory,
ahead of its use. A decode of 4-bit weights has three instructions for each of them at the speed of memory (132
multiprocessors, 128 lanes, 1.7 GHz, 4.8 TB/s), so conversions, of which a multiprocessor does 16 a cycle, must not grow
with the weight.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmark.commands.kernels import QUANTISED_KINDS, launch_quantised
from server.arch.spec import Activation
from server.backends.cpu.device import CpuDevice
from server.backends.cuda.backend import CudaBackend
from server.backends.cuda.fused import fused_gate
from server.backends.cuda.kernels.around import finish_integers
from server.backends.cuda.kernels.linear import Epilogue
from server.backends.cuda.kernels.packed import widened
from server.backends.cuda.machine_code import WHOLE_UNITS, MachineCode, compiled_for
from server.quantisation.random_weight import Kind, noise
from server.quantisation.stored import QuantisedWeight, RoundedInputs
from tests.server.backends.cuda.compiled_cases import CPU, Operators, found
from tests.server.backends.cuda.kernel_cases import MANY_SPLITS, in_suite
from tests.server.backends.cuda.linear_cases import products

__all__ = ["found"]


ZEROS, PLAIN = "int4, groups of 128, zero points", "int4, groups of 128"
# Rows, and whether there is a gate: the first tiling of each, which is taken where nothing was measured.
SHAPES = [(8, False), (8, True), (16, False), (64, True), (128, False)]
CASES = [
    *((ZEROS, *shape) for shape in SHAPES),
    *((kind, 8, False) for kind in QUANTISED_KINDS if kind != ZEROS),
    *((kind, 128, False) for kind in (PLAIN, "int8, whole rows", "W8A8", "fp8", "fp8, blocks of 128")),
]
IN_SUITE = [
    (ZEROS, 64, True),
    ("nf4, groups of 64", 8, False),
    ("W8A8", 128, False),
    ("fp8, blocks of 128", 128, False),
]
# What products in each dtype are made of.
MATRIX = {"W8A8": ("IMMA", "IGMMA"), "fp8": ("HMMA", "QGMMA"), "fp8, blocks of 128": ("HMMA", "QGMMA")}


@pytest.mark.parametrize(("kind", "rows", "is_gated"), in_suite(IN_SUITE, CASES))
def test_products_read_ahead_and_spill_nothing(kind: str, rows: int, is_gated: bool, found: list[MachineCode]) -> None:
    (tiling,) = launch_quantised(kind, rows, is_gated=is_gated, only_first=True)
    code = found[-1]
    assert "_multiply_packed" == code.kernel
    assert code.programs_per_processor >= tiling.resident, (tiling, code)
    assert code.full_instructions[WHOLE_UNITS], (tiling, code)
    assert sum(code.instructions[name] for name in MATRIX.get(kind, ("HMMA", "HGMMA"))), (tiling, code)


@pytest.mark.parametrize(
    ("kind", "rows", "is_gated"),
    in_suite(
        [("int2, groups of 64, zero points", 128, False)],
        product(QUANTISED_KINDS, (8, 64), (True, False)),
    ),
)
def test_products_fit_into_the_shared_memory_of_small_gpus(kind: str, rows: int, is_gated: bool) -> None:
    with compiled_for("8.9") as codes:
        launch_quantised(kind, rows, is_gated=is_gated)
    assert all(code.fits for code in codes), codes


WEIGHTS_ALONE = [kind for kind, its in QUANTISED_KINDS.items() if its.inputs is None]


@pytest.mark.parametrize("kind", in_suite([ZEROS], WEIGHTS_ALONE))
def test_a_weight_is_widened_in_whole_units_of_memory(kind: str, found: list[MachineCode]) -> None:
    made = layer(noise(QUANTISED_KINDS[kind], 1024, 1024, CPU))
    widened(made.packed, torch.bfloat16)
    (code,) = found
    stores = [name for name in code.full_instructions if name.startswith("STG")]
    assert stores and all(".64" in name or ".128" in name for name in stores), code.full_instructions


@pytest.mark.parametrize("kind", in_suite([ZEROS], [PLAIN]))
def test_four_bits_are_unpacked_without_conversions(kind: str, found: list[MachineCode]) -> None:
    """128 weights in each thread and step."""
    launch_quantised(kind, 8, is_gated=False, only_first=True)
    code = found[-1]
    assert code.instructions["I2F"] <= 8 and code.instructions["PRMT"] <= 32, code
    assert code.instructions["LOP3"] <= 256, code


def test_rounded_inputs_are_one_launch_more(found: list[MachineCode]) -> None:
    for kind in ("W8A8", "fp8, blocks of 128"):
        before = len(found)
        made, x = layer(noise(QUANTISED_KINDS[kind], 1024, 1024, CPU)), torch.zeros(8, 1024, dtype=torch.bfloat16)
        with Operators() as operators:
            made(x, None)
        assert [] == operators.names  # that compute something, or ask the host
        assert ["_round", "_multiply_packed"] == [code.kernel for code in found[before:]]


def test_what_follows_torchs_product_of_integers_compiles(found: list[MachineCode]) -> None:
    sums, scale = torch.zeros(32, 512, dtype=torch.int32), torch.zeros(512)
    for is_gated in (False, True):
        finish_integers(sums, scale, torch.zeros(32, 1), None, Epilogue(), torch.bfloat16, is_gated=is_gated)
    assert 2 == len(found)


def layer(weight: QuantisedWeight, **options: Any) -> Any:
    from server.backends.cuda.quantised import CudaQuantised

    return CudaQuantised(weight, torch.bfloat16, gate=fused_gate, products=products(CPU, MANY_SPLITS), **options)


def test_a_rank_tells_the_others_its_largest_inputs_between_two_launches(found: list[MachineCode]) -> None:
    codes, groups = torch.zeros(64, 256, dtype=torch.int8), torch.zeros(256, dtype=torch.int64)
    inputs = RoundedInputs(torch.int8)
    whole = QuantisedWeight(codes, 8, torch.ones(64, 1), groups, inputs=inputs)
    asked = []

    def maximum(largest: torch.Tensor) -> torch.Tensor:
        asked.append((tuple(largest.shape), len(found)))
        return largest

    layer(whole.columns(128, 256), maximum=maximum)(torch.zeros(2, 128, dtype=torch.bfloat16), None)
    assert [((2, 1), 1)] == asked
    assert ["_largest", "_round", "_multiply_packed"] == [code.kernel for code in found]


def test_inputs_out_of_order_are_gathered_by_one_launch(found: list[MachineCode]) -> None:
    codes, groups = torch.zeros(64, 256, dtype=torch.uint8), torch.arange(256) % 4
    weight = QuantisedWeight(codes, 4, torch.ones(64, 4), groups, zero=torch.full((64, 4), 8.0))
    layer(weight)(torch.zeros(2, 256, dtype=torch.bfloat16), None)
    assert ["_gather", "_multiply_packed"] == [code.kernel for code in found]


def test_experts_are_one_launch_and_ask_the_host_nothing(
    found: list[MachineCode], monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(multi_processor_count=MANY_SPLITS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    backend = CudaBackend(CpuDevice(), torch.bfloat16)
    int4 = Kind(4, 128, has_zeros=True)
    experts = backend.grouped([noise(int4, 256, 256, CPU) for _ in range(8)], 8, is_gated=True)
    x, ends = torch.zeros(2, 256, dtype=torch.bfloat16), torch.full((8,), 2, dtype=torch.int32)
    backend._products.workspace(CPU)  # made once
    with Operators() as operators:
        assert (2, 128) == experts(x, ends, Activation.SILU).shape
    assert ["_multiply_packed"] == [code.kernel for code in found]
    assert [] == operators.names
