# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""Scatter a step's keys and values into the paged cache.

Shapes: T tokens, K local kv heads, H head dim, B blocks, P tokens per block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from server.backends.cuda.kernels.codes import Stored, code_offsets, scale_offsets, store_row
from server.backends.cuda.kernels.common import padded
from server.quantisation.kv import AS_COMPUTED, KvFormat

# Elements of a program's tile: 8 KiB in 16 bits, two 16-byte accesses for each of 128 threads and each of k and v.
TILE_ELEMENTS = 2048


def store(kv: Tensor, k: Tensor, v: Tensor, slots: Tensor, *, first: int = 0, format: KvFormat = AS_COMPUTED) -> None:
    """Write k and v [T, K, H] to `slots` [T] (block * P + offset) of kv [2, B, K, P, W].

    A slot below 0 is nowhere: the padding of a captured batch. Tokens before `first` are left alone.
    """
    kv_heads, head_dim = k.shape[1:]
    stored = Stored.of(kv, format)
    assert k.stride()[1:] == v.stride()[1:] == (head_dim, 1)
    head_pad = padded(head_dim)
    heads = min(triton.next_power_of_2(kv_heads), TILE_ELEMENTS // head_pad)
    _store[(len(k) - first, triton.cdiv(kv_heads, heads))](
        k,
        v,
        stored.keys,
        stored.values,
        stored.key_scales,
        stored.value_scales,
        *format.scales,
        slots,
        first,
        k.stride(0),
        v.stride(0),
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        HEADS=heads,
        **stored.constants,
    )


@triton.jit(do_not_specialize=["first"])
def _store(
    k,
    v,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    k_divisor,
    v_divisor,
    slots,
    first,
    k_stride,
    v_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    KIND: tl.constexpr,
):
    """One token, HEADS of its kv heads."""
    token = first + tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    features = tl.arange(0, HEAD_PAD)[None, :]
    slot = tl.load(slots + token).to(tl.int64)
    kept_rows = (heads < KV_HEADS) & (slot >= 0)
    kept = kept_rows & (features < HEAD_DIM)
    block = slot // BLOCK_SIZE
    source = heads * HEAD_DIM + features
    target = code_offsets(block, slot, heads, KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, HEAD_DIM) + features
    scales = scale_offsets(block, slot, heads, KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, HEAD_DIM)
    key = tl.load(k + token * k_stride + source, mask=kept, other=0.0)
    value = tl.load(v + token * v_stride + source, mask=kept, other=0.0)
    store_row(key, k_cache, k_scales, target, scales, kept, kept_rows, k_divisor, KIND, 1)
    store_row(value, v_cache, v_scales, target, scales, kept, kept_rows, v_divisor, KIND, 1)
