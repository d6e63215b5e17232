# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""Scatter a step's keys and values into the paged cache.

Shapes: T tokens, K local kv heads, H head dim, B blocks, P tokens per block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from server.backends.cuda.kernels.common import padded

# Elements of a program's tile: 8 KiB in 16 bits, two 16-byte accesses for each of 128 threads and each of k and v.
TILE_ELEMENTS = 2048


def store(kv: Tensor, k: Tensor, v: Tensor, slots: Tensor, *, first: int = 0) -> None:
    """Write k and v [T, K, H] to `slots` [T] (block * P + offset) of kv [2, B, K, P, H].

    A slot below 0 is nowhere: the padding of a captured batch. Tokens before `first` are left alone.
    """
    _, _, kv_heads, block_size, head_dim = kv.shape
    assert kv.is_contiguous() and k.stride()[1:] == v.stride()[1:] == (head_dim, 1)
    head_pad = padded(head_dim)
    heads = min(triton.next_power_of_2(kv_heads), TILE_ELEMENTS // head_pad)
    _store[(len(k) - first, triton.cdiv(kv_heads, heads))](
        k,
        v,
        kv[0],
        kv[1],
        slots,
        first,
        k.stride(0),
        v.stride(0),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        BLOCK_SIZE=block_size,
        HEADS=heads,
    )


@triton.jit(do_not_specialize=["first"])
def _store(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    first,
    k_stride,
    v_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One token, HEADS of its kv heads."""
    token = first + tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    features = tl.arange(0, HEAD_PAD)[None, :]
    slot = tl.load(slots + token).to(tl.int64)
    kept = (heads < KV_HEADS) & (features < HEAD_DIM) & (slot >= 0)
    rows = (slot // BLOCK_SIZE * KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
    source, target = heads * HEAD_DIM + features, rows * HEAD_DIM + features
    tl.store(k_cache + target, tl.load(k + token * k_stride + source, mask=kept), mask=kept)
    tl.store(v_cache + target, tl.load(v + token * v_stride + source, mask=kept), mask=kept)
