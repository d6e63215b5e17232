# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""One split of a decode's keys for heads that share a kv head: `decode.py` says how it is launched.

Products are those of matrix units.
"""

from __future__ import annotations

import triton
import triton.language as tl

from server.backends.cuda.kernels.cache import INT8, PLAIN, code_offsets, load_scales, numbers, scale_offsets, store_new
from server.backends.cuda.kernels.common import LOWEST, finish_scores, load_blocks
from server.backends.cuda.kernels.rotate import load_rotated
from server.backends.cuda.kernels.splits import finish_part, keys_of_part, part_of_program


# Positions of one sequence are less aligned than those of several.
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["positions"])
def decode_group(
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
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    REACH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One split of ROWS heads that share a kv head. Of the programs of one kv head, the first stores."""
    sequence, split, splits = part_of_program(plan)
    if sequence < 0:
        return
    kv_head, part = tl.program_id(1) // tl.cdiv(GROUP, ROWS), tl.program_id(1) % tl.cdiv(GROUP, ROWS)
    members = part * ROWS + tl.arange(0, ROWS)[:, None]
    heads = kv_head * GROUP + tl.minimum(members, GROUP - 1)
    position = tl.load(positions + sequence).to(tl.int32)
    reach = tl.load(visible + sequence).to(tl.int32)
    stored = tl.maximum(reach - 1, 0) if IS_NEW else reach
    first, last, used = keys_of_part(position, stored, split, splits, WINDOW, CHUNK, TILE)
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
            kv_head,
            is_taken,
            is_taken & (part == 0),
            token_stride,
            KV_HEADS * GROUP,
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
        product = tl.sum(queries.to(tl.float32) * new_k, axis=1, keep_dims=True)
        if KIND != PLAIN:
            product *= k_divisor
        score = finish_scores(product, tl.zeros([1, 1], tl.int32), heads, slopes, bias, SCALE, CAP, REACH)
        best = tl.where(is_taken, tl.reshape(score, [ROWS]), best)
        total = tl.where(is_taken, 1.0, total)
        acc += new_v
    for start in tl.range(first, last, TILE, num_stages=STAGES):
        keys = start + tl.arange(0, TILE)
        seen = keys < last
        rows = code_offsets(blocks, keys, kv_head, KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, HEAD_DIM)
        scales = scale_offsets(blocks, keys, kv_head, KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, HEAD_DIM)
        blocks = load_blocks(table, keys + TILE, keys + TILE < last, BLOCK_SIZE)
        offsets, loaded = rows[:, None] + features, seen[:, None] & real
        k = tl.load(k_cache + offsets, mask=loaded, other=0)
        v = tl.load(v_cache + offsets, mask=loaded, other=0)
        if KIND != PLAIN:
            k, v = numbers(k, KIND).to(queries.dtype), numbers(v, KIND).to(queries.dtype)
        products = tl.dot(queries, tl.trans(k), input_precision="ieee")
        if KIND == INT8:
            products *= load_scales(k_scales, scales, seen)[None, :]
        elif KIND != PLAIN:
            products *= k_divisor
        distance = (keys - position)[None, :]
        scores = finish_scores(products, distance, heads, slopes, bias, SCALE, CAP, REACH)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        kept, weights = tl.exp2(best - new_best), tl.exp2(scores - new_best[:, None])
        total = total * kept + tl.sum(weights, axis=1)
        if KIND == INT8:
            weights *= load_scales(v_scales, scales, seen)[None, :]
        acc = tl.dot(weights.to(v.dtype), v, acc * kept[:, None], input_precision="ieee")
        best = new_best
    if KIND != PLAIN:
        acc *= v_divisor
    finish_part(
        out,
        parts,
        log_sums,
        arrivals,
        plan,
        sinks,
        sequence,
        split,
        kv_head * GROUP + part * ROWS,
        tl.minimum(kv_head * GROUP + (part + 1) * ROWS, (kv_head + 1) * GROUP),
        acc,
        best[:, None],
        total[:, None],
        used,
        KV_HEADS * GROUP,
        HEAD_DIM,
        HEAD_PAD,
        ROWS,
        MEMBERS,
        AT_ONCE,
    )
