# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""Matrix products of few rows: the weight is read once, at the speed of memory, and all that follows is in the kernel.

A decode's product is as long as reading its weight takes. So a tile of the weight is the left operand of the matrix
units, with features where they have most room, and the few rows of the input are the right one. Where the tiles of
features do not fill the GPU, several programs share one and each takes a part of the inputs (split-K): the one that
arrives last adds the parts in their order, so that a result never depends on who was first, and needs no second launch.

Rows that are sorted by expert find their expert where the device says that each one's rows end, so the host waits for
nothing. Products are summed in float32 and rounded once, at the end of all that follows. Left out: quantised weights
(`packed.py`), and thousands of rows, which cuBLAS does better.

Shapes: T rows, D input features, F output features, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.arch.spec import Activation
from server.backends.cuda.fused import activation_constants

MAX_SPLITS = 16
MAX_TILE_ROWS = 128
# Tiles of inputs that a split is worth: with fewer, a program waits for its first ones longer than it computes.
TILES_PER_SPLIT = 4


@dataclass(frozen=True)
class Tiling:
    """What one program computes, and how many of it a multiprocessor holds at once."""

    rows: int
    features: int  # of each half, where the weight is gated
    depth: int  # input features at a time
    stages: int  # such tiles on their way from memory
    warps: int
    resident: int

    def __str__(self) -> str:
        return f"kernel {self.rows}x{self.features}x{self.depth}"

    def parts(self, *, is_gated: bool) -> int:
        """Elements of a program's part of a sum."""
        return self.rows * self.features * (2 if is_gated else 1)


