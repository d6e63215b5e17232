# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""The score at which a row's tokens, best first, reach a count or a probability: a search instead of a sort.

A float32 becomes an integer of the same order, and the threshold is found four bits at a time: in each of eight passes,
a program for every part of every row sums up what lies at or above 15 candidates, and the next pass takes the largest
candidate that reaches what is wanted. What ranks have to tell each other between two passes are those sums. Of the
candidates, the largest integer whose sum reaches it is the score of a token, exactly; no token below it is needed.

Sums are of integers, or of float32 in an order that depends on shapes alone: even rounded, a larger candidate never has
a larger sum, and whoever repeats the search with the same shapes finds the same.

Shapes: R rows, V columns, P parts of a row on each rank, Q parts on all ranks, C candidates.
"""

from __future__ import annotations

import triton
import triton.language as tl

BITS = 4
PASSES = 32 // BITS
CANDIDATES = 1 << BITS
# Columns of a part, and of what a program sums up at once.
PART = 4096
TILE = 128

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
@triton.jit(do_not_specialize=["shift", "Q"], do_not_specialize_on_alignment=["prefixes"])
def sum_parts(
    scores,
    score_stride,
    logits,
    logit_stride,
    log_totals,
    wanted,
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
    as the pass before found them, followed by those that this one finds; sums_before: [Q, R, C] of that pass.
    """
    row, part, rows = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(0)
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


@triton.jit(do_not_specialize=["Q"], do_not_specialize_on_alignment=["prefixes"])
def finish(wanted, prefixes, sums, thresholds, Q, PARTS: tl.constexpr, C: tl.constexpr):
    """One row: the score that the last pass has found, in [R]."""
    row = tl.program_id(0).to(tl.int64)
    before = tl.load(prefixes + row + tl.arange(0, 1)).to(tl.uint32, bitcast=True)
    keys = _advance(before, sums, wanted, row, Q, 0, C, PARTS)
    tl.store(thresholds + row + tl.arange(0, 1), _unordered(keys))
