# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""What adapters add to a linear layer's product, each token by its own: two launches around the product.

* `shrink`: u = x @ downᵀ, tokens of the same adapter together (SGMV, Chen et al. 2023, arXiv 2310.18547);
* `finish`: all that follows the product: gain, scale * u @ upᵀ, biases, activation, gate and residual, rounded once.

What an adapter makes of a layer lies in one piece of memory, whose address is in the layer's table by the adapter's
row. Kernels read the table when they run, and grids depend on shapes alone, so that a captured step computes with
whatever the table holds when it is replayed. Ranks and parts are looped over as often as the change says.

The tokens of a pass are put in order once for all its layers (`group`): tiles of at most 16 tokens of one row.

Sums are float32. In 16 bits the matrix units take u in TF32, 10 bits behind the point, and so do not lose what a
rounding to bfloat16 would. A token's results do not depend on the other tokens, but on how many there are: inputs are
divided over several programs where there are few (`choose_splits`). Left out: tables of tokens and norms, which are
left to stock operators.

The memory of a change, words of 64 bits first:

    ranks R, parts P, where down, gain and bias begin, in bytes from here, 0: there is none; 3 words unused
    of each part: its first output, outputs n, words of a row of up, its first rank (-1: x itself is multiplied),
        where up begins, its scale as float32; 2 words unused
    down [R, D], each part's up [n, r], gain and bias [F] float32

Rows of down and up begin at multiples of 8 numbers, ranks of a part are filled up to such, and what fills up is 0.

Shapes: T tokens, D input features, F output features, R ranks of all parts of a change, r of one, N rows of adapters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.backends.cuda.fused import activation_constants
from server.backends.cuda.kernels.linear import Epilogue, biased, expert_rows
from server.backends.cuda.kernels.routing import grouped

UNIT = 8  # numbers, of which a row has a multiple
HEADER = tl.constexpr(8)  # words, as of each part
ROWS, RANKS = 16, 16  # of a program
RANK_PROGRAMS = 8  # of a tile of tokens, each of which computes every eighth tile of ranks
MAX_SPLITS = 8
FEW_TOKENS = 256  # up to which inputs are divided, and which are all that is captured
INPUTS_PER_SPLIT = 1024
DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True)
class Groups:
    """The tokens of a pass in the order of their rows."""

    order: Tensor  # [T] int32
    tiles: Tensor  # [tiles, 3] int32: a row, and the first and last place (not included) of `order` that a tile has


