# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""Attend one query per sequence, split over the keys (Flash-Decoding), and store its key and value on the way.

A program owns one sequence, one kv head and one of the splits of the sequence's keys (`splits.py`). Where the step's
own keys and values are given, the first split of a sequence rotates the new key, stores it with its value and takes
both from its registers: what one program stores, no other reads in the same launch, so none has to wait.

Heads that share a kv head are computed together by matrix products, padded to 16 rows, the least that the GPU's matrix
units take. A head of its own would waste 15 of them: there, products are summed elementwise, which a decode can afford
because it waits for memory. In that kernel every row of the tile keeps a softmax of its own (a split within the split),
so that nothing is exchanged between warps before the end.

Where a tile of keys lies is read from the table one tile ahead: otherwise every tile would wait for its blocks first.

Shapes: T tokens, S sequences that decode, N local heads, K local kv heads, H head dim, B blocks, P tokens per block, r
rotated features of a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.backends.cuda.kernels.common import LOWEST, ScoreTerms, cache_rows, finish_scores, load_blocks, padded
from server.backends.cuda.kernels.rotate import load_rotated
from server.backends.cuda.kernels.splits import Processors, choose_splits, combined_at_once, finish_split, keys_of_split
from server.backends.protocol import Rotation, StepMeta

# Bytes of a tile of keys, and as many of values. Elementwise, every row of a tile has its own sums in registers: half
# as large a tile keeps 4 programs of 4 warps on a multiprocessor, with 128 KiB under way.
HEAD_TILE_BYTES, GROUP_TILE_BYTES = 8192, 16384
# Below the 128 threads of a program: a longer list of blocks would be spread over them, and exchanged in every turn.
MAX_TILE = 64
STAGES = 3  # of the compiler's pipeline: two tiles are loaded ahead
# Rows of a tile of queries where heads share a kv head: no fewer fill the matrix units, more take too many registers.
MIN_GROUP_ROWS, MAX_GROUP_ROWS = 16, 64


