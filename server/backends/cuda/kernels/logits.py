# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""The best tokens of each row of logits, the log of the sum of all exponentials, and who wins an exponential race.

Each is found in two launches: a program for every part of every row, which reads it once, and one for each row, which
compares what the parts found. Logits are read as they are, 16 bits or 32, and become float32 in registers. Nothing is
added atomically, so that a launch gives the same to the last bit however often it is repeated.

Noise is the function of (seed, position, token) that `server/backends/reference/logits.py` defines, in 32-bit integers
that wrap: its integers are the same, its logarithms are equal but for rounding.

Shapes: R rows, V columns, P parts of a row, n best tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of a part, all of them in registers: 16 for each thread of 8 warps.
PART = 4096
PART_WARPS = 8

_NEVER = tl.constexpr(float("-inf"))
_BEYOND = tl.constexpr(0x7FFFFFFF)  # an id behind every other


@triton.jit
def _best(values, ids):
    """The largest of the values and the smallest of its ids."""
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, ids, _BEYOND), axis=0)


@triton.jit(do_not_specialize=["n"])
def summarise_parts(logits, row_stride, best_values, best_ids, totals, V, n, PART: tl.constexpr):
    """One part: its n best tokens in [R, P, n], and in [R, P] the sum of exp(logit - the best one)."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    ids = part * PART + tl.arange(0, PART)
    values = tl.load(logits + row * row_stride + ids, mask=ids < V, other=_NEVER).to(tl.float32)
    place = row * parts + part
    best, id = _best(values, ids)
    exponentials = tl.exp(values - tl.maximum(best, -3.0e38))  # of a part without a token, 0
    tl.store(totals + place, tl.sum(exponentials, axis=0))
    tl.store(best_values + place * n, best)
    tl.store(best_ids + place * n, id)
    for i in range(1, n):
        values = tl.where(ids == id, _NEVER, values)
        best, id = _best(values, ids)
        tl.store(best_values + place * n + i, best)
        tl.store(best_ids + place * n + i, id)


@triton.jit
def summarise_rows(
    best_values,
    best_ids,
    totals,
    top_values,
    top_ids,
    log_totals,
    V,
    P,
    n,
    PARTS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """One row: the n best of its parts' candidates, in [R, n], and the log of the sum of all exponentials, in [R]."""
    row = tl.program_id(0).to(tl.int64)
    candidates = tl.arange(0, CANDIDATES)
    values = tl.load(best_values + row * P * n + candidates, mask=candidates < P * n, other=_NEVER)
    ids = tl.load(best_ids + row * P * n + candidates, mask=candidates < P * n, other=_BEYOND)
    best, id = _best(values, ids)
    parts = tl.arange(0, PARTS)
    part_totals = tl.load(totals + row * P + parts, mask=parts < P, other=0.0)
    part_bests = tl.load(best_values + (row * P + parts) * n, mask=parts < P, other=_NEVER)
    total = tl.sum(part_totals * tl.exp(part_bests - tl.maximum(best, -3.0e38)), axis=0)
    tl.store(log_totals + row, best + tl.log(total))
    for i in range(n):
        # Where less than n are left, and where logits are no numbers, any token will do that exists.
        tl.store(top_values + row * n + i, best)
        tl.store(top_ids + row * n + i, tl.minimum(id, V - 1).to(tl.int64))
        values = tl.where(ids == id, _NEVER, values)
        best, id = _best(values, ids)


@triton.jit
def _mix(x):
    """A bijection of 32 bits with full avalanche; x: uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _log_noise(tokens, key):
    """The log of Exp(1) noise of tokens (uint32) under a key (uint32)."""
    bits = _mix(_mix(tokens * 0x9E3779B9 ^ key) ^ _mix(key + 1))
    # A u that is rounded to 1 would make the noise infinite: who alone is left could lose to those that are removed.
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)  # 2^-32, 1 - 2^-24
    # log(1 - u) by way of the rounded 1 - u and of what the rounding took away.
    remaining = 1.0 - uniform
    return tl.log(-(tl.log(remaining) + ((1.0 - remaining) - uniform) / remaining))


@triton.jit
def _key(seed_low, seed_high, positions, row):
    """What the noise of a row depends on, beside the token."""
    position = tl.load(positions + row).to(tl.uint32)
    low, high = tl.load(seed_low + row).to(tl.uint32), tl.load(seed_high + row).to(tl.uint32)
    return _mix(low ^ _mix(high ^ _mix(position)))


@triton.jit
def race_parts(logits, row_stride, seed_low, seed_high, positions, first_id, scores, columns, V, PART: tl.constexpr):
    """One part: its best score, a logit minus the log of its noise, and where it is, in [R, P]."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    ids = part * PART + tl.arange(0, PART)
    values = tl.load(logits + row * row_stride + ids, mask=ids < V, other=_NEVER).to(tl.float32)
    key = _key(seed_low, seed_high, positions, row)
    best, column = _best(values - _log_noise((first_id + ids).to(tl.uint32), key), ids)
    tl.store(scores + row * parts + part, best)
    tl.store(columns + row * parts + part, column)


@triton.jit
def race_rows(scores, columns, winners, V, P, PARTS: tl.constexpr):
    """One row: the column of its best score, in [R] int64."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    values = tl.load(scores + row * P + parts, mask=parts < P, other=_NEVER)
    _, column = _best(values, tl.load(columns + row * P + parts, mask=parts < P, other=_BEYOND))
    tl.store(winners + row, tl.minimum(column, V - 1).to(tl.int64))


@triton.jit
def noise_rows(seed_low, seed_high, positions, token_ids, noise):
    """One row: the log of the noise of one token, in [R]."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    tokens = tl.load(token_ids + row).to(tl.uint32)
    tl.store(noise + row, _log_noise(tokens, _key(seed_low, seed_high, positions, row)))
