"""Codes that are expanded where they are used: bit for bit the dense layer of the same numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from server.arch.spec import Activation
from server.backends.cpu import CpuBackend
from server.backends.cpu.kernels import Kernels
from server.backends.cpu.layers import KernelExperts, PanelFormat
from server.backends.cpu.memory import Arena
from server.backends.cpu.quantised import CodeFormat, LevelFormat
from server.backends.reference.linear import LoopedExperts
from server.backends.reference.quantised import QuantisedFormat
from server.quantisation.rounding import float4_levels, float8_rows, int8_rows, int8_weights
from server.quantisation.stored import QuantisedWeight, RoundedInputs
from tests.combinations import all_pairs, by_turns
from tests.server.backends.cpu.test_codes import BOTH, float4, grouped, out_of_order, random


def with_levels(weight: QuantisedWeight) -> QuantisedWeight:
    return replace(weight, zero=None, levels=torch.linspace(-1, 1, 16) ** 3)


CASES = {
    "levels": with_levels(grouped(65, 320, 64)),
    "int4": grouped(33, 1300, 128, exact=False),
    "out of order": out_of_order(grouped(65, 512, 128)),
    "cut": grouped(64, 512, 128).columns(53, 331),
    "3 bits": grouped(33, 301, 64, bits=3),
    "8 bits": grouped(33, 256, 128, bits=8),
    "int8": int8_weights(random(70, 303)),
    "float8": replace(float8_rows(random(33, 200)), inputs=None),
    "zeros that are no codes": replace(grouped(33, 64, 32), zero=torch.full((33, 2), 7.5)),
}


@pytest.mark.parametrize(("name", "dtype", "is_gated"), all_pairs(CASES, BOTH, (False, True)))
def test_a_layer_is_the_dense_one_of_the_same_numbers(
    kernels: Kernels, name: str, dtype: torch.dtype, is_gated: bool
) -> None:
    weight = CASES[name]
    if is_gated:
        even = weight.shape[0] // 2 * 2
        weight = replace(
            weight,
            held=weight.codes[:even],
            scale=weight.scale[:even],
            zero=None if weight.zero is None else weight.zero[:even],
        )
    arena = Arena()
    dense = PanelFormat(kernels, arena, weight.dequantised().to(dtype), is_gated=is_gated)
    linear = LevelFormat(kernels, arena, weight, dtype, is_gated=is_gated)
    bias = random(weight.shape[0], seed=3).to(dtype)
    for tokens in (1, 4, 5, 17, 40, 200):
        x = random(tokens, weight.shape[1], seed=tokens).to(dtype)
        assert torch.equal(dense(x, bias, Activation.SILU), linear(x, bias, Activation.SILU)), tokens


@pytest.mark.parametrize(("name", "dtype"), by_turns(CASES, BOTH))
def test_rows_are_what_codes_stand_for(kernels: Kernels, name: str, dtype: torch.dtype) -> None:
    weight = CASES[name]
    ids = torch.tensor([0, weight.shape[0] - 1, 31, 7])
    linear = LevelFormat(kernels, Arena(), weight, dtype)
    assert torch.equal(weight.dequantised()[ids].to(dtype), linear.rows(ids))


def test_rounded_inputs_are_near_the_references(kernels: Kernels) -> None:
    weight = float8_rows(random(64, 256))
    linear, reference = LevelFormat(kernels, Arena(), weight, torch.bfloat16), QuantisedFormat(weight, None)
    x = random(20, 256).bfloat16()
    exact = reference.product(x.float(), None)
    assert (linear.finest(x, None) - exact).std() < 0.005 * exact.std()  # bfloat16 rounds scales; float8 cost 0.04


def test_every_weight_has_its_kernel(kernels: Kernels) -> None:
    weight = grouped(32, 64, 32)
    asymmetric = RoundedInputs(torch.int8, torch.tensor(0.1), torch.tensor(3.0))
    expected: dict[str, tuple[QuantisedWeight, torch.dtype, type]] = {
        "int4": (weight, torch.bfloat16, CodeFormat),
        "w8a8": (int8_rows(random(32, 64)), torch.float32, CodeFormat),
        "levels": (with_levels(weight), torch.bfloat16, LevelFormat),
        "float4": (float4(32, 64), torch.bfloat16, CodeFormat),
        "float4 in float32": (float4(32, 64), torch.float32, LevelFormat),
        "float4 in groups of 16": (
            replace(grouped(32, 64, 16), zero=None, levels=float4_levels()),
            torch.bfloat16,
            LevelFormat,
        ),
        "float8": (float8_rows(random(32, 64)), torch.bfloat16, LevelFormat),
        "inputs with a zero": (replace(int8_rows(random(32, 64)), inputs=asymmetric), torch.bfloat16, LevelFormat),
        "in float32": (weight, torch.float32, LevelFormat),
        "float8 in float32": (float8_rows(random(32, 64)), torch.float32, QuantisedFormat),
    }
    for name, (stored, dtype, kind) in expected.items():
        assert type(CpuBackend(kernels, dtype).linear(stored)) is kind, name


def test_experts_are_one_call(kernels: Kernels) -> None:
    backend, weights = CpuBackend(kernels, torch.float32), [with_levels(grouped(64, 256, 128))] * 4
    together = backend.grouped(iter(weights), 4, is_gated=True)
    assert isinstance(together, KernelExperts)
    one_by_one = LoopedExperts([backend.linear(weight, is_gated=True) for weight in weights])
    x, ends, bias = random(20, 256), torch.tensor([3, 3, 19, 20], dtype=torch.int32), random(4, 64)
    assert torch.equal(one_by_one(x, ends, Activation.SILU, bias), together(x, ends, Activation.SILU, bias))


def test_memory_is_that_of_the_codes(kernels: Kernels) -> None:
    def size(weight: QuantisedWeight) -> Tensor | int:
        return LevelFormat(kernels, Arena(), weight, torch.float32).nbytes

    rows, inputs = 64, 512
    beside = inputs * 2 + 16 * 4  # groups of the inputs, values of the codes
    assert rows * inputs // 2 + rows * inputs // 64 * 4 + beside == size(with_levels(grouped(rows, inputs, 64)))
