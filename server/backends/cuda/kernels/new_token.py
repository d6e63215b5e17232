# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""A decode's own token: its key and value, rotated, stored, and kept in registers by the program that stores them.

What is attended to is in `decode_head.py` and `decode_group.py`.

Shapes: K local kv heads, H head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from server.backends.cuda.kernels.codes import code_offsets, scale_offsets, store_row
from server.backends.cuda.kernels.rotate import load_rotated


@triton.jit
def load_row(
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
def store_new(
    qkv,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    k_divisor,
    v_divisor,
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
    BLOCK_STRIDE: tl.constexpr,
    KIND: tl.constexpr,
    HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    TILE: tl.constexpr,
):
    """The key, rotated, and the value [1, HEAD_PAD] of one sequence's new token, float32; 0 unless they are taken.

    As they will be read; both kinds of float8 before what multiplies all keys, or values, of the layer.
    """
    sequence = tl.program_id(0).to(tl.int64)
    features = tl.arange(0, HEAD_PAD)[None, :]
    real = features < HEAD_DIM
    source = qkv + sequence * token_stride + (HEADS + kv_head) * HEAD_DIM
    k = load_row(source, features, real & is_taken, cos, sin, sequence, HALF, IS_INTERLEAVED, TILE)
    v = load_row(source + KV_HEADS * HEAD_DIM, features, real & is_taken, None, None, sequence, 0, False, TILE)
    block = tl.load(table + position // BLOCK_SIZE, mask=is_stored, other=0).to(tl.int64)
    row = code_offsets(block, position, kv_head, KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, HEAD_DIM)
    scales = scale_offsets(block, position, kv_head, KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, HEAD_DIM) + features * 0
    kept, kept_rows = real & is_stored, (features == 0) & is_stored
    k = store_row(k, k_cache, k_scales, row + features, scales, kept, kept_rows, k_divisor, KIND, 1)
    v = store_row(v, v_cache, v_scales, row + features, scales, kept, kept_rows, v_divisor, KIND, 1)
    return k, v
