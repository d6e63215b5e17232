# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""Attention whose values are the first numbers of its keys: one row of a token is both, for all heads.

A tile of rows is read once and multiplied twice. Its halves, what is a value and what is rotated behind it, are tiles
of their own, because a tile's sides are powers of two. A program owns some heads of a decode and one of the splits of
its keys (`splits.py`), or some pairs of a token and a head of a prompt.

Shapes: T tokens, S sequences, N local heads, R numbers of a value, W of a key, B blocks, P tokens per block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.backends.cuda.kernels.cache import (
    INT8,
    KINDS,
    PLAIN,
    code_offsets,
    codes_of,
    divided,
    load_scales,
    numbers,
    row_scales,
    scale_offsets,
)
from server.backends.cuda.kernels.common import LOG2_E, LOWEST, load_blocks, padded
from server.backends.cuda.kernels.rotate import TILE_ELEMENTS, load_rotated, rotate_heads
from server.backends.cuda.kernels.splits import (
    Processors,
    combined_at_once,
    divide,
    finish_part,
    keys_of_part,
    part_of_program,
)
from server.backends.protocol import Rotation, Scores, StepMeta
from server.quantisation.kv import AS_COMPUTED, Int8, KvFormat


@dataclass(frozen=True)
class Tiles:
    """How a program is cut out of the work."""

    most_rows: int
    keys: int
    warps: int
    stages: int  # of the compiler's pipeline

    def rows(self, wanted: int) -> int:
        """Of a program's tile, of so many that there are."""
        return min(max(triton.next_power_of_2(wanted), LEAST_ROWS), self.most_rows)

    def options(self, rows: int) -> dict[str, int]:
        """What a kernel is compiled for."""
        return {"ROWS": rows, "KEYS": self.keys, "num_warps": self.warps, "num_stages": self.stages}


LEAST_ROWS = 16  # that matrix units take
# By bytes of an element. Sums of 64 rows of 512 numbers take half of the registers of 8 warps, and what puts splits
# together has no room beside them.
EXACT = Tiles(most_rows=16, keys=16, warps=4, stages=1)
DECODES = {2: Tiles(most_rows=32, keys=32, warps=8, stages=3), 4: EXACT}
PROMPTS = {2: Tiles(most_rows=64, keys=16, warps=8, stages=3), 4: EXACT}


