# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""What a program makes of codes before it multiplies: numbers in the dtype of the matrix units, in its registers.

How codes lie in memory: `server/backends/cuda/packing.py`. What becomes of the products: `packed.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widened(
    raw,
    zeros,
    levels,
    NUMBER: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    ZERO: tl.constexpr,
    dtype: tl.constexpr,
):
    """[FEATURES, PART]: what the codes of a part stand for but for their scale, as the matrix units take it.

    A word has two codes of each part, 16 bits apart. Put behind the bits of a number of which they are the last places
    (128 in bfloat16, 1024 in float16), they are that number plus the code, which costs no conversion.
    """
    HAS_BASE: tl.constexpr = BITS < 8 and dtype.primitive_bitwidth == 16 and levels is None
    BASE: tl.constexpr = (128 if dtype == tl.bfloat16 else 1024) if HAS_BASE else 0
    codes = raw
    if BITS < 8:
        pairs = (raw >> (NUMBER * BITS)) & (((1 << BITS) - 1) * 0x10001)
        if HAS_BASE:
            pairs = pairs | (0x43004300 if dtype == tl.bfloat16 else 0x64006400)
        codes = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)).reshape(raw.shape[0], 2 * WORDS)
    if HAS_BASE:
        value = codes.to(dtype, bitcast=True)
    elif levels is not None:
        # Not loaded by their codes: then the pipeline would load nothing ahead.
        table = tl.load(levels + tl.arange(0, 1 << BITS))[None, :]
        value = tl.gather(tl.broadcast_to(table, (raw.shape[0], 1 << BITS)), codes.to(tl.int32), axis=1)
    else:
        value = codes.to(dtype)
    if HAS_ZERO:
        value -= (zeros.to(tl.float32) + BASE).to(dtype)[:, None]
    elif ZERO + BASE != 0:
        value -= ZERO + BASE
    return value


@triton.jit
def ones(FEATURES: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """[FEATURES, PART], made of words as codes are: otherwise both products want the inputs in different layouts."""
    if BITS < 8 and dtype.primitive_bitwidth == 16:
        pairs = tl.full((FEATURES, WORDS), 0x3F803F80 if dtype == tl.bfloat16 else 0x3C003C00, tl.int32)
        both = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)).reshape(FEATURES, 2 * WORDS)
        return both.to(dtype, bitcast=True)
    else:
        return tl.full((FEATURES, 2 * WORDS), 1.0, dtype)


@triton.jit
def plus_product(left, columns, sums, IMPRECISE: tl.constexpr):
    """sums + left @ columns: of integers exactly, of float8 with at most IMPRECISE sums in the matrix units' own."""
    if left.dtype == tl.float8e4nv:
        return tl.dot(left, columns, sums, max_num_imprecise_acc=IMPRECISE)
    else:
        return tl.dot(left, columns, sums, input_precision="ieee", out_dtype=sums.dtype)
