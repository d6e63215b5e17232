# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""Rotate a step's queries and keys (Su et al. 2021, arXiv 2104.09864), and scatter its keys and values into the cache.

One kernel: apart, the keys would be written and read once more, and a decode would wait for one more launch. Rotations
are computed in float32 and rounded once.

Shapes: T tokens, N local heads, K local kv heads, H head dim, B blocks, P tokens per block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from server.backends.protocol import Rotation

# Elements of a program's tile: 8 for each thread of 4 warps.
TILE_ELEMENTS = 1024


def rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, kv: Tensor, slots: Tensor, *, first: int = 0
) -> Tensor:
    """Rotate q [T, N, H], which is returned, and k [T, K, H], which goes to kv [2, B, K, P, H] at `slots` [T] with v.

    A slot is block * P + offset; below 0 it is nowhere: the padding of a captured batch. Tokens before `first` are left
    alone, and what is returned for them is not initialised.
    """
    tokens, heads, head_dim = q.shape
    kv_heads, block_size = k.shape[1], kv.shape[3]
    half = rotation.cos.shape[-1]
    assert kv.is_contiguous() and rotation.cos.is_contiguous() and rotation.sin.is_contiguous()
    assert all(t.stride()[1:] == (head_dim, 1) for t in (q, k, v))
    turned = q.new_empty(q.shape)
    half_pad = triton.next_power_of_2(half)
    tile = min(triton.next_power_of_2(heads), max(TILE_ELEMENTS // half_pad, 1))
    _rotate_and_store[(tokens - first, triton.cdiv(heads, tile) + triton.cdiv(kv_heads, tile))](
        q,
        k,
        v,
        rotation.cos,
        rotation.sin,
        slots,
        turned,
        kv[0],
        kv[1],
        first,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        HALF=half,
        HALF_PAD=half_pad,
        IS_INTERLEAVED=rotation.interleaved,
        TILE=tile,
    )
    return turned


def rotated(x: Tensor, rotation: Rotation, *, first: int = 0) -> Tensor:
    """Rotate x [T, N, H]; what is returned for tokens before `first` is not initialised.

    For keys that are stored in fewer bits: their scale is known when a whole row is rotated.
    """
    tokens, heads, head_dim = x.shape
    half = rotation.cos.shape[-1]
    assert rotation.cos.is_contiguous() and rotation.sin.is_contiguous() and x.stride()[1:] == (head_dim, 1)
    turned = x.new_empty(x.shape)
    half_pad = triton.next_power_of_2(half)
    tile = min(triton.next_power_of_2(heads), max(TILE_ELEMENTS // half_pad, 1))
    _rotate_heads[(tokens - first, triton.cdiv(heads, tile))](
        x,
        rotation.cos,
        rotation.sin,
        turned,
        first,
        x.stride(0),
        HEADS=heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=triton.next_power_of_2(head_dim),
        HALF=half,
        HALF_PAD=half_pad,
        IS_INTERLEAVED=rotation.interleaved,
        TILE=tile,
    )
    return turned


@triton.jit
def load_rotated(source, features, kept, cos, sin, token, HALF: tl.constexpr, IS_INTERLEAVED: tl.constexpr):
    """The `kept` features of heads at `source`, rotated as `token` says if there is a rotation; 0 where not kept."""
    x = tl.load(source + features, mask=kept, other=0.0)
    if cos is not None:
        if IS_INTERLEAVED:
            pairs, is_second = features // 2, features % 2 == 1
            partners = tl.where(is_second, features - 1, features + 1)
        else:
            is_second = features >= HALF
            pairs = tl.where(is_second, features - HALF, features)
            partners = tl.where(is_second, features - HALF, features + HALF)
        is_turned = features < 2 * HALF
        y = tl.load(source + partners, mask=kept & is_turned, other=0.0).to(tl.float32)
        c = tl.load(cos + token * HALF + pairs, mask=is_turned, other=1.0)
        s = tl.load(sin + token * HALF + pairs, mask=is_turned, other=0.0)
        x = (x.to(tl.float32) * c + y * tl.where(is_second, s, -s)).to(x.dtype)
    return x


@triton.jit
def rotate_heads(
    source,
    target,
    heads,
    kept,
    source_stride: tl.constexpr,
    target_stride: tl.constexpr,
    cos,
    sin,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    """Rotate the heads [TILE, 1] that are `kept` from source to target; features behind the rotated are copied."""
    pairs = tl.arange(0, HALF_PAD)[None, :]
    first = 2 * pairs if IS_INTERLEAVED else pairs
    second = first + 1 if IS_INTERLEAVED else first + HALF
    loaded = kept & (pairs < HALF)
    a = tl.load(source + heads * source_stride + first, mask=loaded, other=0.0).to(tl.float32)
    b = tl.load(source + heads * source_stride + second, mask=loaded, other=0.0).to(tl.float32)
    c = tl.load(cos + pairs, mask=pairs < HALF, other=0.0)
    s = tl.load(sin + pairs, mask=pairs < HALF, other=0.0)
    dtype = target.dtype.element_ty
    tl.store(target + heads * target_stride + first, (a * c - b * s).to(dtype), mask=loaded)
    tl.store(target + heads * target_stride + second, (b * c + a * s).to(dtype), mask=loaded)
    if 2 * HALF < HEAD_DIM:
        features = tl.arange(0, HEAD_PAD)[None, :]
        copied = kept & (features >= 2 * HALF) & (features < HEAD_DIM)
        rest = tl.load(source + heads * source_stride + features, mask=copied)
        tl.store(target + heads * target_stride + features, rest, mask=copied)


@triton.jit(do_not_specialize=["first"])
def _rotate_heads(
    x,
    cos,
    sin,
    turned,
    first,
    stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    TILE: tl.constexpr,
):
    """TILE heads of one token."""
    token = first + tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    rotate_heads(
        x + token * stride,
        turned + token * HEADS * HEAD_DIM,
        heads,
        heads < HEADS,
        HEAD_DIM,
        HEAD_DIM,
        cos + token * HALF,
        sin + token * HALF,
        HEAD_DIM,
        HEAD_PAD,
        HALF,
        HALF_PAD,
        IS_INTERLEAVED,
    )


@triton.jit(do_not_specialize=["first"])
def _rotate_and_store(
    q,
    k,
    v,
    cos,
    sin,
    slots,
    turned,
    k_cache,
    v_cache,
    first,
    q_stride,
    k_stride,
    v_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    TILE: tl.constexpr,
):
    """TILE heads of one token: first come the programs of the queries, then those of keys and values."""
    token, part = first + tl.program_id(0).to(tl.int64), tl.program_id(1)
    members = tl.arange(0, TILE)[:, None]
    cos += token * HALF
    sin += token * HALF
    if part < tl.cdiv(HEADS, TILE):
        heads = part * TILE + members
        rotate_heads(
            q + token * q_stride,
            turned + token * HEADS * HEAD_DIM,
            heads,
            heads < HEADS,
            HEAD_DIM,
            HEAD_DIM,
            cos,
            sin,
            HEAD_DIM,
            HEAD_PAD,
            HALF,
            HALF_PAD,
            IS_INTERLEAVED,
        )
    else:
        heads = (part - tl.cdiv(HEADS, TILE)) * TILE + members
        slot = tl.load(slots + token).to(tl.int64)
        kept = (heads < KV_HEADS) & (slot >= 0)
        place = (slot // BLOCK_SIZE * KV_HEADS * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
        rotate_heads(
            k + token * k_stride,
            k_cache + place,
            heads,
            kept,
            HEAD_DIM,
            BLOCK_SIZE * HEAD_DIM,
            cos,
            sin,
            HEAD_DIM,
            HEAD_PAD,
            HALF,
            HALF_PAD,
            IS_INTERLEAVED,
        )
        features = tl.arange(0, HEAD_PAD)[None, :]
        copied = kept & (features < HEAD_DIM)
        value = tl.load(v + token * v_stride + heads * HEAD_DIM + features, mask=copied)
        tl.store(v_cache + place + heads * BLOCK_SIZE * HEAD_DIM + features, value, mask=copied)
