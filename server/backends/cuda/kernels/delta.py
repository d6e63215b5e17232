# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""The gated delta rule: convolution, recurrence, and what the next step's convolution begins with, a launch each.

A program of the recurrence has a few columns of one head's memory in registers while its sequence's tokens pass, one
after the other; columns do not depend on each other. Everything about a step is read on the device. Left out: the
chunked form of the paper, which would keep matrix units busy in prompts.

Shapes: T tokens, S sequences, C channels, N heads, K heads of keys, d features of a key, v of a value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.backends.protocol import DeltaWeights, StepMeta
from server.backends.reference.delta import TINY, StockDelta

CHANNEL_TILE = 512
COLUMNS = 32  # of a memory, that a program has


class FusedDelta(StockDelta):
    """See `protocol.DeltaRule`; the norm and the gates behind the recurrence are stock operators."""

    def __init__(self, weights: DeltaWeights):
        super().__init__(weights)
        self._conv = weights.conv.t().contiguous()

    def __call__(self, qkvz: Tensor, ba: Tensor, state: Tensor, meta: StepMeta) -> Tensor:
        assert meta.rows is not None, "steps of models with recurrent layers name their rows"
        kind, weights = self._kind, self._weights
        sequences, tokens = len(meta.rows), len(qkvz)
        decodes = sequences == meta.num_decodes  # then sequence s has token s
        mixed = torch.empty(tokens, kind.channels, dtype=torch.float32, device=qkvz.device)
        read = torch.empty(tokens, kind.num_heads, kind.value_dim, dtype=torch.float32, device=qkvz.device)
        places = (meta.rows, meta.rows if decodes else meta.starts, meta.positions)
        strides = (qkvz.stride(0), state.stride(0))
        sizes = {"CHANNELS": kind.channels, "TAPS": kind.conv, "MEMORY": kind.memory_size, "DECODES": decodes}
        tiles = triton.cdiv(kind.channels, CHANNEL_TILE)
        owners = meta.rows if decodes else meta.owners
        _convolve[(tokens, tiles)](
            qkvz, state, *places, owners, self._conv, mixed, *strides, **sizes, TILE=CHANNEL_TILE
        )
        _recur[(sequences, kind.num_heads, triton.cdiv(kind.value_dim, COLUMNS))](
            *(mixed, ba, weights.decay, weights.step_bias, state, *places, read, ba.stride(0), state.stride(0)),
            CHANNELS=kind.channels,
            HEADS=kind.num_heads,
            KEY_HEADS=kind.num_key_heads,
            KEY_DIM=kind.key_dim,
            KEY_PAD=triton.next_power_of_2(kind.key_dim),
            VALUE_DIM=kind.value_dim,
            SCALE=kind.key_dim**-0.5,
            TINY=TINY,
            DECODES=decodes,
            TILE=COLUMNS,
        )
        _remember[(sequences, tiles)](qkvz, state, *places, *strides, **sizes, TILE=CHANNEL_TILE)
        return self._gated(read, qkvz[:, kind.channels :]).to(qkvz.dtype)


@triton.jit
def _run_of(sequence, starts, DECODES: tl.constexpr):
    """Where a sequence's tokens begin and end in the step."""
    if DECODES:
        return sequence, sequence + 1
    return tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1).to(tl.int64)


@triton.jit
def _channels_at(
    qkvz, remembered, first, at, channels, seen, is_fresh, qkvz_stride, CHANNELS: tl.constexpr, TAPS: tl.constexpr
):
    """Channels of token `at` of a run that begins at token `first`; before the run, as they are remembered."""
    now = tl.load(qkvz + (first + at) * qkvz_stride + channels, mask=seen & (at >= 0), other=0).to(tl.float32)
    is_before = seen & (at < 0) & (is_fresh == 0)
    return now + tl.load(remembered + (TAPS - 1 + at) * CHANNELS + channels, mask=is_before, other=0)


