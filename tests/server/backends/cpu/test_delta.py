"""The compiled gated delta rule against stock operators, which define correct."""

from __future__ import annotations

import pytest
import torch

from server.arch.spec import GatedDelta
from server.backends.cpu import Kernels
from server.backends.cpu.delta import TILE, KernelDelta, can_compute
from tests.server.backends.delta_cases import KIND, check_steps, inputs_of, meta_of, states, weights_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_read_what_stock_operators_read(kernels: Kernels, dtype: torch.dtype) -> None:
    check_steps(KernelDelta(kernels, weights_of(KIND)), dtype)


@pytest.mark.parametrize("cuts", [[1] * 40, [3, 37], [16, 16, 8], [39, 1]])
def test_cuts_and_neighbours_change_no_bit(kernels: Kernels, cuts: list[int]) -> None:
    rule = KernelDelta(kernels, weights_of(KIND))
    qkvz, ba = inputs_of(40, 0, torch.float32)
    whole = rule(qkvz, ba, states(), meta_of([(1, 0, 40)]))
    state, first, parts = states(), 0, []
    beside = inputs_of(5, 9, torch.float32)
    for number, count in enumerate(cuts):
        runs = [(1, first, count), (2, 5 * number, 5)]
        part = slice(first, first + count)
        both = (torch.cat([mine[part], other]) for mine, other in zip((qkvz, ba), beside, strict=True))
        parts.append(rule(*both, state, meta_of(runs))[:count])
        first += count
    assert torch.equal(whole, torch.cat(parts))


def test_rows_of_nobody_are_left_alone(kernels: Kernels) -> None:
    rule, state = KernelDelta(kernels, weights_of(KIND)), states()
    out = rule(*inputs_of(3, 0, torch.float32), state, meta_of([(3, 0, 1), (0, 0, 1), (0, 0, 1)], 3))
    assert out[0].any() and not out[1:].any()
    assert torch.equal(state[:3], states()[:3]) and torch.equal(state[4:], states()[4:])


def test_heads_of_other_widths_are_left_to_stock_operators() -> None:
    assert can_compute(KIND)
    assert not can_compute(GatedDelta(num_heads=6, num_key_heads=3, key_dim=20, value_dim=TILE // 2, conv=4))
