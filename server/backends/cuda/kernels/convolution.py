# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""Causal convolutions over few tokens, whose last inputs a sequence's state remembers: one launch, of all tokens.

A program for each sequence has what touches its state: the first tokens, which see what is remembered, and then what
the next step's begin with. Every other token has a program of its own. Everything about a step is read on the device.

Shapes: T tokens, S sequences, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.backends.protocol import ShortConvWeights, StepMeta

TILE = 512  # channels of a program


def places_of(meta: StepMeta) -> dict[str, Any]:
    """What a recurrence's kernels are told of a step; where all sequences decode, sequence s has token s."""
    assert meta.rows is not None, "steps of models with recurrent layers name their rows"
    decodes = len(meta.rows) == meta.num_decodes
    starts = meta.rows if decodes else meta.starts
    return {"rows": meta.rows, "starts": starts, "positions": meta.positions, "DECODES": decodes}


class Convolution:
    """Convolves for one layer. See `_convolve`.

    filters: [C, tokens] float32, the latest token last; bias: [C]; memory: where in a state its inputs begin.
    """

    def __init__(self, filters: Tensor, bias: Tensor | None, memory: int, *, is_gated: bool):
        self._channels, self._taps = filters.shape
        self._filters, self._bias = filters.t().contiguous(), bias
        self._memory = memory
        self._is_gated = is_gated

    def __call__(self, x: Tensor, state: Tensor, meta: StepMeta) -> Tensor:
        """x [T, C or more] → silu(convolved x) [T, C] in float32; gated: c * convolved(b * x) in x's dtype."""
        places, (tokens, _) = places_of(meta), x.shape
        sequences, decodes = len(places["rows"]), places["DECODES"]
        out = x.new_empty(tokens, self._channels, dtype=x.dtype if self._is_gated else torch.float32)
        _convolve[(sequences if decodes else sequences + tokens, triton.cdiv(self._channels, TILE))](
            *(x, state, self._filters, self._bias, out, sequences, x.stride(0), state.stride(0)),
            owners=places["rows"] if decodes else meta.owners,
            **places,
            CHANNELS=self._channels,
            TAPS=self._taps,
            FIRST_TAPS=max(self._taps - 1, 1),
            MEMORY=self._memory,
            IS_GATED=self._is_gated,
            TILE=TILE,
        )
        return out


class FusedShortConv:
    """See `protocol.ConvRule`."""

    def __init__(self, weights: ShortConvWeights):
        self._convolution = Convolution(weights.conv, weights.bias, 0, is_gated=True)

    def __call__(self, bcx: Tensor, state: Tensor, meta: StepMeta) -> Tensor:
        return self._convolution(bcx, state, meta)


@triton.jit
def run_of(sequence, starts, DECODES: tl.constexpr):
    """Where a sequence's tokens begin and end in the step."""
    if DECODES:
        return sequence, sequence + 1
    return tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1).to(tl.int64)


@triton.jit
def _input_at(
    x, past, at, channels, seen, is_fresh, CHANNELS: tl.constexpr, TAPS: tl.constexpr, IS_GATED: tl.constexpr, stride
):
    """What token `at` of a run gives to the convolution; before the run, what is remembered. x: the run's first."""
    is_own = seen & (at >= 0)
    own = tl.load(x + at * stride + channels, mask=is_own, other=0).to(tl.float32)
    if IS_GATED:
        own *= tl.load(x + at * stride + 2 * CHANNELS + channels, mask=is_own, other=0).to(tl.float32)
    is_before = seen & (at < 0) & (is_fresh == 0)
    return own + tl.load(past + (TAPS - 1 + at) * CHANNELS + channels, mask=is_before, other=0)


@triton.jit
def _convolve_token(
    x,
    past,
    filters,
    bias,
    out,
    at,
    channels,
    seen,
    is_fresh,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    IS_GATED: tl.constexpr,
    stride,
):
    """Token `at` of a run; x, out: of the run's first."""
    total = tl.zeros([channels.shape[0]], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        before = _input_at(x, past, at - (TAPS - 1 - tap), channels, seen, is_fresh, CHANNELS, TAPS, IS_GATED, stride)
        total += tl.load(filters + tap * CHANNELS + channels, mask=seen, other=0) * before
    if bias is not None:
        total += tl.load(bias + channels, mask=seen, other=0)
    if IS_GATED:
        total *= tl.load(x + at * stride + CHANNELS + channels, mask=seen, other=0).to(tl.float32)
    else:
        total *= tl.sigmoid(total)
    tl.store(out + at * CHANNELS + channels, total.to(out.dtype.element_ty), mask=seen)


@triton.jit(do_not_specialize=["sequences"])
def _convolve(
    x,
    state,
    filters,
    bias,
    out,
    sequences,
    stride,
    state_stride,
    owners,
    rows,
    starts,
    positions,
    DECODES: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    FIRST_TAPS: tl.constexpr,
    MEMORY: tl.constexpr,
    IS_GATED: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * TILE + tl.arange(0, TILE)
    seen = channels < CHANNELS
    owner = program
    if not DECODES:
        if program >= sequences:
            owner = tl.load(owners + program - sequences).to(tl.int64)
    first, last = run_of(owner, starts, DECODES)
    if first < last:
        is_fresh = tl.load(positions + first) == 0
        past = state + tl.load(rows + owner) * state_stride + MEMORY
        own, to = x + first * stride, out + first * CHANNELS
        if program >= sequences:
            at = program - sequences - first
            if at >= FIRST_TAPS:
                _convolve_token(
                    own, past, filters, bias, to, at, channels, seen, is_fresh, CHANNELS, TAPS, IS_GATED, stride
                )
        else:
            for at in tl.static_range(FIRST_TAPS):
                if at < last - first:
                    _convolve_token(
                        own, past, filters, bias, to, at, channels, seen, is_fresh, CHANNELS, TAPS, IS_GATED, stride
                    )
            tl.debug_barrier()  # what is remembered was read
            for row in tl.static_range(TAPS - 1):  # a row takes what a later one held, or a token
                at_row = last - first - (TAPS - 1) + row
                kept = _input_at(own, past, at_row, channels, seen, is_fresh, CHANNELS, TAPS, IS_GATED, stride)
                tl.store(past + row * CHANNELS + channels, kept, mask=seen)