def decode(
    qkv: Tensor,
    kv: Tensor,
    out: Tensor,
    meta: StepMeta,
    terms: ScoreTerms,
    processors: Processors,
    *,
    window: int,
    rotation: Rotation | None = None,
) -> None:
    """Attend the first `meta.num_decodes` rows of qkv over kv [2, B, K, P, H] into those of out [T, N, H].

    qkv: the queries [T, N, H], attending to what is stored; or with the step's keys and values [T, N + 2 K, H], which
    are stored, queries and keys rotated as `rotation` says. What nothing is visible to is not stored: the padding of a
    captured batch.
    """
    kv_heads, block_size, head_dim = kv.shape[2:]
    sequences, heads, group = meta.num_decodes, out.shape[1], out.shape[1] // kv_heads
    is_new = qkv.shape[1] > heads
    assert kv.is_contiguous() and qkv.stride()[1:] == (head_dim, 1) and meta.block_tables.stride(1) == 1
    assert qkv.shape[1] == heads + 2 * kv_heads * is_new
    rows = 1 if group == 1 else min(max(triton.next_power_of_2(group), MIN_GROUP_ROWS), MAX_GROUP_ROWS)
    tile_bytes = HEAD_TILE_BYTES if group == 1 else GROUP_TILE_BYTES
    tile = min(tile_bytes // (padded(head_dim) * qkv.element_size()), MAX_TILE)
    programs = kv_heads * triton.cdiv(group, rows)
    longest = meta.block_tables.shape[1] * block_size
    splits = choose_splits(sequences * programs, processors.count, triton.cdiv(longest, tile), rows)
    parts = log_sums = None
    if splits > 1:
        assert sequences * programs <= len(processors.arrivals)
        parts = torch.empty(sequences, heads, splits, head_dim, dtype=torch.float32, device=qkv.device)
        log_sums = torch.empty(sequences, heads, splits, dtype=torch.float32, device=qkv.device)
    members = min(triton.next_power_of_2(group), rows)
    kernel, options = (_decode_head, {}) if group == 1 else (_decode_group, {"GROUP": group, "ROWS": rows})
    kernel[(sequences, programs, splits)](
        qkv,
        kv[0],
        kv[1],
        out,
        parts,
        log_sums,
        None if parts is None else processors.arrivals,
        meta.positions,
        meta.visible,
        meta.block_tables,
        None if rotation is None else rotation.cos,
        None if rotation is None else rotation.sin,
        terms.slopes,
        terms.bias,
        qkv.stride(0),
        meta.block_tables.stride(0),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=padded(head_dim),
        BLOCK_SIZE=block_size,
        IS_NEW=is_new,
        HALF=0 if rotation is None else rotation.cos.shape[-1],
        IS_INTERLEAVED=rotation is not None and rotation.interleaved,
        TILE=tile,
        WINDOW=window,
        STAGES=STAGES,
        MEMBERS=members,
        AT_ONCE=combined_at_once(members, padded(head_dim)),
        **options,
        **terms.constants,
    )


@triton.jit
def _load_row(
    source, features, kept, cos, sin, token, HALF: tl.constexpr, IS_INTERLEAVED: tl.constexpr, TILE: tl.constexpr
):
    """The `kept` features of one head [1, HEAD_PAD], rotated, float32, in registers as those of a tile of keys are.

    Loaded alone, a row would lie in other registers than a tile's rows, and the compiler might move every tile to them,
    at twice the registers. So it is loaded as the first of as many rows as all threads hold at once; the others are 0.
    """
    rows = tl.arange(0, TILE // 4)[:, None]
    x = load_rotated(source + rows * 0, features, kept & (rows == 0), cos, sin, token, HALF, IS_INTERLEAVED)
    return tl.sum(x.to(tl.float32), axis=0, keep_dims=True)


@triton.jit
def _store_new(
    qkv,
    k_cache,
    v_cache,
    table,
    position,
    cos,
    sin,
    kv_head,
    is_taken,
    is_stored,
    token_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    TILE: tl.constexpr,
):
    """The key, rotated, and the value [1, HEAD_PAD] of one sequence's new token, float32; 0 unless they are taken."""
    sequence = tl.program_id(0).to(tl.int64)
    features = tl.arange(0, HEAD_PAD)[None, :]
    real = features < HEAD_DIM
    source = qkv + sequence * token_stride + (HEADS + kv_head) * HEAD_DIM
    k = _load_row(source, features, real & is_taken, cos, sin, sequence, HALF, IS_INTERLEAVED, TILE)
    v = _load_row(source + KV_HEADS * HEAD_DIM, features, real & is_taken, None, None, sequence, 0, False, TILE)
    block = tl.load(table + position // BLOCK_SIZE, mask=is_stored, other=0).to(tl.int64)
    row = (block * KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE
    kept = real & is_stored
    tl.store(k_cache + row * HEAD_DIM + features, k.to(k_cache.dtype.element_ty), mask=kept)
    tl.store(v_cache + row * HEAD_DIM + features, v.to(v_cache.dtype.element_ty), mask=kept)
    return k, v


@triton.jit(do_not_specialize=["table_stride"])
def _decode_head(
    qkv,
    k_cache,
    v_cache,
    out,
    parts,
    log_sums,
    arrivals,
    positions,
    visible,
    tables,
    cos,
    sin,
    slopes,
    bias,
    token_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_NEW: tl.constexpr,
    HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    MEMBERS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    REACH: tl.constexpr,
):
    """One split of one head that has its kv head for itself; every row of the tile has its own running softmax."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + sequence).to(tl.int32)
    reach = tl.load(visible + sequence).to(tl.int32)
    stored = tl.maximum(reach - 1, 0) if IS_NEW else reach
    first, last = keys_of_split(position, stored, WINDOW, TILE)
    table = tables + sequence * table_stride
    keys = first + tl.arange(0, TILE)
    blocks = load_blocks(table, keys, keys < last, BLOCK_SIZE)
    features = tl.arange(0, HEAD_PAD)[None, :]
    real = features < HEAD_DIM
    source = qkv + sequence * token_stride + head * HEAD_DIM
    query = _load_row(source, features, real, cos, sin, sequence, HALF, IS_INTERLEAVED, TILE)
    best = tl.full([TILE], LOWEST, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, HEAD_PAD], tl.float32)
    if IS_NEW:
        is_taken = (tl.program_id(2) == 0) & (reach > 0)
        new_k, new_v = _store_new(
            qkv,
            k_cache,
            v_cache,
            table,
            position,
            cos,
            sin,
            head,
            is_taken,
            is_taken,
            token_stride,
            KV_HEADS,
            KV_HEADS,
            HEAD_DIM,
            HEAD_PAD,
            BLOCK_SIZE,
            HALF,
            IS_INTERLEAVED,
            TILE,
        )
        product = tl.sum(query * new_k, axis=1)
        score = finish_scores(product, tl.zeros([1], tl.int32), head, slopes, bias, SCALE, CAP, REACH)
        is_row = (tl.arange(0, TILE) == 0) & is_taken  # the first row of the tile takes the new key
        best = tl.where(is_row, score, best)
        total = tl.where(is_row, 1.0, total)
        acc = tl.where(is_row[:, None], new_v, acc)
    for start in tl.range(first, last, TILE, num_stages=STAGES):
        keys = start + tl.arange(0, TILE)
        seen = keys < last
        rows = cache_rows(blocks, keys, head, KV_HEADS, BLOCK_SIZE)
        blocks = load_blocks(table, keys + TILE, keys + TILE < last, BLOCK_SIZE)
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
    best_of_all = tl.max(best, axis=0, keep_dims=True)
    share = tl.exp2(best - best_of_all)
    acc_of_all = tl.sum(acc * share[:, None], axis=0, keep_dims=True)
    total_of_all = tl.sum(total * share, axis=0, keep_dims=True)
    finish_split(
        out,
        parts,
        log_sums,
        arrivals,
        head,
        head + 1,
        acc_of_all,
        best_of_all[:, None],
        total_of_all[:, None],
        KV_HEADS,
        HEAD_DIM,
        HEAD_PAD,
        1,
        MEMBERS,
        AT_ONCE,
    )


@triton.jit(do_not_specialize=["table_stride"])
def _decode_group(
    qkv,
    k_cache,
    v_cache,
    out,
    parts,
    log_sums,
    arrivals,
    positions,
    visible,
    tables,
    cos,
    sin,
    slopes,
    bias,
    token_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_NEW: tl.constexpr,
    HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    MEMBERS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    REACH: tl.constexpr,
):
    """One split of ROWS heads that share a kv head. Of the programs of one kv head, the first stores."""
    sequence = tl.program_id(0).to(tl.int64)
    kv_head, part = tl.program_id(1) // tl.cdiv(GROUP, ROWS), tl.program_id(1) % tl.cdiv(GROUP, ROWS)
    members = part * ROWS + tl.arange(0, ROWS)[:, None]
    heads = kv_head * GROUP + tl.minimum(members, GROUP - 1)
    position = tl.load(positions + sequence).to(tl.int32)
    reach = tl.load(visible + sequence).to(tl.int32)
    stored = tl.maximum(reach - 1, 0) if IS_NEW else reach
    first, last = keys_of_split(position, stored, WINDOW, TILE)
    table = tables + sequence * table_stride
    keys = first + tl.arange(0, TILE)
    blocks = load_blocks(table, keys, keys < last, BLOCK_SIZE)
    features = tl.arange(0, HEAD_PAD)[None, :]
    real = features < HEAD_DIM
    source = qkv + sequence * token_stride + heads * HEAD_DIM
    queries = load_rotated(source, features, (members < GROUP) & real, cos, sin, sequence, HALF, IS_INTERLEAVED)
    best = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    if IS_NEW:
        is_taken = (tl.program_id(2) == 0) & (reach > 0)
        new_k, new_v = _store_new(
            qkv,
            k_cache,
            v_cache,
            table,
            position,
            cos,
            sin,
            kv_head,
            is_taken,
            is_taken & (part == 0),
            token_stride,
            KV_HEADS * GROUP,
            KV_HEADS,
            HEAD_DIM,
            HEAD_PAD,
            BLOCK_SIZE,
            HALF,
            IS_INTERLEAVED,
            TILE,
        )
        product = tl.sum(queries.to(tl.float32) * new_k, axis=1, keep_dims=True)
        score = finish_scores(product, tl.zeros([1, 1], tl.int32), heads, slopes, bias, SCALE, CAP, REACH)
        best = tl.where(is_taken, tl.reshape(score, [ROWS]), best)
        total = tl.where(is_taken, 1.0, total)
        acc += new_v
    for start in tl.range(first, last, TILE, num_stages=STAGES):
        keys = start + tl.arange(0, TILE)
        seen = keys < last
        rows = cache_rows(blocks, keys, kv_head, KV_HEADS, BLOCK_SIZE)
        blocks = load_blocks(table, keys + TILE, keys + TILE < last, BLOCK_SIZE)
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
    finish_split(
        out,
        parts,
        log_sums,
        arrivals,
        kv_head * GROUP + part * ROWS,
        tl.minimum(kv_head * GROUP + (part + 1) * ROWS, (kv_head + 1) * GROUP),
        acc,
        best[:, None],
        total[:, None],
        KV_HEADS * GROUP,
        HEAD_DIM,
        HEAD_PAD,
        ROWS,
        MEMBERS,
        AT_ONCE,
    )
