# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""Attend one query per sequence, split over the keys (Flash-Decoding).

A program owns one sequence, one kv head and one of the splits of the sequence's keys. With one split it writes the
result; with several it writes a normalised part and the logarithm of its sum, and `_combine` weighs the parts.

Heads that share a kv head are computed together by matrix products, padded to 16 rows, the least that the GPU's matrix
units take. A head of its own would waste 15 of them: there, products are summed elementwise, which a decode can afford
because it waits for memory. In that kernel every row of the tile keeps a softmax of its own (a split within the split),
so that nothing is exchanged between warps before the end.

Shapes: S sequences that decode, N local heads, K local kv heads, g heads per kv head, H head dim, B blocks, P tokens
per block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.backends.cuda.kernels.common import LOWEST, ScoreTerms, cache_rows, finish_scores, padded
from server.backends.protocol import StepMeta

# Programs wanted for each multiprocessor: several must be under way for some to load while others compute.
PROGRAMS_PER_PROCESSOR = 4
# More parts than this cost more to combine than they gain.
MAX_SPLITS = 64
# Bytes of a tile of keys, and as many of values. Elementwise, every row of a tile has its own sums in registers: half
# as large a tile keeps 5 programs of 4 warps on a multiprocessor, with 80 KiB under way.
HEAD_TILE_BYTES, GROUP_TILE_BYTES = 8192, 16384
# Below the 128 threads of a program: a longer list of blocks would be spread over them, and exchanged in every turn.
MAX_TILE = 64
# Stages of the compiler's pipeline: the list of blocks takes every other one, so that 2 tiles are loaded ahead.
GROUP_STAGES = 5
# Rows of a tile of queries where heads share a kv head: no fewer fill the matrix units, more take too many registers.
MIN_GROUP_ROWS, MAX_GROUP_ROWS = 16, 64


