"""Layers that adapters change, in every format of the kernels: as in stock operators, and each token as if alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from server.arch.spec import Activation
from server.backends.cpu import CpuBackend
from server.backends.cpu.adapters import PanelAdapted
from server.backends.cpu.device import CpuDevice
from server.backends.cpu.graph import CpuGraphCapture
from server.backends.cpu.kernels import Kernels
from server.backends.cpu.layers import KernelExperts, PanelFormat
from server.backends.cpu.memory import Arena, Pool
from server.backends.cpu.quantised import CodeFormat, LevelFormat
from server.backends.protocol import ExpertsChange, LinearChange, LowRank, TokenAdapters
from server.backends.reference import ReferenceBackend
from server.backends.reference.adapters import StockAdapted
from server.backends.reference.linear import DenseFormat, StackedLinear
from server.quantisation.rounding import float8_rows, int8_rows
from tests.combinations import all_pairs, by_turns
from tests.server.backends.cpu.test_codes import grouped, random
from tests.server.backends.cpu.test_levels import with_levels

BOTH = (torch.float32, torch.bfloat16)
DTYPES = pytest.mark.parametrize("dtype", BOTH, ids=str)
INPUTS, OUTPUTS = 300, 92  # neither fills its last line, vector or panel
# Of the largest value: what rounding to a dtype may cost, once or twice.
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
MakeFormat = Callable[[Kernels, int, torch.dtype, bool], PanelFormat]


def dense(kernels: Kernels, rows: int, dtype: torch.dtype, is_gated: bool) -> PanelFormat:
    return PanelFormat(kernels, Arena(), random(rows, INPUTS).to(dtype) / 17, is_gated=is_gated)


def int8(kernels: Kernels, rows: int, dtype: torch.dtype, is_gated: bool) -> PanelFormat:
    return CodeFormat(kernels, Arena(), int8_rows(random(rows, INPUTS) / 17), dtype, is_gated=is_gated)


def int4(kernels: Kernels, rows: int, dtype: torch.dtype, is_gated: bool) -> PanelFormat:
    format = CodeFormat if dtype == torch.bfloat16 else LevelFormat
    return format(kernels, Arena(), grouped(rows, INPUTS, 64), dtype, is_gated=is_gated)


def levels(kernels: Kernels, rows: int, dtype: torch.dtype, is_gated: bool) -> PanelFormat:
    return LevelFormat(kernels, Arena(), with_levels(grouped(rows, INPUTS, 64)), dtype, is_gated=is_gated)


def rounded(kernels: Kernels, rows: int, dtype: torch.dtype, is_gated: bool) -> PanelFormat:
    """A layer that reads other inputs than its adapters."""
    return LevelFormat(kernels, Arena(), float8_rows(random(rows, INPUTS) / 17), dtype, is_gated=is_gated)


FORMATS: Mapping[str, MakeFormat] = {
    "dense": dense,
    "int8": int8,
    "int4": int4,
    "levels": levels,
    "rounded": rounded,
}


def low_rank(rank: int, first: int, outputs: int, dtype: torch.dtype, scale: float = 0.5) -> LowRank:
    down, up = random(rank, INPUTS, seed=rank) / 17, random(outputs, rank, seed=first) / rank**0.5
    return LowRank(first, down.to(dtype), up.to(dtype), scale)


def changes_of(rows: int, dtype: torch.dtype) -> dict[int, LinearChange]:
    """What may be in the rows of adapters, of a layer whose weight has so many rows."""
    low, half = partial(low_rank, dtype=dtype), rows // 2
    gain = torch.ones(rows)
    gain[half:] = 0
    whole = LowRank(half, None, (random(rows - half, INPUTS, seed=5) / 17).to(dtype), 1.0)
    other = LowRank(7, None, (random(13, INPUTS, seed=6) / 17).to(dtype), 0.25)
    return {
        1: LinearChange((low(16, 0, rows),)),
        2: LinearChange((low(4, 0, 40), low(7, 40, 9, scale=2.0), low(33, 49, rows - 49))),
        3: LinearChange((low(8, half, rows - half),), bias=random(rows, seed=3)),
        4: LinearChange((low(256, 0, rows),), gain=random(rows, seed=4).abs()),
        5: LinearChange((low(5, 0, half), whole), gain=gain, bias=random(rows, seed=8)),
        6: LinearChange((), bias=random(rows, seed=7)),
        7: LinearChange((whole, other, low(3, 20, 1), low(9, 3, 44))),
    }


# Adapters alone and in runs, and one, 8, that changes nothing here.
ROWS = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, *[1] * 7, 0, 0, *[5] * 6, *[2, 7] * 4, 0, *[4] * 15, 8, 0])


class Case:
    """A layer, what stock operators make of it, and inputs."""

    def __init__(self, kernels: Kernels, name: str, dtype: torch.dtype, *, is_gated: bool = False):
        rows = OUTPUTS * (1 + is_gated)
        self.tokens = TokenAdapters()
        self.base = FORMATS[name](kernels, rows, dtype, is_gated)
        self.layer = PanelAdapted(kernels, Pool(), self.base, 8, self.tokens)
        ungated = FORMATS[name](kernels, rows, dtype, False)
        self.stock = ReferenceBackend(CpuDevice()).adapted(ungated, 8, self.tokens, is_gated=is_gated)
        for row, change in changes_of(rows, dtype).items():
            self.layer.put(row, change)
            self.stock.put(row, change)
        self.x, self.bias = random(len(ROWS), INPUTS, seed=1).to(dtype), random(rows, seed=2).to(dtype)
        self.residual = random(len(ROWS), OUTPUTS, seed=3).to(dtype)

    def give(self, rows: Tensor | None) -> None:
        """Tell which adapters the tokens have."""
        self.tokens.rows, self.tokens.present = rows, () if rows is None else sorted({*rows.tolist()} - {0})


def assert_near(expected: Tensor, actual: Tensor) -> None:
    bound = ROUNDING[actual.dtype] * float(expected.abs().max().clamp(min=1))
    torch.testing.assert_close(actual.float(), expected.float(), atol=bound, rtol=0)


@pytest.mark.parametrize(("name", "dtype", "is_gated"), all_pairs(FORMATS, BOTH, (False, True)))
def test_adapters_change_a_layer_as_in_stock_operators(
    kernels: Kernels, name: str, dtype: torch.dtype, is_gated: bool
) -> None:
    case = Case(kernels, name, dtype, is_gated=is_gated)
    case.give(ROWS)
    how = (case.bias, Activation.SILU if is_gated else None, case.residual)
    expected, found = case.stock(case.x, *how), case.layer(case.x, *how)
    assert_near(expected, found)
    base = case.base(case.x, *how)
    assert torch.equal(base[(ROWS == 0) | (ROWS == 8)], found[(ROWS == 0) | (ROWS == 8)])
    for row in range(1, 8):
        assert (base[row] - found[row]).abs().max() > 0.1, "each adapter changes something"


@DTYPES
def test_a_head_is_as_exact_with_adapters(kernels: Kernels, dtype: torch.dtype) -> None:
    case = Case(kernels, "dense", dtype)
    case.give(ROWS)
    assert_near(case.stock.finest(case.x, case.bias), case.layer.finest(case.x, case.bias))
    assert torch.float32 == case.layer.finest(case.x, None).dtype


@pytest.mark.parametrize(("name", "dtype", "is_gated"), by_turns(("dense", "int4", "int8"), BOTH, (True, False)))
def test_a_token_is_the_same_alone_and_beside_tokens_with_other_adapters(
    kernels: Kernels, name: str, dtype: torch.dtype, is_gated: bool
) -> None:
    case = Case(kernels, name, dtype, is_gated=is_gated)
    case.give(ROWS)
    together = case.layer(case.x, case.bias)
    for part in [*(slice(i, i + 1) for i in range(len(ROWS))), slice(3, 20), slice(30, 47)]:
        case.give(ROWS[part])
        assert torch.equal(together[part], case.layer(case.x[part], case.bias)), part
    order = torch.randperm(len(ROWS), generator=torch.manual_seed(0))
    case.give(ROWS[order])
    assert torch.equal(together[order], case.layer(case.x[order], case.bias))


@DTYPES
def test_without_adapters_a_layer_is_the_one_below(kernels: Kernels, dtype: torch.dtype) -> None:
    case = Case(kernels, "dense", dtype)
    expected = case.base(case.x, case.bias, Activation.GELU)
    for rows in (None, torch.zeros_like(ROWS)):
        case.give(rows)
        assert torch.equal(expected, case.layer(case.x, case.bias, Activation.GELU))
    assert case.layer.memory == case.base.memory
    assert case.layer.nbytes == case.base.nbytes
    assert torch.equal(case.base.rows(torch.tensor([3])), case.layer.rows(torch.tensor([3])))


def test_parts_of_other_tensors_are_taken_as_they_are_then(kernels: Kernels) -> None:
    """As ranks divide them; and the tensors may change afterwards."""
    case = Case(kernels, "dense", torch.float32)
    wide, tall = random(6, 2 * INPUTS, seed=9), random(6, OUTPUTS, seed=10)
    change = LinearChange((LowRank(0, wide[:, INPUTS:], tall.t(), 0.1),))
    copied = LinearChange((LowRank(0, wide[:, INPUTS:].clone(), tall.t().clone(), 0.1),))
    case.stock.put(1, copied)
    case.layer.put(1, change)
    wide.zero_(), tall.zero_()
    case.give(torch.ones_like(ROWS))
    assert_near(case.stock(case.x, None), case.layer(case.x, None))


@DTYPES
def test_a_captured_layer_computes_with_the_adapters_of_each_replay(kernels: Kernels, dtype: torch.dtype) -> None:
    case = Case(kernels, "dense", dtype)
    rows, x = ROWS.clone(), case.x.clone()
    case.give(rows)
    for row in (1, 2, 4):
        case.layer.put(row, None)
    replay = CpuGraphCapture(kernels)(lambda: (case.layer(x, case.bias, Activation.RELU),))
    replay()
    for number, (row, change) in enumerate(changes_of(OUTPUTS, dtype).items()):
        case.layer.put(1 + row % 7, change)
        rows.copy_(ROWS.roll(number)), x.copy_(case.x.roll(3 * number, 0))
        (found,) = replay()
        assert torch.equal(case.layer(x, case.bias, Activation.RELU), found)
        case.layer.put(1 + row % 7, None)
    (found,) = replay()
    assert torch.equal(case.base(x, case.bias, Activation.RELU), found)


def test_memory_of_adapters_that_are_gone_is_used_again(kernels: Kernels) -> None:
    pool, tokens = Pool(), TokenAdapters()
    layer = PanelAdapted(kernels, pool, dense(kernels, OUTPUTS, torch.float32, False), 8, tokens)
    staged = layer.stage(changes_of(OUTPUTS, torch.float32)[4])
    assert staged.nbytes >= changes_of(OUTPUTS, torch.float32)[4].nbytes
    layer.put(8, staged)
    for _ in range(5):
        for row, change in changes_of(OUTPUTS, torch.float32).items():
            layer.put(row, change)
    (slab,) = pool._slabs
    assert sum(length for _, length in pool._free) < len(slab)
    for row in range(1, 9):
        layer.put(row, None)
    assert sum(length for _, length in pool._free) < len(slab), "who staged it has it still"
    del staged
    assert [(slab.data_ptr(), len(slab))] == pool._free


def test_what_the_kernels_do_not_compute_is_left_to_stock_operators(kernels: Kernels) -> None:
    backend, tokens = CpuBackend(kernels, torch.float32), TokenAdapters()
    ours = backend.adapted(backend.linear(random(64, 32)), 2, tokens, is_gated=False)
    others = backend.adapted(DenseFormat(random(64, 32)), 2, tokens, is_gated=False)
    assert isinstance(ours, PanelAdapted) and isinstance(others, StockAdapted)


@pytest.mark.parametrize(("dtype", "is_gated"), all_pairs(BOTH, (False, True)))
def test_parts_that_are_not_stored_alike_are_changed_as_one(
    kernels: Kernels, dtype: torch.dtype, is_gated: bool
) -> None:
    tokens = TokenAdapters(ROWS, range(1, 9))
    heights = (46, 46) if is_gated else (33, 50, 9)
    parts = [FORMATS[name](kernels, height, dtype, False) for name, height in zip(FORMATS, heights, strict=False)]
    stack = StackedLinear(parts, is_gated=is_gated)
    layer = CpuBackend(kernels, dtype).adapted(stack, 8, tokens, is_gated=is_gated)
    stock = ReferenceBackend(CpuDevice()).adapted(stack, 8, tokens, is_gated=is_gated)
    assert layer.is_capturable
    for row, change in changes_of(OUTPUTS, dtype).items():
        layer.put(row, layer.stage(change))
        stock.put(row, change)
    x, bias = random(len(ROWS), INPUTS, seed=1).to(dtype), random(OUTPUTS, seed=2).to(dtype)
    how = (bias, Activation.SILU if is_gated else None, random(len(ROWS), OUTPUTS // (1 + is_gated)).to(dtype))
    assert_near(stock(x, *how), layer(x, *how))
    for row in range(1, 9):
        layer.put(row, None)
    assert torch.equal(stack(x, *how), layer(x, *how))


# ------------------------------------------------------------------------------------------------------------- experts

ENDS = torch.tensor([5, 5, 20, len(ROWS)], dtype=torch.int32)  # of the tokens of experts; the second has none


def expert_changes(rows: int, dtype: torch.dtype) -> dict[int, ExpertsChange]:
    """Each row's of four experts, of which some stay as they are."""
    some = [None, *changes_of(rows, dtype).values()]
    return {row: ExpertsChange(tuple(some[(row * (e + 1) + e) % len(some)] for e in range(4))) for row in range(1, 8)}


