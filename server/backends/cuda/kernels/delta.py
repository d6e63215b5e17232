# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""The gated delta rule: convolution and recurrence, a launch each.

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

from server.backends.cuda.kernels.convolution import Convolution, places_of, run_of
from server.backends.protocol import DeltaWeights, StepMeta
from server.backends.reference.delta import TINY, StockDelta

COLUMNS = 32  # of a memory, that a program has
# Tokens, with the one that is computed, whose numbers are under way: the memory answers after longer than one takes.
AHEAD: tl.constexpr = tl.constexpr(3)


class FusedDelta(StockDelta):
    """See `protocol.DeltaRule`; the norm and the gates behind the recurrence are stock operators."""

    def __init__(self, weights: DeltaWeights):
        super().__init__(weights)
        self._convolution = Convolution(weights.conv, None, weights.kind.memory_size, is_gated=False)

    def __call__(self, qkvz: Tensor, ba: Tensor, state: Tensor, meta: StepMeta) -> Tensor:
        kind, weights, places = self._kind, self._weights, places_of(meta)
        mixed = self._convolution(qkvz, state, meta)
        read = torch.empty(len(qkvz), kind.num_heads, kind.value_dim, dtype=torch.float32, device=qkvz.device)
        _recur[(len(places["rows"]), kind.num_heads, triton.cdiv(kind.value_dim, COLUMNS))](
            *(mixed, ba, weights.decay, weights.step_bias, state, read, ba.stride(0), state.stride(0)),
            **places,
            CHANNELS=kind.channels,
            HEADS=kind.num_heads,
            KEY_HEADS=kind.num_key_heads,
            KEY_DIM=kind.key_dim,
            KEY_PAD=triton.next_power_of_2(kind.key_dim),
            VALUE_DIM=kind.value_dim,
            SCALE=kind.key_dim**-0.5,
            TINY=TINY,
            TILE=COLUMNS,
        )
        return self._gated(read, qkvz[:, kind.channels :]).to(qkvz.dtype)


@triton.jit
def softplus(x):
    """log(1 + e^x)"""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _recur(
    mixed,
    ba,
    decay,
    step_bias,
    state,
    read,
    ba_stride,
    state_stride,
    rows,
    starts,
    positions,
    DECODES: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    TINY: tl.constexpr,
    TILE: tl.constexpr,
):
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.program_id(2) * TILE + tl.arange(0, TILE)
    keys = tl.arange(0, KEY_PAD)
    has_column, has_key = columns < VALUE_DIM, keys < KEY_DIM
    first, last = run_of(sequence, starts, DECODES)
    if first < last:
        own = tl.load(rows + sequence) * state_stride + head * KEY_DIM * VALUE_DIM
        at = state + own + keys[:, None] * VALUE_DIM + columns[None, :]
        inside = has_key[:, None] & has_column[None, :]
        is_known = tl.load(positions + first) > 0
        memory = tl.load(at, mask=inside & is_known, other=0.0)
        speed, bias = tl.load(decay + head), tl.load(step_bias + head)
        for token in tl.range(first, last, num_stages=AHEAD):
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
            memory = memory * tl.exp(-speed * softplus(fading))
            error = (value - tl.sum(memory * k[:, None], axis=0)) * tl.sigmoid(correction)
            memory += k[:, None] * error[None, :]
            out = read + (token * HEADS + head) * VALUE_DIM + columns
            tl.store(out, tl.sum(memory * q[:, None], axis=0), mask=has_column)
        tl.store(at, memory, mask=inside)