def group(rows: Tensor, num_rows: int) -> Groups:
    """rows: [T] int64, 0 … num_rows."""
    tokens, every = len(rows), num_rows + 1
    order, _, ends = grouped(rows, every, 1)
    # Of the tiles that rows have, all but one each are full.
    tiles = ends.new_empty(min(every, tokens) + tokens // ROWS, 3)
    _lay_tiles[(len(tiles),)](
        ends, tiles, tokens, ROWS=ROWS, EVERY=every, EVERY_PAD=triton.next_power_of_2(every), num_warps=1
    )
    return Groups(order, tiles)


def choose_splits(tokens: int, inputs: int) -> int:
    """Parts of the inputs, a power of two: the more programs, the sooner few tokens are done."""
    if tokens > FEW_TOKENS:
        return 1
    return min(1 << max(inputs // INPUTS_PER_SPLIT, 1).bit_length() - 1, MAX_SPLITS)


def shrink(x: Tensor, table: Tensor, groups: Groups, dtype: torch.dtype, most: int) -> Tensor:
    """x [T, D] → x @ downᵀ in parts [splits, T, most] float32, as far as the tokens' changes have ranks.

    table: [N + 1] int64, addresses of changes in `dtype`, 0 where there is none; most: ranks R of a change.
    """
    tokens, inputs = x.shape
    splits = choose_splits(tokens, inputs)
    depth = 64 if x.dtype == torch.float32 else 128
    shrunk = x.new_empty(splits, tokens, most, dtype=torch.float32)
    _shrink[(len(groups.tiles), RANK_PROGRAMS * splits)](
        x,
        table,
        groups.order,
        groups.tiles,
        shrunk,
        tokens,
        x.stride(0),
        inputs,
        padded(inputs),
        most,
        splits,
        ROWS=ROWS,
        RANKS=RANKS,
        DEPTH=depth,
        HAS_TAIL=inputs % depth != 0,
        PROGRAMS=RANK_PROGRAMS,
        DTYPE=DTYPES[dtype],
        num_warps=4,
        num_stages=3,
    )
    return shrunk


def finish(
    product: Tensor,
    x: Tensor,
    shrunk: Tensor,
    table: Tensor,
    groups: Groups,
    epilogue: Epilogue,
    dtype: torch.dtype,
    *,
    is_gated: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """The product [T, F] of x [T, D] → changed and with its epilogue, [T, F] in `out_dtype`.

    The product is [T, 2 F] where gated. shrunk: of `shrink`; table, dtype: as there.
    """
    (tokens, outputs), inputs = product.shape, x.shape[1]
    features = outputs // 2 if is_gated else outputs
    assert product.is_contiguous() and (epilogue.residual is None or epilogue.residual.is_contiguous())
    out = product.new_empty(tokens, features, dtype=out_dtype)
    tile = 64 if is_gated or dtype == torch.float32 else 128
    _finish[(len(groups.tiles), triton.cdiv(features, tile))](
        product,
        x,
        shrunk,
        table,
        groups.order,
        groups.tiles,
        epilogue.bias,
        epilogue.residual,
        out,
        tokens,
        x.stride(0),
        features,
        inputs,
        shrunk.shape[2],
        len(shrunk),
        ROWS=ROWS,
        RANKS=RANKS,
        FEATURES=tile,
        DEPTH=32,
        SPLITS=MAX_SPLITS,
        IS_GATED=is_gated,
        DTYPE=DTYPES[dtype],
        PRECISION="ieee" if dtype == torch.float32 else "tf32",
        **activation_constants(epilogue.activation),
        num_warps=4,
        num_stages=2,
    )
    return out


def padded(numbers: int) -> int:
    """A row's numbers with those that fill it up."""
    return -(-numbers // UNIT) * UNIT


@triton.jit(do_not_specialize=["tokens"])
def _lay_tiles(ends, tiles, tokens, ROWS: tl.constexpr, EVERY: tl.constexpr, EVERY_PAD: tl.constexpr):
    """One tile; one that is behind the last has no places."""
    tile = tl.program_id(0)
    first, stop, row = expert_rows(ends, tile, tokens, ROWS, EVERY, EVERY_PAD)
    tl.store(tiles + 3 * tile, row)
    tl.store(tiles + 3 * tile + 1, first)
    tl.store(tiles + 3 * tile + 2, tl.minimum(stop, first + ROWS))


@triton.jit
def _tile_of(table, tiles, order, ROWS: tl.constexpr):
    """A tile's change, its tokens [ROWS], and which of these there are."""
    tile = tiles + 3 * tl.program_id(0)
    row, first, stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    place = first + tl.arange(0, ROWS)
    kept = place < stop
    return tl.load(table + row), tl.load(order + place, mask=kept, other=0), kept, first < stop


@triton.jit
def _word(change, place):
    """A number of a change's first words."""
    return tl.load((change + 8 * place).to(tl.pointer_type(tl.int64)))


@triton.jit
def _at(change, offset, DTYPE: tl.constexpr):
    """What begins so many bytes behind a change's first."""
    return tl.multiple_of((change + offset).to(tl.pointer_type(DTYPE)), 16)


@triton.jit(do_not_specialize=["tokens", "most", "splits"])
def _shrink(
    x,
    table,
    order,
    tiles,
    shrunk,
    tokens,
    x_stride,
    inputs,
    down_stride,
    most,
    splits,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    PROGRAMS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Some tiles of ranks of a tile of tokens, or one split's part of them."""
    change, token, kept, is_real = _tile_of(table, tiles, order, ROWS)
    if (change == 0) | (not is_real):
        return
    split = tl.program_id(1) // PROGRAMS
    ranks = _word(change, 0).to(tl.int32)
    down = _at(change, _word(change, 2), DTYPE)
    near_token = token.to(tl.int64)[None, :] * x_stride
    per_split = tl.cdiv(tl.cdiv(inputs, DEPTH), splits)
    last = tl.minimum((split + 1) * per_split, tl.cdiv(inputs, DEPTH))
    for tile in range(tl.program_id(1) % PROGRAMS, tl.cdiv(ranks, RANKS), PROGRAMS):
        rank = tile * RANKS + tl.arange(0, RANKS)[:, None]
        real = rank < ranks
        near_rank = rank.to(tl.int64) * down_stride
        total = tl.zeros((RANKS, ROWS), tl.float32)
        for step in range(split * per_split, last):
            across = step * DEPTH + tl.arange(0, DEPTH)[None, :]
            along = step * DEPTH + tl.arange(0, DEPTH)[:, None]
            taken, given = real, kept[None, :]
            if HAS_TAIL:
                taken, given = real & (across < inputs), given & (along < inputs)
            columns = tl.load(x + near_token + along, mask=given, other=0.0)
            left = tl.load(down + near_rank + across, mask=taken, other=0.0)
            total = tl.dot(left.to(columns.dtype), columns, total, input_precision="ieee")
        place = (split * tokens + token).to(tl.int64)[None, :] * most + rank
        tl.store(shrunk + place, total, mask=real & kept[None, :])


@triton.jit(do_not_specialize=["tokens", "most", "splits"])
def _finish(
    product,
    x,
    shrunk,
    table,
    order,
    tiles,
    bias,
    residual,
    out,
    tokens,
    x_stride,
    features,
    inputs,
    most,
    splits,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_GATED: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    UP: tl.constexpr,
):
    """A tile of features of a tile of tokens."""
    change, token, kept, is_real = _tile_of(table, tiles, order, ROWS)
    if not is_real:
        return
    halves: tl.constexpr = 2 if IS_GATED else 1
    lowest = tl.program_id(1) * FEATURES
    feature = lowest + tl.arange(0, FEATURES)[:, None]
    real = feature < features
    near = token.to(tl.int64)[None, :]
    product += near * (halves * features)
    x += near * x_stride
    shrunk += near * most
    size = tokens.to(tl.int64) * most
    y = _half(
        product,
        change,
        x,
        shrunk,
        bias,
        lowest,
        real,
        kept,
        inputs,
        size,
        splits,
        RANKS,
        DEPTH,
        SPLITS,
        DTYPE,
        PRECISION,
    )
    if ACTIVATION is not None:
        y = ACTIVATION(y)
    if IS_GATED:
        lowest += features
        y *= UP(
            _half(
                product,
                change,
                x,
                shrunk,
                bias,
                lowest,
                real,
                kept,
                inputs,
                size,
                splits,
                RANKS,
                DEPTH,
                SPLITS,
                DTYPE,
                PRECISION,
            )
        )
    place = near * features + feature
    wanted = real & kept[None, :]
    if residual is not None:
        y += tl.load(residual + place, mask=wanted, other=0.0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=wanted)


@triton.jit
def _half(
    product,
    change,
    x,
    shrunk,
    bias,
    lowest,
    real,
    kept,
    inputs,
    size,
    splits,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """[FEATURES, ROWS]: the outputs from the lowest on, changed and with the bias."""
    feature = lowest + tl.arange(0, real.shape[0])[:, None]
    y = tl.load(product + feature, mask=real & kept[None, :], other=0.0).to(tl.float32)
    if change != 0:
        y = _changed(
            y, change, x, shrunk, lowest, real, kept, inputs, size, splits, RANKS, DEPTH, SPLITS, DTYPE, PRECISION
        )
    return biased(y, bias, feature, real)


@triton.jit
def _changed(
    y,
    change,
    x,
    shrunk,
    lowest,
    real,
    kept,
    inputs,
    size,
    splits,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What a change makes of a product [FEATURES, ROWS]."""
    feature = lowest + tl.arange(0, real.shape[0])[:, None]
    gain, own_bias = _word(change, 3), _word(change, 4)
    if gain != 0:
        y *= tl.load(_at(change, gain, tl.float32) + feature, mask=real, other=0.0)
    if own_bias != 0:
        y += tl.load(_at(change, own_bias, tl.float32) + feature, mask=real, other=0.0)
    for part in range(_word(change, 1).to(tl.int32)):
        entry = HEADER * (part + 1)
        first, outputs = _word(change, entry), _word(change, entry + 1)
        if (first < lowest + real.shape[0]) & (lowest < first + outputs):
            stride = tl.multiple_of(_word(change, entry + 2).to(tl.int32), 8)
            first_rank = _word(change, entry + 3).to(tl.int32)
            scale = tl.load((change + 8 * (entry + 5)).to(tl.pointer_type(tl.float32)))
            up = _at(change, _word(change, entry + 4), DTYPE) + (feature - first) * stride
            within = real & (feature >= first) & (feature < first + outputs)
            total = tl.zeros_like(y)
            if first_rank >= 0:
                for done in range(0, stride, RANKS):
                    across = done + tl.arange(0, RANKS)[None, :]
                    along = done + tl.arange(0, RANKS)[:, None]
                    left = tl.load(up + across, mask=within & (across < stride), other=0.0)
                    given = kept[None, :] & (along < stride)
                    columns = _summed(shrunk + first_rank + along, given, size, splits, SPLITS)
                    total = tl.dot(left.to(tl.float32), columns, total, input_precision=PRECISION)
            else:
                for done in range(0, inputs, DEPTH):
                    across = done + tl.arange(0, DEPTH)[None, :]
                    along = done + tl.arange(0, DEPTH)[:, None]
                    left = tl.load(up + across, mask=within & (across < stride), other=0.0)
                    columns = tl.load(x + along, mask=kept[None, :] & (along < inputs), other=0.0)
                    total = tl.dot(left.to(columns.dtype), columns, total, input_precision="ieee")
            y += scale * total
    return y


@triton.jit
def _summed(parts, given, size, splits, SPLITS: tl.constexpr):
    """The sum of all splits' parts, in their order."""
    total = tl.load(parts, mask=given, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * size, mask=given & (split < splits), other=0.0)
    return total
