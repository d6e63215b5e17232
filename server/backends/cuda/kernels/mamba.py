# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""Mamba-2: convolution and recurrence, a launch each.

A program of the recurrence has a few rows of one head's memory in registers while its sequence's tokens pass, one after
the other; rows do not depend on each other. It is one warp, which waits for no other. Left out: the form of the paper
that sums chunks by matrix products, which would keep matrix units busy in prompts.

Shapes: T tokens, S sequences, C channels, N heads, G groups, P numbers of a head, d of a key.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.backends.cuda.kernels.convolution import Convolution, places_of, run_of
from server.backends.cuda.kernels.delta import AHEAD, softplus
from server.backends.protocol import MambaWeights, StepMeta
from server.backends.reference.mamba import StockMamba

TILE_NUMBERS = 2048  # of a memory, that a program has: 64 in each thread


class FusedMamba(StockMamba):
    """See `protocol.MambaRule`; the norm and the gates behind the recurrence are stock operators."""

    def __init__(self, weights: MambaWeights):
        super().__init__(weights)
        self._convolution = Convolution(weights.conv, weights.conv_bias, weights.kind.memory_size, is_gated=False)

    def __call__(self, zxbcdt: Tensor, state: Tensor, meta: StepMeta) -> Tensor:
        kind, weights, places = self._kind, self._weights, places_of(meta)
        mixed = self._convolution(zxbcdt[:, kind.inner :], state, meta)
        steps = zxbcdt[:, kind.inner + kind.channels :]
        read = zxbcdt.new_empty(len(zxbcdt), kind.num_heads, kind.head_dim, dtype=torch.float32)
        key_pad = triton.next_power_of_2(kind.key_dim)
        tile = max(min(triton.next_power_of_2(kind.head_dim), TILE_NUMBERS // key_pad), 1)
        _recur_mamba[(len(places["rows"]), kind.num_heads, triton.cdiv(kind.head_dim, tile))](
            *(mixed, steps, weights.decay, weights.step_bias, weights.skip, state, read),
            *(steps.stride(0), state.stride(0), kind.scales[-1], kind.least_step, kind.most_step),
            **places,
            HEADS=kind.num_heads,
            GROUPS=kind.num_groups,
            HEAD_DIM=kind.head_dim,
            KEY_DIM=kind.key_dim,
            KEY_PAD=key_pad,
            TILE=tile,
            num_warps=1,
        )
        return self._finished(read, zxbcdt[:, : kind.inner]).to(zxbcdt.dtype)


@triton.jit
def _recur_mamba(
    mixed,
    steps,
    decay,
    step_bias,
    skip,
    state,
    read,
    step_stride,
    state_stride,
    step_scale,
    least_step,
    most_step,
    rows,
    starts,
    positions,
    DECODES: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    values = tl.program_id(2) * TILE + tl.arange(0, TILE)
    keys = tl.arange(0, KEY_PAD)
    has_value, has_key = values < HEAD_DIM, keys < KEY_DIM
    first, last = run_of(sequence, starts, DECODES)
    if first < last:
        own = tl.load(rows + sequence) * state_stride + head * HEAD_DIM * KEY_DIM
        at = state + own + values[:, None] * KEY_DIM + keys[None, :]
        inside = has_value[:, None] & has_key[None, :]
        is_known = tl.load(positions + first) > 0
        memory = tl.load(at, mask=inside & is_known, other=0.0)
        speed, bias, measure = tl.load(decay + head), tl.load(step_bias + head), tl.load(skip + head)
        inner = HEADS * HEAD_DIM
        value_at = head * HEAD_DIM + values
        key_at = inner + (head // (HEADS // GROUPS)) * KEY_DIM + keys
        for token in tl.range(first, last, num_stages=AHEAD):
            channels = mixed + token * (inner + 2 * GROUPS * KEY_DIM)
            x = tl.load(channels + value_at, mask=has_value, other=0.0)
            k = tl.load(channels + key_at, mask=has_key, other=0.0)
            q = tl.load(channels + GROUPS * KEY_DIM + key_at, mask=has_key, other=0.0)
            said = tl.load(steps + token * step_stride + head).to(tl.float32)
            step = tl.minimum(tl.maximum(softplus(said * step_scale + bias), least_step), most_step)
            memory = memory * tl.exp(-speed * step) + (x * step)[:, None] * k[None, :]
            found = tl.sum(memory * q[None, :], axis=1) + measure * x
            tl.store(read + token * inner + value_at, found, mask=has_value)
        tl.store(at, memory, mask=inside)