def choose_splits(pairs: int, processors: int, tiles: int) -> int:
    """Into how many parts each sequence's keys are split: a power of two.

    pairs: sequences times kv heads; processors: multiprocessors of the GPU; tiles: what the longest sequence could use.
    """
    wanted = min(PROGRAMS_PER_PROCESSOR * processors // pairs, tiles, MAX_SPLITS)
    return 1 << (max(wanted, 1).bit_length() - 1)


def decode(
    q: Tensor, kv: Tensor, out: Tensor, meta: StepMeta, terms: ScoreTerms, *, window: int, processors: int
) -> None:
    """Attend the first `meta.num_decodes` rows of q [T, N, H] over kv [2, B, K, P, H] into those of out [T, N, H]."""
    kv_heads, block_size, head_dim = kv.shape[2:]
    sequences, heads = meta.num_decodes, q.shape[1]
    tile_bytes = HEAD_TILE_BYTES if heads == kv_heads else GROUP_TILE_BYTES
    tile = min(tile_bytes // (padded(head_dim) * q.element_size()), MAX_TILE)
    longest = meta.block_tables.shape[1] * block_size
    splits = choose_splits(sequences * kv_heads, processors, triton.cdiv(longest, tile))
    if splits == 1:
        parts, log_sums = out, None
    else:
        parts = torch.empty(sequences, heads, splits, head_dim, dtype=torch.float32, device=q.device)
        log_sums = torch.empty(sequences, heads, splits, dtype=torch.float32, device=q.device)
    _launch(q, kv, parts, log_sums, meta, terms, window=window, splits=splits, tile=tile)
    if log_sums is not None:
        _combine[(sequences * heads,)](
            parts, log_sums, out, SPLITS=splits, HEAD_DIM=head_dim, HEAD_PAD=padded(head_dim)
        )


def _launch(
    q: Tensor,
    kv: Tensor,
    parts: Tensor,
    log_sums: Tensor | None,
    meta: StepMeta,
    terms: ScoreTerms,
    *,
    window: int,
    splits: int,
    tile: int,
) -> None:
    kv_heads, block_size, head_dim = kv.shape[2:]
    group = q.shape[1] // kv_heads
    assert kv.is_contiguous() and q.stride()[1:] == (head_dim, 1) and meta.block_tables.stride(1) == 1
    rows = min(max(triton.next_power_of_2(group), MIN_GROUP_ROWS), MAX_GROUP_ROWS)
    shared = {"GROUP": group, "ROWS": rows, "num_stages": GROUP_STAGES}
    kernel, options = (_decode_head, {}) if group == 1 else (_decode_group, shared)
    kernel[(meta.num_decodes, kv_heads * triton.cdiv(group, rows), splits)](
        q,
        kv[0],
        kv[1],
        parts,
        log_sums,
        meta.positions,
        meta.visible,
        meta.block_tables,
        terms.slopes,
        terms.bias,
        q.stride(0),
        meta.block_tables.stride(0),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=padded(head_dim),
        BLOCK_SIZE=block_size,
        TILE=tile,
        WINDOW=window,
        **options,
        **terms.constants,
    )


@triton.jit
def _keys_of_split(position, visible, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Half-open range of this program's keys, whole tiles but for the sequence's last; empty beyond the last."""
    begin = 0
    if WINDOW:
        begin = tl.maximum(position + 1 - WINDOW, 0)
    size = tl.cdiv(tl.cdiv(visible - begin, TILE), tl.num_programs(2)) * TILE
    first = begin + tl.program_id(2) * size
    return first, tl.minimum(first + size, visible)


@triton.jit
def _store_part(
    parts, log_sums, sequence, heads, features, kept, acc, best, total, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Write what one split found for `heads`. With no key seen, that is 0 with a weight of nothing."""
    row = (sequence * HEADS + heads) * tl.num_programs(2) + tl.program_id(2)
    total = tl.maximum(total, 1.0)  # the best key counts 1, so that less means none
    tl.store(parts + row * HEAD_DIM + features, (acc / total).to(parts.dtype.element_ty), mask=kept)
    if log_sums is not None:
        tl.store(log_sums + row, best + tl.log2(total), mask=heads < HEADS)


@triton.jit(do_not_specialize=["table_stride"])
def _decode_head(
    q,
    k_cache,
    v_cache,
    parts,
    log_sums,
    positions,
    visible,
    tables,
    slopes,
    bias,
    q_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    REACH: tl.constexpr,
):
    """One split of one head that has its kv head for itself; every row of the tile has its own running softmax."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + sequence).to(tl.int32)
    first, last = _keys_of_split(position, tl.load(visible + sequence).to(tl.int32), WINDOW, TILE)
    features = tl.arange(0, HEAD_PAD)[None, :]
    real = features < HEAD_DIM
    query = tl.load(q + sequence * q_stride + head * HEAD_DIM + features, mask=real, other=0.0).to(tl.float32)
    best = tl.full([TILE], LOWEST, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, HEAD_PAD], tl.float32)
    for start in range(first, last, TILE):
        keys = start + tl.arange(0, TILE)
        seen = keys < last
        rows = cache_rows(keys, seen, tables + sequence * table_stride, head, KV_HEADS, BLOCK_SIZE)
        offsets, loaded = rows[:, None] * HEAD_DIM + features, seen[:, None] & real
        k = tl.load(k_cache + offsets, mask=loaded, other=0.0)
        v = tl.load(v_cache + offsets, mask=loaded, other=0.0)
        products = tl.sum(query * k.to(tl.float32), axis=1)
        scores = finish_scores(products, keys - position, head, slopes, bias, SCALE, CAP, REACH)
        scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, scores)
        kept, weights = tl.exp2(best - new_best), tl.exp2(scores - new_best)
        total = total * kept + weights
        acc = acc * kept[:, None] + weights[:, None] * v.to(tl.float32)
        best = new_best
    best_of_all = tl.max(best, axis=0)
    share = tl.exp2(best - best_of_all)
    acc_of_all = tl.sum(acc * share[:, None], axis=0, keep_dims=True)
    total_of_all = tl.sum(total * share, axis=0)
    _store_part(
        parts, log_sums, sequence, head, features, real, acc_of_all, best_of_all, total_of_all, KV_HEADS, HEAD_DIM
    )


@triton.jit(do_not_specialize=["table_stride"])
def _decode_group(
    q,
    k_cache,
    v_cache,
    parts,
    log_sums,
    positions,
    visible,
    tables,
    slopes,
    bias,
    q_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    REACH: tl.constexpr,
):
    """One split of ROWS heads that share a kv head."""
    sequence = tl.program_id(0).to(tl.int64)
    kv_head, part = tl.program_id(1) // tl.cdiv(GROUP, ROWS), tl.program_id(1) % tl.cdiv(GROUP, ROWS)
    members = part * ROWS + tl.arange(0, ROWS)[:, None]
    is_member = members < GROUP
    heads = kv_head * GROUP + tl.minimum(members, GROUP - 1)
    position = tl.load(positions + sequence).to(tl.int32)
    first, last = _keys_of_split(position, tl.load(visible + sequence).to(tl.int32), WINDOW, TILE)
    features = tl.arange(0, HEAD_PAD)[None, :]
    real = features < HEAD_DIM
    kept_features = is_member & real
    queries = tl.load(q + sequence * q_stride + heads * HEAD_DIM + features, mask=kept_features, other=0.0)
    best = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    for start in range(first, last, TILE):
        keys = start + tl.arange(0, TILE)
        seen = keys < last
        rows = cache_rows(keys, seen, tables + sequence * table_stride, kv_head, KV_HEADS, BLOCK_SIZE)
        offsets, loaded = rows[:, None] * HEAD_DIM + features, seen[:, None] & real
        k = tl.load(k_cache + offsets, mask=loaded, other=0.0)
        v = tl.load(v_cache + offsets, mask=loaded, other=0.0)
        products = tl.dot(queries, tl.trans(k), input_precision="ieee")
        distance = (keys - position)[None, :]
        scores = finish_scores(products, distance, heads, slopes, bias, SCALE, CAP, REACH)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        kept, weights = tl.exp2(best - new_best), tl.exp2(scores - new_best[:, None])
        total = total * kept + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * kept[:, None], input_precision="ieee")
        best = new_best
    # A row that pads the group must not overwrite the group's last head.
    heads = tl.where(is_member, heads, KV_HEADS * GROUP)
    _store_part(
        parts,
        log_sums,
        sequence,
        heads,
        features,
        kept_features,
        acc,
        best[:, None],
        total[:, None],
        KV_HEADS * GROUP,
        HEAD_DIM,
    )


@triton.jit
def _combine(parts, log_sums, out, SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Weigh the parts [S * N, SPLITS, H] of one head of one sequence by the sums of their softmaxes."""
    row = tl.program_id(0).to(tl.int64)
    split = row * SPLITS + tl.arange(0, SPLITS)
    features = tl.arange(0, HEAD_PAD)
    real = features < HEAD_DIM
    sums = tl.load(log_sums + split)
    values = tl.load(parts + split[:, None] * HEAD_DIM + features[None, :], mask=real[None, :], other=0.0)
    weights = tl.exp2(sums - tl.max(sums, axis=0))
    mean = tl.sum(values * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    tl.store(out + row * HEAD_DIM + features, mean.to(out.dtype.element_ty), mask=real)