def store_rows(
    heads: Tensor, kv: Tensor, rotation: Rotation | None, slots: Tensor, rank: int, format: KvFormat = AS_COMPUTED
) -> None:
    """Rotate the queries of heads [T, N + 1, W] in place behind `rank`; store keys at slots [T] of kv [1, B, 1, P, W].

    A slot below 0 is nowhere: the padding of a captured batch.
    """
    tokens, count, width = heads.shape
    half = 0 if rotation is None else rotation.cos.shape[-1]
    assert heads.is_contiguous()
    assert rotation is None or 2 * half == width - rank
    half_pad = max(triton.next_power_of_2(half), 1)
    tile = min(triton.next_power_of_2(count - 1), max(TILE_ELEMENTS // half_pad, 1))
    _store_rows[(tokens, triton.cdiv(count - 1, tile) + 1)](
        heads,
        *_cache(kv, format),
        format.scales[0],
        None if rotation is None else rotation.cos,
        None if rotation is None else rotation.sin,
        slots,
        HEADS=count - 1,
        HALF=half,
        HALF_PAD=half_pad,
        IS_INTERLEAVED=rotation is not None and rotation.interleaved,
        TILE=tile,
        **_constants(kv, format, width, rank),
    )


def attend_rows(
    q: Tensor, kv: Tensor, meta: StepMeta, scores: Scores, processors: Processors, format: KvFormat = AS_COMPUTED
) -> Tensor:
    """Attend the rows of q [T, N, W] over kv [1, B, 1, P, W]: [T, N, R]."""
    assert q.stride()[1:] == (q.shape[2], 1) and meta.block_tables.stride(1) == 1
    out = q.new_empty(*q.shape[:2], scores.rank)
    if meta.num_decodes:
        _decode(q, kv, out, meta, scores, processors, format)
    if meta.longest:
        heads, tiles = q.shape[1], PROMPTS[q.element_size()]
        rows = tiles.most_rows  # for a token, too: a request would wait for the compiler
        chunks = len(meta.block_tables) - meta.num_decodes
        _prefill_rows[(triton.cdiv(meta.longest * heads, rows), chunks)](
            q,
            *_cache(kv, format),
            format.scales[0],
            out,
            meta.starts,
            meta.visible,
            meta.block_tables,
            meta.num_decodes,
            q.stride(0),
            meta.block_tables.stride(0),
            HEADS=heads,
            SCALE=scores.scale,
            **tiles.options(rows),
            **_constants(kv, format, q.shape[2], scores.rank),
        )
    return out


def _decode(
    q: Tensor, kv: Tensor, out: Tensor, meta: StepMeta, scores: Scores, processors: Processors, format: KvFormat
) -> None:
    """The first `meta.num_decodes` rows."""
    heads, tiles = q.shape[1], DECODES[q.element_size()]
    rows = tiles.rows(heads)
    programs = triton.cdiv(heads, rows)
    longest = meta.block_tables.shape[1] * kv.shape[3]
    division = divide(
        meta, processors, heads, scores.rank, programs=programs, tiles=triton.cdiv(longest, tiles.keys), rows=rows
    )
    members = min(triton.next_power_of_2(heads), rows)
    _decode_rows[division.grid](
        q,
        *_cache(kv, format),
        format.scales[0],
        out,
        division.parts,
        division.log_sums,
        division.arrivals,
        division.plan,
        meta.visible,
        meta.block_tables,
        q.stride(0),
        meta.block_tables.stride(0),
        HEADS=heads,
        SCALE=scores.scale,
        MEMBERS=members,
        AT_ONCE=combined_at_once(members, padded(scores.rank)),
        **tiles.options(rows),
        **_constants(kv, format, q.shape[2], scores.rank),
    )


def _cache(kv: Tensor, format: KvFormat) -> tuple[Tensor, Tensor | None]:
    """Rows, and the same memory as the bits of scales, where they have some of their own."""
    assert kv.is_contiguous() and len(kv) == kv.shape[2] == 1
    return kv, kv.view(torch.int16) if format.name == Int8.name else None


def _constants(kv: Tensor, format: KvFormat, width: int, rank: int) -> dict[str, int]:
    """What a kernel is compiled for: BLOCK_STRIDE counts elements from one block to the next."""
    return {
        "WIDTH": width,
        "RANK": rank,
        "RANK_PAD": padded(rank),
        "REST_PAD": padded(width - rank),
        "BLOCK_SIZE": kv.shape[3],
        "BLOCK_STRIDE": kv.shape[3] * kv.shape[4],
        "KIND": KINDS[format.name].value,
    }


@triton.jit
def _put(x, cache, offsets, kept, scale, KIND: tl.constexpr):
    """Store part of a row, divided by its scale where codes are stored."""
    if KIND == PLAIN:
        tl.store(cache + offsets, x.to(cache.dtype.element_ty), mask=kept)
    else:
        tl.store(cache + offsets, codes_of(divided(x.to(tl.float32), scale), KIND), mask=kept)


@triton.jit
def _store_rows(
    x,
    cache,
    scales,
    divisor,
    cos,
    sin,
    slots,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    KIND: tl.constexpr,
):
    """TILE queries of one token, or its key."""
    token = tl.program_id(0).to(tl.int64)
    source = x + token * (HEADS + 1) * WIDTH
    if tl.program_id(1) < tl.num_programs(1) - 1:
        if cos is not None:
            heads = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
            turned, kept = source + RANK, heads < HEADS
            angles = token * HALF
            rotate_heads(
                turned,
                turned,
                heads,
                kept,
                WIDTH,
                WIDTH,
                cos + angles,
                sin + angles,
                2 * HALF,
                2 * HALF_PAD,
                HALF,
                HALF_PAD,
                IS_INTERLEAVED,
            )
    else:
        slot = tl.load(slots + token).to(tl.int64)
        features, rest = tl.arange(0, RANK_PAD)[None, :], tl.arange(0, REST_PAD)[None, :]
        real, real_rest = features < RANK, rest < WIDTH - RANK
        source += HEADS * WIDTH
        value = tl.load(source + features, mask=real, other=0.0)
        behind = load_rotated(source + RANK, rest, real_rest, cos, sin, token, HALF, IS_INTERLEAVED)
        block, is_stored = slot // BLOCK_SIZE, slot >= 0
        row = code_offsets(block, slot, 0, 1, BLOCK_SIZE, BLOCK_STRIDE, WIDTH)
        scale = divisor
        if KIND == INT8:
            value, behind = value.to(tl.float32), behind.to(tl.float32)
            bits, size = row_scales(value, 1)
            bits_behind, size_behind = row_scales(behind, 1)
            at = scale_offsets(block, slot, 0, 1, BLOCK_SIZE, BLOCK_STRIDE, WIDTH)
            tl.store(scales + at + tl.zeros_like(bits), tl.maximum(bits, bits_behind), mask=is_stored & (bits == bits))
            scale = tl.maximum(tl.maximum(size, size_behind), 1.1754944e-38)
        _put(value, cache, row + features, real & is_stored, scale, KIND)
        _put(behind, cache, row + RANK + rest, real_rest & is_stored, scale, KIND)


@triton.jit
def _load_queries(
    source, kept, WIDTH: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, REST_PAD: tl.constexpr
):
    """Both parts of the queries at source [rows, 1] that are kept; 0 elsewhere."""
    features, rest = tl.arange(0, RANK_PAD)[None, :], tl.arange(0, REST_PAD)[None, :]
    inner = tl.load(source + features, mask=kept & (features < RANK), other=0.0)
    return inner, tl.load(source + RANK + rest, mask=kept & (rest < WIDTH - RANK), other=0.0)


@triton.jit
def _walk(
    queries,
    turned,
    cache,
    scales,
    divisor,
    table,
    reach,
    first,
    last,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    KIND: tl.constexpr,
):
    """Sums [ROWS, RANK_PAD] over the keys `first` to `last` as far as a row's `reach` [ROWS, 1], the largest score, in
    base 2, and the sum of weights relative to it."""
    features, rest = tl.arange(0, RANK_PAD)[None, :], tl.arange(0, REST_PAD)[None, :]
    best = tl.full([ROWS, 1], LOWEST, tl.float32)
    total = tl.zeros([ROWS, 1], tl.float32)
    acc = tl.zeros([ROWS, RANK_PAD], tl.float32)
    for start in range(first, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        present = keys < last
        blocks = load_blocks(table, keys, present, BLOCK_SIZE)
        offsets = code_offsets(blocks, keys, 0, 1, BLOCK_SIZE, BLOCK_STRIDE, WIDTH)[:, None]
        k = tl.load(cache + offsets + features, mask=present[:, None] & (features < RANK), other=0)
        behind = tl.load(cache + offsets + RANK + rest, mask=present[:, None] & (rest < WIDTH - RANK), other=0)
        if KIND != PLAIN:
            k, behind = numbers(k, KIND).to(queries.dtype), numbers(behind, KIND).to(queries.dtype)
        products = tl.dot(turned, tl.trans(behind), input_precision="ieee")
        products = tl.dot(queries, tl.trans(k), products, input_precision="ieee")
        if KIND == INT8:
            at = scale_offsets(blocks, keys, 0, 1, BLOCK_SIZE, BLOCK_STRIDE, WIDTH)
            of_keys = load_scales(scales, at, present)[None, :]
            products *= of_keys
        elif KIND != PLAIN:
            products *= divisor
        scores = tl.where(keys[None, :] < reach, products * (SCALE * LOG2_E), float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1, keep_dims=True))
        kept, weights = tl.exp2(best - new_best), tl.exp2(scores - new_best)
        total = total * kept + tl.sum(weights, axis=1, keep_dims=True)
        if KIND == INT8:
            weights *= of_keys
        acc = tl.dot(weights.to(k.dtype), k, acc * kept, input_precision="ieee")
        best = new_best
    if KIND != PLAIN:
        acc *= divisor
    return acc, best, total


@triton.jit(do_not_specialize=["table_stride"])
def _decode_rows(
    q,
    cache,
    scales,
    divisor,
    out,
    parts,
    log_sums,
    arrivals,
    plan,
    visible,
    tables,
    q_stride,
    table_stride,
    HEADS: tl.constexpr,
    SCALE: tl.constexpr,
    MEMBERS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    KIND: tl.constexpr,
):
    """ROWS heads of one sequence, one split of its keys."""
    sequence, split, splits = part_of_program(plan)
    if sequence < 0:
        return
    first_head = tl.program_id(1) * ROWS
    heads = first_head + tl.arange(0, ROWS)[:, None]
    source = q + sequence * q_stride + heads * WIDTH
    queries, turned = _load_queries(source, heads < HEADS, WIDTH, RANK, RANK_PAD, REST_PAD)
    seen = tl.load(visible + sequence).to(tl.int32)
    first, last, used = keys_of_part(seen - 1, seen, split, splits, 0, 0, KEYS)
    acc, best, total = _walk(
        queries,
        turned,
        cache,
        scales,
        divisor,
        tables + sequence * table_stride,
        seen,
        first,
        last,
        SCALE,
        ROWS,
        KEYS,
        WIDTH,
        RANK,
        RANK_PAD,
        REST_PAD,
        BLOCK_SIZE,
        BLOCK_STRIDE,
        KIND,
    )
    end = tl.minimum(first_head + ROWS, HEADS)
    finish_part(
        out,
        parts,
        log_sums,
        arrivals,
        plan,
        None,
        sequence,
        split,
        first_head,
        end,
        acc,
        best,
        total,
        used,
        HEADS,
        RANK,
        RANK_PAD,
        ROWS,
        MEMBERS,
        AT_ONCE,
    )


@triton.jit(do_not_specialize=["num_decodes", "table_stride"])
def _prefill_rows(
    q,
    cache,
    scales,
    divisor,
    out,
    query_starts,
    visible,
    tables,
    num_decodes,
    q_stride,
    table_stride,
    HEADS: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    KIND: tl.constexpr,
):
    """ROWS pairs of a token and a head of one sequence. The last tile first: it sees the most keys."""
    sequence = num_decodes + tl.program_id(1)
    begin = tl.load(query_starts + sequence)
    count = (tl.load(query_starts + sequence + 1) - begin) * HEADS
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    if first_row >= count:
        return
    rows = first_row + tl.arange(0, ROWS)[:, None]
    asked = rows < count
    tokens, heads = (begin + rows // HEADS).to(tl.int64), rows % HEADS
    source = q + tokens * q_stride + heads * WIDTH
    queries, turned = _load_queries(source, asked, WIDTH, RANK, RANK_PAD, REST_PAD)
    reach = tl.load(visible + tokens, mask=asked, other=0).to(tl.int32)
    acc, _, total = _walk(
        queries,
        turned,
        cache,
        scales,
        divisor,
        tables + sequence.to(tl.int64) * table_stride,
        reach,
        0,
        tl.max(tl.max(reach, axis=1), axis=0),
        SCALE,
        ROWS,
        KEYS,
        WIDTH,
        RANK,
        RANK_PAD,
        REST_PAD,
        BLOCK_SIZE,
        BLOCK_STRIDE,
        KIND,
    )
    features = tl.arange(0, RANK_PAD)[None, :]
    result = acc / tl.maximum(total, 1.0)  # the best key counts 1, so that less means none
    target = out + (tokens * HEADS + heads) * RANK + features
    tl.store(target, result.to(out.dtype.element_ty), mask=asked & (features < RANK))
