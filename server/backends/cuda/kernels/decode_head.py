# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""One split of a decode's keys for a head that has its kv head for itself: `decode.py` says how it is launched.

Products are summed elementwise, and every row of the tile keeps a softmax of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from server.backends.cuda.kernels.cache import (
    INT8,
    PLAIN,
    code_offsets,
    load_row,
    load_scales,
    numbers,
    scale_offsets,
    store_new,
)
from server.backends.cuda.kernels.common import LOWEST, finish_scores, load_blocks
from server.backends.cuda.kernels.splits import finish_part, keys_of_part, part_of_program


# Positions of one sequence are less aligned than those of several.
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["positions"])
def decode_head(
    qkv,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    k_divisor,
    v_divisor,
    out,
    parts,
    log_sums,
    arrivals,
    plan,
    positions,
    visible,
    tables,
    cos,
    sin,
    slopes,
    bias,
    sinks,
    token_stride,
    table_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    IS_NEW: tl.constexpr,
    HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    MEMBERS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    REACH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One split of one head that has its kv head for itself; every row of the tile has its own running softmax."""
    sequence, split, splits = part_of_program(plan)
    if sequence < 0:
        return
    head = tl.program_id(1)
    position = tl.load(positions + sequence).to(tl.int32)
    reach = tl.load(visible + sequence).to(tl.int32)
    stored = tl.maximum(reach - 1, 0) if IS_NEW else reach
    first, last, used = keys_of_part(position, stored, split, splits, WINDOW, CHUNK, TILE)
    table = tables + sequence * table_stride
    keys = first + tl.arange(0, TILE)
    blocks = load_blocks(table, keys, keys < last, BLOCK_SIZE)
    features = tl.arange(0, HEAD_PAD)[None, :]
    real = features < HEAD_DIM
    source = qkv + sequence * token_stride + head * HEAD_DIM
    query = load_row(source, features, real, cos, sin, sequence, HALF, IS_INTERLEAVED, TILE)
    best = tl.full([TILE], LOWEST, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, HEAD_PAD], tl.float32)
    if IS_NEW:
        is_taken = (split == 0) & (reach > 0)
        new_k, new_v = store_new(
            qkv,
            k_cache,
            v_cache,
            k_scales,
            v_scales,
            k_divisor,
            v_divisor,
            table,
            sequence,
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
            BLOCK_STRIDE,
            KIND,
            HALF,
            IS_INTERLEAVED,
            TILE,
        )
        product = tl.sum(query * new_k, axis=1)
        if KIND != PLAIN:
            product *= k_divisor
        score = finish_scores(product, tl.zeros([1], tl.int32), head, slopes, bias, SCALE, CAP, REACH)
        is_row = (tl.arange(0, TILE) == 0) & is_taken  # the first row of the tile takes the new key
        best = tl.where(is_row, score, best)
        total = tl.where(is_row, 1.0, total)
        acc = tl.where(is_row[:, None], new_v, acc)
    for start in tl.range(first, last, TILE, num_stages=STAGES):
        keys = start + tl.arange(0, TILE)
        seen = keys < last
        rows = code_offsets(blocks, keys, head, KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, HEAD_DIM)
        scales = scale_offsets(blocks, keys, head, KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, HEAD_DIM)
        blocks = load_blocks(table, keys + TILE, keys + TILE < last, BLOCK_SIZE)
        offsets, loaded = rows[:, None] + features, seen[:, None] & real
        k = tl.load(k_cache + offsets, mask=loaded, other=0)
        v = tl.load(v_cache + offsets, mask=loaded, other=0)
        products = tl.sum(query * numbers(k, KIND), axis=1)
        if KIND == INT8:
            products *= load_scales(k_scales, scales, seen)
        elif KIND != PLAIN:
            products *= k_divisor
        scores = finish_scores(products, keys - position, head, slopes, bias, SCALE, CAP, REACH)
        scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, scores)
        kept, weights = tl.exp2(best - new_best), tl.exp2(scores - new_best)
        total = total * kept + weights
        if KIND == INT8:
            weights *= load_scales(v_scales, scales, seen)
        acc = acc * kept[:, None] + weights[:, None] * numbers(v, KIND)
        best = new_best
    best_of_all = tl.max(best, axis=0, keep_dims=True)
    share = tl.exp2(best - best_of_all)
    acc_of_all = tl.sum(acc * share[:, None], axis=0, keep_dims=True)
    total_of_all = tl.sum(total * share, axis=0, keep_dims=True)
    if KIND != PLAIN:
        acc_of_all *= v_divisor
    finish_part(
        out,
        parts,
        log_sums,
        arrivals,
        plan,
        sinks,
        sequence,
        split,
        head,
        head + 1,
        acc_of_all,
        best_of_all[:, None],
        total_of_all[:, None],
        used,
        KV_HEADS,
        HEAD_DIM,
        HEAD_PAD,
        1,
        MEMBERS,
        AT_ONCE,
    )