def tilings(rows: int, dtype: torch.dtype, *, is_gated: bool) -> tuple[Tiling, ...]:
    """What there is to choose from for products of up to `rows` rows; the first one where nothing was measured."""
    padded = min(max(triton.next_power_of_2(rows), 8), MAX_TILE_ROWS)
    if dtype == torch.float32:
        return (Tiling(min(padded, 32), 32, 32, 3, 4, 2),)
    # 32 bytes of a row at least in each piece of shared memory; half as deep for two halves.
    depth = 128 // (2 if is_gated else 1)
    if padded == 8:
        return Tiling(8, 64, depth, 4, 4, 3), Tiling(8, 32, depth, 4, 4, 4)
    if padded == 16:
        return Tiling(16, 64, depth, 3, 4, 3), Tiling(16, 32, depth, 4, 4, 4)
    if padded <= 64:
        return Tiling(padded, 64, depth, 3, 4, 2), Tiling(padded, 32, depth // 2, 4, 4, 2)
    return (Tiling(padded, 64 if is_gated else 128, 64, 3, 8, 1),)


def choose_splits(tiles: int, depth_tiles: int, programs: int) -> int:
    """Parts of the inputs, a power of two, for so many tiles of the output, to have at most `programs` programs."""
    splits = 1
    while 2 * splits * tiles <= programs and 2 * splits * TILES_PER_SPLIT <= depth_tiles and splits < MAX_SPLITS:
        splits *= 2
    return splits


class Workspace:
    """Where the programs that share a tile meet. Products that use one must follow each other on the device.

    processors: multiprocessors to fill; with 1, hardly anything is split.
    """

    def __init__(self, device: torch.device, processors: int):
        self.processors = processors
        every = (
            (tiling, is_gated)
            for rows in (8, 16, 32, 64, 128)
            for dtype in (torch.float32, torch.bfloat16)
            for is_gated in (False, True)
            for tiling in tilings(rows, dtype, is_gated=is_gated)
        )
        most = max(tiling.resident * tiling.parts(is_gated=is_gated) for tiling, is_gated in every)
        self.parts = torch.empty(processors * most, dtype=torch.float32, device=device)
        # Programs that have arrived at each tile; the last one sets it to 0 again.
        self.counters = torch.zeros(processors * 4, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Epilogue:
    """What follows a product, in this order; a gate where the weight is [gate | up]."""

    bias: Tensor | None = None  # [F], [2 F] where gated; of experts [E, F] and [E, 2 F]
    activation: Activation | None = None
    residual: Tensor | None = None  # [T, F]


def multiply_rows(
    x: Tensor,
    weight: Tensor,
    epilogue: Epilogue,
    workspace: Workspace,
    *,
    is_gated: bool,
    dtype: torch.dtype | None = None,
    ends: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """x [T, D] → x @ weightᵀ and its epilogue, [T, F] in `dtype`, x's unless given.

    weight: [F, D] ([2 F, D] where gated), in x's dtype. With ends [E], as those of `GroupedLinear`, it has one more
    dimension in front, as has its bias, and there is no residual.
    """
    rows, inputs = x.shape
    outputs = weight.shape[-2]
    features = outputs // 2 if is_gated else outputs
    assert weight.is_contiguous() and (epilogue.residual is None or epilogue.residual.is_contiguous())
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty(rows, features, dtype=dtype or x.dtype)
    if rows == 0:
        return out
    experts = 0 if ends is None else len(ends)
    tiling = tiling or tilings(rows_at_once(rows, experts), weight.dtype, is_gated=is_gated)[0]
    # Of the tiles of rows that experts have, all but one each are full.
    row_tiles = triton.cdiv(rows, tiling.rows) if ends is None else min(experts, rows) + rows // tiling.rows
    tiles, depth_tiles = triton.cdiv(features, tiling.features), triton.cdiv(inputs, tiling.depth)
    splits = choose_splits(row_tiles * tiles, depth_tiles, tiling.resident * workspace.processors)
    _multiply_rows[(row_tiles, tiles * splits)](
        x,
        weight,
        epilogue.bias,
        epilogue.residual,
        out,
        ends,
        workspace.parts,
        workspace.counters,
        rows,
        x.stride(0),
        features,
        inputs,
        ROWS=tiling.rows,
        FEATURES=tiling.features,
        DEPTH=tiling.depth,
        SPLITS=splits,
        HAS_TAIL=inputs % tiling.depth != 0,
        EXPERTS=experts,
        EXPERTS_PAD=triton.next_power_of_2(max(experts, 1)),
        IS_GATED=is_gated,
        **activation_constants(epilogue.activation),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return out


def rows_at_once(rows: int, experts: int) -> int:
    """Rows that most experts have, where rows belong to experts."""
    return rows if experts == 0 else max(triton.cdiv(2 * rows, experts), min(rows, 8))


@triton.jit(do_not_specialize=["rows"])
def _multiply_rows(
    x,
    weight,
    bias,
    residual,
    out,
    ends,
    parts,
    counters,
    rows,
    x_stride,
    features,
    inputs,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    IS_GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    UP: tl.constexpr,
):
    """One tile of features of one tile of rows, or one split's part of it."""
    row_tile, tile, split = tl.program_id(0), tl.program_id(1) // SPLITS, tl.program_id(1) % SPLITS
    first, stop = row_tile * ROWS, rows
    halves: tl.constexpr = 2 if IS_GATED else 1
    if EXPERTS > 0:
        first, stop, expert = expert_rows(ends, row_tile, rows, ROWS, EXPERTS, EXPERTS_PAD)
        if first >= stop:
            return
        weight += expert.to(tl.int64) * features * inputs * halves
        if bias is not None:
            bias += expert * features * halves
    row = first + tl.arange(0, ROWS)[None, :]
    feature = tile * FEATURES + tl.arange(0, FEATURES)[:, None]
    kept = row < stop
    real = feature < features
    # Offsets within a tile fit into 32 bits, those of tiles may not.
    up_weight = weight + (tile.to(tl.int64) * FEATURES + features) * inputs
    weight += tile.to(tl.int64) * FEATURES * inputs
    x += first.to(tl.int64) * x_stride
    near_feature = tl.arange(0, FEATURES)[:, None] * inputs
    near_row = tl.arange(0, ROWS)[None, :] * x_stride

    y = tl.zeros((FEATURES, ROWS), tl.float32)
    up = tl.zeros((FEATURES, ROWS), tl.float32)
    depth_tiles = tl.cdiv(inputs, DEPTH)
    per_split = tl.cdiv(depth_tiles, SPLITS)
    for step in range(split * per_split, tl.minimum((split + 1) * per_split, depth_tiles)):
        across = step * DEPTH + tl.arange(0, DEPTH)[None, :]
        down = step * DEPTH + tl.arange(0, DEPTH)[:, None]
        taken, given = real, kept
        if HAS_TAIL:
            taken, given = real & (across < inputs), kept & (down < inputs)
        columns = tl.load(x + near_row + down, mask=given, other=0.0)
        left = tl.load(weight + near_feature + across, mask=taken, other=0.0)
        y = tl.dot(left.to(columns.dtype), columns, y, input_precision="ieee")
        if IS_GATED:
            left = tl.load(up_weight + near_feature + across, mask=taken, other=0)
            up = tl.dot(left.to(columns.dtype), columns, up, input_precision="ieee")

    if SPLITS > 1:
        place = tile * tl.num_programs(0) + row_tile
        size: tl.constexpr = FEATURES * ROWS * halves
        within = tl.arange(0, ROWS)[None, :] * FEATURES + tl.arange(0, FEATURES)[:, None]
        parts += place.to(tl.int64) * (SPLITS * size) + within
        # Past the first cache, which belongs to one multiprocessor.
        tl.store(parts + split * size, y, mask=kept, cache_modifier=".cg")
        if IS_GATED:
            tl.store(parts + split * size + FEATURES * ROWS, up, mask=kept, cache_modifier=".cg")
        tl.debug_barrier()  # all of this program's parts are stored before it counts itself
        if tl.atomic_add(counters + place, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.debug_barrier()
        tl.store(counters + place, 0)
        y = merged(parts, kept, size, SPLITS, y)
        if IS_GATED:
            up = merged(parts + FEATURES * ROWS, kept, size, SPLITS, up)

    y = biased(y, bias, feature, real)
    if ACTIVATION is not None:
        y = ACTIVATION(y)
    if IS_GATED:
        y *= UP(biased(up, bias, feature + features, real))
    place = row.to(tl.int64) * features + feature
    if residual is not None:
        y += tl.load(residual + place, mask=kept & real, other=0.0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=kept & real)


@triton.jit
def merged(parts, kept, SIZE: tl.constexpr, SPLITS: tl.constexpr, like):
    """The sum of what all splits have stored, in their order: float32, or int32 by its bits."""
    total = tl.zeros_like(like)
    for part in tl.static_range(SPLITS):
        stored = tl.load(parts + part * SIZE, mask=kept, other=0.0, cache_modifier=".cg")
        total += stored.to(like.dtype, bitcast=True)
    return total


@triton.jit
def biased(y, bias, feature, real):
    """y and the bias of each feature."""
    if bias is not None:
        y += tl.load(bias + feature, mask=real, other=0.0).to(tl.float32)
    return y


@triton.jit
def expert_rows(ends, row_tile, rows, ROWS: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr):
    """The first row of a tile, the end of its expert's rows, and that expert; no rows behind the last tile."""
    experts = tl.arange(0, EXPERTS_PAD)
    stops = tl.load(ends + experts, mask=experts < EXPERTS, other=0)
    starts = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < EXPERTS), other=0)
    tiles = tl.cdiv(stops - starts, ROWS)
    tiles_to = tl.cumsum(tiles, 0)
    mine = (tiles_to - tiles <= row_tile) & (row_tile < tiles_to)
    expert = tl.sum(tl.where(mine, experts, 0), 0)
    first = tl.sum(tl.where(mine, starts + (row_tile - (tiles_to - tiles)) * ROWS, 0), 0)
    return first, tl.sum(tl.where(mine, stops, 0), 0), expert
