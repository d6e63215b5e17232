"""The compiled gated delta rule against stock operators, which define correct."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from server.arch.spec import GatedDelta
from server.backends.cpu import Kernels
from server.backends.cpu.delta import TILE, KernelDelta, can_compute
from server.backends.protocol import DeltaRule, DeltaWeights, StepMeta
from server.backends.reference.delta import StockDelta

KIND = GatedDelta(num_heads=6, num_key_heads=3, key_dim=20, value_dim=2 * TILE, conv=4)
ROWS = 6
Run = tuple[int, int, int]  # row, first position, tokens


def weights_of(kind: GatedDelta) -> DeltaWeights:
    chance = torch.Generator().manual_seed(2)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=chance)

    return DeltaWeights(
        kind=kind,
        conv=normal(kind.channels, kind.conv),
        decay=normal(kind.num_heads).exp(),
        step_bias=normal(kind.num_heads),
        norm=normal(kind.value_dim),
        eps=1e-6,
    )


def meta_of(runs: list[Run], num_decodes: int = 0) -> StepMeta:
    starts = [0, *accumulate(count for _, _, count in runs)]
    positions = torch.tensor([first + i for _, first, count in runs for i in range(count)])
    nothing = torch.empty(0)
    return StepMeta(
        num_decodes=num_decodes,
        query_starts=starts,
        context_lengths=[],
        longest=0,
        starts=torch.tensor(starts, dtype=torch.int32),
        positions=positions,
        visible=positions + 1,
        prompt_lengths=nothing,
        owners=None,
        block_tables=nothing,
        rows=torch.tensor([row for row, _, _ in runs]),
    )


def inputs_of(tokens: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    width = KIND.channels + KIND.num_heads * KIND.value_dim
    qkvz = torch.randn(tokens, width, generator=chance)
    return qkvz.to(dtype), torch.randn(tokens, 2 * KIND.num_heads, generator=chance).to(dtype)


def states() -> Tensor:
    """What is left of others, which no sequence may see."""
    return torch.full((ROWS, KIND.state_size), 7.0)


STEPS: list[tuple[list[Run], int]] = [
    ([(2, 0, 37), (4, 0, 1), (5, 0, 2)], 0),  # prompts: of three blocks, of one token, of fewer than the convolution's
    ([(4, 1, 1), (5, 2, 1), (2, 37, 21)], 2),  # decodes beside a later chunk
    ([(2, 58, 1), (4, 2, 1), (5, 3, 1)], 3),  # decodes alone
    ([(2, 59, 1), (3, 0, 18), (4, 3, 1)], 1),  # another sequence, and one that is extended by a token
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_read_what_stock_operators_read(kernels: Kernels, dtype: torch.dtype) -> None:
    weights = weights_of(KIND)
    rules: list[DeltaRule] = [StockDelta(weights), KernelDelta(kernels, weights)]
    kept = [states(), states()]
    for number, (runs, num_decodes) in enumerate(STEPS):
        meta = meta_of(runs, num_decodes)
        qkvz, ba = inputs_of(len(meta.positions), number, dtype)
        expected, got = (rule(qkvz, ba, state, meta) for rule, state in zip(rules, kept, strict=True))
        atol = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(expected, got, atol=atol, rtol=1e-2 if dtype != torch.float32 else 1e-5)


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
