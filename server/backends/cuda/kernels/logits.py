# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""Of each row of logits: the best tokens, the log of the sum of all exponentials, a race's winner, and thresholds.

The first three are each found in two launches: a program for every part of every row, which reads it once, and one for
each row, which compares what the parts found. Logits are read as they are, 16 bits or 32, and become float32 in
registers. Nothing is added atomically, so that a launch gives the same to the last bit however often it is repeated.

Noise is the function of (seed, position, token) that `server/backends/reference/logits.py` defines, in 32-bit integers
that wrap: its integers are the same, its logarithms are equal but for rounding.

The score at which a row's tokens, best first, reach a count or a probability is searched instead of sorted for. A
float32 becomes an integer of the same order, and the threshold is found four bits at a time: in each of eight passes, a
program for every part of every row sums up what lies at or above 15 candidates, and the next pass takes the largest
candidate that reaches what is wanted. What ranks have to tell each other between two passes are those sums. Of the
candidates, the largest integer whose sum reaches it is the score of a token, exactly; no token below it is needed. Sums
are of integers, or of float32 in an order that depends on shapes alone: even rounded, a larger candidate never has a
larger sum, and whoever repeats the search with the same shapes finds the same.

Shapes: R rows, V columns, P parts of a row on each rank, Q parts on all ranks, n best tokens, C candidates.
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


@triton.jit(do_not_specialize=["n"])
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


BITS = 4
PASSES = 32 // BITS
CANDIDATES = 1 << BITS
# Columns of a part of a search, and of what a program sums up at once.
SEARCH_PART = 4096
SEARCH_TILE = 128

_LOWEST = tl.constexpr(0x007FFFFF)  # minus infinity: what does not reach what is wanted keeps all tokens


@triton.jit
def _ordered(values):
    """float32 → uint32 of the same order."""
    bits = values.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)


@triton.jit
def _unordered(keys):
    """What `_ordered` was made from."""
    keys = tl.maximum(keys, _LOWEST).to(tl.uint32)
    bits = tl.where(keys >= 0x80000000, keys ^ 0x80000000, keys ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _advance(prefix, sums, wanted, row, Q, shift, C: tl.constexpr, PARTS: tl.constexpr):
    """The prefix, with the bits that the pass at `shift` has found: sums [Q, R, C] of the parts of all ranks."""
    rows = tl.num_programs(0)
    parts, candidates = tl.arange(0, PARTS)[:, None], tl.arange(0, C)[None, :]
    places = (parts.to(tl.int64) * rows + row) * C + candidates
    total = tl.sum(tl.load(sums + places, mask=parts < Q, other=0), axis=0, keep_dims=True)
    reached = (total >= tl.load(wanted + row)) & (candidates > 0)
    return prefix + (tl.sum(reached.to(tl.int32), axis=1).to(tl.uint32) << shift)


# A row of `prefixes` begins wherever R puts it: a step of another size must not wait for another compilation.
@triton.jit(do_not_specialize=["everything", "shift", "Q"], do_not_specialize_on_alignment=["prefixes"])
def sum_parts(
    scores,
    score_stride,
    logits,
    logit_stride,
    log_totals,
    wanted,
    everything,
    prefixes,
    sums_before,
    sums,
    shift,
    V,
    Q,
    PARTS: tl.constexpr,
    C: tl.constexpr,
    BITS: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
):
    """One part in one pass: how many tokens score no less than each candidate, or how probable they are, in [P, R, C].

    Candidates are the prefix that earlier passes have found, with every value of the bits at `shift`. prefixes: [R]
    as the pass before found them, followed by those that this one finds; sums_before: [Q, R, C] of that pass. A row
    that wants everything is left out.
    """
    row, part, rows = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(0)
    if tl.load(wanted + row) >= everything:
        return
    prefix = tl.zeros([1], tl.uint32)
    if shift < 32 - BITS:
        before = tl.load(prefixes + row + tl.arange(0, 1)).to(tl.uint32, bitcast=True)
        prefix = _advance(before, sums_before, wanted, row, Q, shift + BITS, C, PARTS)
    if part == 0:
        tl.store(prefixes + rows + row + tl.arange(0, 1), prefix.to(tl.int32, bitcast=True))
    candidates = (prefix + (tl.arange(0, C).to(tl.uint32) << shift))[:, None]
    total = tl.zeros([C, TILE], sums.dtype.element_ty)
    for start in range(0, PART, TILE):
        columns = part * PART + start + tl.arange(0, TILE)
        real = columns < V
        score = tl.load(scores + row * score_stride + columns, mask=real, other=float("-inf"))
        reaches = _ordered(score)[None, :] >= candidates
        if log_totals is None:
            total += reaches.to(tl.int32)
        else:
            logit = tl.load(logits + row * logit_stride + columns, mask=real, other=float("-inf"))
            probability = tl.exp(logit - tl.load(log_totals + row))
            total += tl.where(reaches, probability[None, :], 0.0)
    place = (part.to(tl.int64) * rows + row) * C + tl.arange(0, C)
    tl.store(sums + place, tl.sum(total, axis=1))


@triton.jit(do_not_specialize=["everything", "Q"], do_not_specialize_on_alignment=["prefixes"])
def finish(wanted, everything, prefixes, sums, thresholds, Q, PARTS: tl.constexpr, C: tl.constexpr):
    """One row: the score that the last pass has found, in [R]; minus infinity where everything is wanted."""
    row = tl.program_id(0).to(tl.int64)
    before = tl.load(prefixes + row + tl.arange(0, 1)).to(tl.uint32, bitcast=True)
    keys = _advance(before, sums, wanted, row, Q, 0, C, PARTS)
    keys = tl.where(tl.load(wanted + row) >= everything, _LOWEST, keys).to(tl.uint32)
    tl.store(thresholds + row + tl.arange(0, 1), _unordered(keys))