@triton.jit
def _convolve(
    qkvz,
    state,
    rows,
    starts,
    positions,
    owners,
    conv,
    out,
    qkvz_stride,
    state_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    MEMORY: tl.constexpr,
    DECODES: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * TILE + tl.arange(0, TILE)
    seen = channels < CHANNELS
    owner = token
    if not DECODES:
        owner = tl.load(owners + token)
    first, _ = _run_of(owner, starts, DECODES)
    is_fresh = tl.load(positions + first) == 0
    remembered = state + tl.load(rows + owner) * state_stride + MEMORY
    total = tl.zeros([TILE], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        at = token - (TAPS - 1 - tap) - first
        x = _channels_at(qkvz, remembered, first, at, channels, seen, is_fresh, qkvz_stride, CHANNELS, TAPS)
        total += tl.load(conv + tap * CHANNELS + channels, mask=seen, other=0) * x
    tl.store(out + token * CHANNELS + channels, total * tl.sigmoid(total), mask=seen)


@triton.jit
def _recur(
    mixed,
    ba,
    decay,
    step_bias,
    state,
    rows,
    starts,
    positions,
    read,
    ba_stride,
    state_stride,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    TINY: tl.constexpr,
    DECODES: tl.constexpr,
    TILE: tl.constexpr,
):
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.program_id(2) * TILE + tl.arange(0, TILE)
    keys = tl.arange(0, KEY_PAD)
    has_column, has_key = columns < VALUE_DIM, keys < KEY_DIM
    first, last = _run_of(sequence, starts, DECODES)
    if first < last:
        own = tl.load(rows + sequence) * state_stride + head * KEY_DIM * VALUE_DIM
        at = state + own + keys[:, None] * VALUE_DIM + columns[None, :]
        inside = has_key[:, None] & has_column[None, :]
        is_known = tl.load(positions + first) > 0
        memory = tl.load(at, mask=inside & is_known, other=0.0)
        speed, bias = tl.load(decay + head), tl.load(step_bias + head)
        for token in range(first, last):
            channels = mixed + token * CHANNELS
            key_at = (head // (HEADS // KEY_HEADS)) * KEY_DIM + keys
            q = tl.load(channels + key_at, mask=has_key, other=0.0)
            k = tl.load(channels + KEY_HEADS * KEY_DIM + key_at, mask=has_key, other=0.0)
            q = q * (SCALE / tl.sqrt(tl.sum(q * q, axis=0) + TINY))
            k = k * (1.0 / tl.sqrt(tl.sum(k * k, axis=0) + TINY))
            value_at = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + columns
            value = tl.load(channels + value_at, mask=has_column, other=0.0)
            correction = tl.load(ba + token * ba_stride + head).to(tl.float32)
            fading = tl.load(ba + token * ba_stride + HEADS + head).to(tl.float32) + bias
            step = tl.where(fading > 20.0, fading, tl.log(1.0 + tl.exp(tl.minimum(fading, 20.0))))
            memory = memory * tl.exp(-speed * step)
            error = (value - tl.sum(memory * k[:, None], axis=0)) * tl.sigmoid(correction)
            memory += k[:, None] * error[None, :]
            out = read + (token * HEADS + head) * VALUE_DIM + columns
            tl.store(out, tl.sum(memory * q[:, None], axis=0), mask=has_column)
        tl.store(at, memory, mask=inside)


@triton.jit
def _remember(
    qkvz,
    state,
    rows,
    starts,
    positions,
    qkvz_stride,
    state_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    MEMORY: tl.constexpr,
    DECODES: tl.constexpr,
    TILE: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * TILE + tl.arange(0, TILE)
    seen = channels < CHANNELS
    first, last = _run_of(sequence, starts, DECODES)
    if first < last:
        is_fresh = tl.load(positions + first) == 0
        remembered = state + tl.load(rows + sequence) * state_stride + MEMORY
        for row in tl.static_range(TAPS - 1):  # a row takes what a later one held, or a token
            at = last - first - (TAPS - 1) + row
            x = _channels_at(qkvz, remembered, first, at, channels, seen, is_fresh, qkvz_stride, CHANNELS, TAPS)
            tl.store(remembered + row * CHANNELS + channels, x, mask=seen)
