# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""The KV cache of the attention kernels: a step's keys and values are scattered into it, as computed or in bytes.

`store` takes those of any step. A decode's own token is stored by the program that attends with it, and kept in
registers (`store_new`). In bytes, rows are made codes, and codes numbers (`server/quantisation/kv.py`). Integers do
both, so that every GPU takes both kinds of float8, and that all round alike. A row's scale in int8 is bfloat16, kept
as bits. Where a cache is as computed, no codes are made.

Shapes: T tokens, K local kv heads, H head dim, B blocks, P tokens per block, W bytes that a row takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.backends.cuda.kernels.common import padded
from server.backends.cuda.kernels.rotate import load_rotated
from server.quantisation.kv import AS_COMPUTED, Float8E4M3, Float8E5M2, Int8, KvFormat

PLAIN, INT8, E4M3, E5M2 = (tl.constexpr(kind) for kind in range(4))
KINDS: Mapping[str, tl.constexpr] = {
    AS_COMPUTED.name: PLAIN, Int8.name: INT8, Float8E4M3.name: E4M3, Float8E5M2.name: E5M2,
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A cache as kernels take it: rows of H elements, and where they have scales of their own, those."""

    keys: Tensor  # [B, K, P * W]
    values: Tensor
    key_scales: Tensor | None  # the same memory, as the bits of bfloat16
    value_scales: Tensor | None
    block_size: int
    kv_heads: int
    format: KvFormat

    @classmethod
    def of(cls, kv: Tensor, format: KvFormat) -> Stored:
        """The cache kv [2, B, K, P, W]."""
        assert kv.is_contiguous()
        _, _, kv_heads, block_size, _ = kv.shape
        keys, values = kv.flatten(3)
        if format.name != Int8.name:
            return cls(keys, values, None, None, block_size, kv_heads, format)
        return cls(keys, values, keys.view(torch.int16), values.view(torch.int16), block_size, kv_heads, format)

    @property
    def constants(self) -> dict[str, int]:
        """What a kernel is compiled for: BLOCK_STRIDE counts elements from one head's block to the next."""
        return {
            "KV_HEADS": self.kv_heads,
            "BLOCK_SIZE": self.block_size,
            "BLOCK_STRIDE": self.keys.shape[2],
            "KIND": KINDS[self.format.name].value,
        }


@triton.jit
def code_offsets(
    blocks, keys, kv_head, KV_HEADS, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Where the rows of one kv head's `keys`, which are in `blocks`, begin."""
    if BLOCK_STRIDE == BLOCK_SIZE * HEAD_DIM:  # the same in fewer registers
        return ((blocks.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE) * HEAD_DIM
    return (blocks.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_STRIDE + keys % BLOCK_SIZE * HEAD_DIM


@triton.jit
def scale_offsets(blocks, keys, kv_head, KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, HEAD_DIM):
    """Where their scales are: behind all codes of their block."""
    block = (blocks.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_STRIDE + BLOCK_SIZE * HEAD_DIM
    return block // 2 + keys % BLOCK_SIZE


@triton.jit
def load_scales(scales, offsets, seen):
    """Scales of int8; 0 where nothing is seen, and where none was ever stored."""
    bits = tl.load(scales + offsets, mask=seen, other=0).to(tl.int32) << 16
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def numbers(codes, KIND: tl.constexpr):
    """What codes stand for, in float32; what is no code is taken for a number."""
    if KIND == PLAIN:
        return codes.to(tl.float32)
    if KIND == INT8:
        return codes.to(tl.int8, bitcast=True).to(tl.float32)
    if KIND == E4M3:
        # As float16, whose exponents are larger by 8.
        bits = codes.to(tl.uint16)
        return ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def divided(x, divisor):
    """x / divisor, rounded to nearest as elsewhere: the plain division is not."""
    return tl.div_rn(x.to(tl.float32), (tl.zeros_like(x) + divisor).to(tl.float32))


@triton.jit
def _round_even(x):
    """To the nearest integer, ties to even: adding 1.5 * 2^23 leaves no bits for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def codes_of(x, KIND: tl.constexpr):
    """The codes of float32, already divided by its scale, saturated; of NaN, that of 0."""
    x = tl.where(x == x, x, 0.0)
    if KIND == INT8:
        x = tl.minimum(tl.maximum(x, -127.0), 127.0)
        return _round_even(x).to(tl.int32).to(tl.int8).to(tl.uint8, bitcast=True)
    MANTISSA: tl.constexpr = 3 if KIND == E4M3 else 2
    BIAS: tl.constexpr = 120 if KIND == E4M3 else 112  # what its exponents lack to those of float32
    LARGEST: tl.constexpr = 448.0 if KIND == E4M3 else 57344.0
    SMALLEST: tl.constexpr = 2.0**-6 if KIND == E4M3 else 2.0**-14  # of the numbers with a whole mantissa
    STEPS: tl.constexpr = 2.0**9 if KIND == E4M3 else 2.0**16  # of one, that those below it count in
    DROPPED: tl.constexpr = 23 - MANTISSA
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), LARGEST)
    bits = size.to(tl.uint32, bitcast=True)
    normal = ((bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) >> DROPPED) - (BIAS << MANTISSA)
    small = _round_even(tl.minimum(size, SMALLEST) * STEPS).to(tl.int32).to(tl.uint32, bitcast=True)
    return (sign | tl.where(size < SMALLEST, small, normal)).to(tl.uint8)


@triton.jit
def row_scales(x, AXIS: tl.constexpr):
    """The bits of the scales of rows in int8 along AXIS, and the scales in float32, both of one element there."""
    size = tl.minimum(tl.abs(tl.where(x == x, x, 0.0)), 1.7014118346046923e38)  # 2^127: what is read stays finite
    bits = divided(tl.max(size, axis=AXIS, keep_dims=True), 127.0).to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.to(tl.int16), (rounded << 16).to(tl.float32, bitcast=True)


@triton.jit
def store_row(
    x, cache, scales, offsets, scale_offsets, kept, kept_rows, divisor, KIND: tl.constexpr, AXIS: tl.constexpr
):
    """Store rows x, whose features lie along AXIS, where they are `kept`; returns what is read of them, in float32.

    divisor: the layer's scale of float8.
    """
    if KIND == PLAIN:
        tl.store(cache + offsets, x.to(cache.dtype.element_ty), mask=kept)
        return x.to(tl.float32)
    x = x.to(tl.float32)
    if KIND == INT8:
        bits, scale = row_scales(x, AXIS)
        codes = codes_of(divided(x, tl.maximum(scale, 1.1754944e-38)), KIND)
        tl.store(cache + offsets, codes, mask=kept)
        tl.store(scales + scale_offsets, bits, mask=kept_rows)
        return numbers(codes, KIND) * scale
    codes = codes_of(divided(x, divisor), KIND)
    tl.store(cache + offsets, codes, mask=kept)
    return numbers(codes, KIND)


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
    sequence,
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
