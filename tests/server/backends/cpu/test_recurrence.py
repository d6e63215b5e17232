"""Compiled recurrences against stock operators, which define correct."""

from __future__ import annotations

import pytest
import torch

from server.arch.recurrences import GatedDelta
from server.backends.cpu import CpuBackend, Kernels
from server.backends.cpu.recurrence import TILE, can_compute
from tests.server.backends.recurrence_cases import CASES, DELTA, Case, Rule, check_cuts, check_steps, meta_of


def compiled(case: Case, kernels: Kernels) -> Rule:
    rule = case.make(CpuBackend(kernels, torch.float32), case.weights)
    assert type(rule) is not case.stock
    return rule


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_steps_read_what_stock_operators_read(kernels: Kernels, name: str, dtype: torch.dtype) -> None:
    check_steps(CASES[name], compiled(CASES[name], kernels), dtype)


@pytest.mark.parametrize("way", ["reference", "kernels"])
@pytest.mark.parametrize("cuts", [[1] * 40, [3, 37], [16, 16, 8], [39, 1]])
@pytest.mark.parametrize("name", CASES)
def test_cuts_and_neighbours_change_no_bit(kernels: Kernels, name: str, cuts: list[int], way: str) -> None:
    case = CASES[name]
    rule = compiled(case, kernels) if way == "kernels" else case.stock(case.weights)
    check_cuts(case, rule, cuts)


@pytest.mark.parametrize("name", CASES)
def test_rows_of_nobody_are_left_alone(kernels: Kernels, name: str) -> None:
    case = CASES[name]
    rule, state = compiled(case, kernels), case.states
    out = rule(*case.inputs(3, 0), state, meta_of([(3, 0, 1), (0, 0, 1), (0, 0, 1)], 3))
    assert out[0].any() and not out[1:].any()
    assert torch.equal(state[:3], case.states[:3]) and torch.equal(state[4:], case.states[4:])


def test_heads_of_other_widths_are_left_to_stock_operators() -> None:
    assert can_compute(DELTA)
    assert not can_compute(GatedDelta(num_heads=6, num_key_heads=3, key_dim=20, value_dim=TILE // 2, conv=4))