@pytest.mark.parametrize(("name", "dtype", "is_gated"), all_pairs(("dense", "int4", "levels"), BOTH, (False, True)))
def test_each_expert_is_changed_as_in_stock_operators(
    kernels: Kernels, name: str, dtype: torch.dtype, is_gated: bool
) -> None:
    rows, tokens = OUTPUTS * (1 + is_gated), TokenAdapters(ROWS, range(1, 9))
    experts = [FORMATS[name](kernels, rows, dtype, is_gated) for _ in range(4)]
    grouped_layer = KernelExperts(experts)
    layer = CpuBackend(kernels, dtype).adapted_experts(grouped_layer, 8, tokens, is_gated=is_gated)
    assert layer.is_capturable
    changes = expert_changes(rows, dtype)
    for row, change in changes.items():
        layer.put(row, changes[1 + row % 7])  # which another one replaces
        layer.put(row, layer.stage(change))
    x, bias = random(len(ROWS), INPUTS, seed=1).to(dtype), random(4, rows, seed=2).to(dtype)
    activation = Activation.SILU if is_gated else None
    found, base = layer(x, ENDS, activation, bias), grouped_layer(x, ENDS, activation, bias)
    stock = ReferenceBackend(CpuDevice())
    for expert, (start, stop) in enumerate(pairwise([0, *ENDS.tolist()])):
        own = TokenAdapters(ROWS[start:stop], range(1, 9))
        expected = stock.adapted(FORMATS[name](kernels, rows, dtype, False), 8, own, is_gated=is_gated)
        for row, change in changes.items():
            expected.put(row, change.experts[expert])
        if stop > start:
            assert_near(expected(x[start:stop], bias[expert], activation), found[start:stop])
    assert torch.equal(base[(ROWS == 0) | (ROWS == 8)], found[(ROWS == 0) | (ROWS == 8)])
    for row in changes:
        layer.put(row, None)
    assert torch.equal(base, layer(x, ENDS, activation, bias))
    tokens.rows = None
    assert torch.equal(base, layer(x, ENDS, activation, bias))


def test_captured_experts_compute_with_the_adapters_of_each_replay(kernels: Kernels) -> None:
    tokens, rows, ends = TokenAdapters(), ROWS.clone(), ENDS.clone()
    grouped_layer = KernelExperts([dense(kernels, OUTPUTS, torch.float32, False) for _ in range(4)])
    layer = CpuBackend(kernels, torch.float32).adapted_experts(grouped_layer, 8, tokens, is_gated=False)
    x = random(len(ROWS), INPUTS, seed=1)
    tokens.rows = rows
    replay = CpuGraphCapture(kernels)(lambda: (layer(x, ends),))
    replay()
    for number, (row, change) in enumerate(expert_changes(OUTPUTS, torch.float32).items()):
        layer.put(row, change)
        rows.copy_(ROWS.roll(number)), ends.copy_(torch.tensor([number, 9, 9 + number, len(ROWS)]))
        (found,) = replay()
        assert torch.equal(layer(x, ends), found)
