"""Mamba-2 in stock torch operators, one token after the other: what defines correct.

Left out: the form of the paper that sums chunks by matrix products, as in `delta.py`.

Shapes: T tokens in the step, n sequences that have L tokens each, N heads, G groups, P numbers of a head, d of a key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from server.arch.recurrences import GateNorm
from server.backends.protocol import MambaWeights, StepMeta
from server.backends.reference.convolution import convolve, groups, rows_of
from server.backends.reference.functions import silu, softplus


class StockMamba:
    """See `protocol.MambaRule`."""

    def __init__(self, weights: MambaWeights):
        self._weights = weights
        self._kind = weights.kind

    def __call__(self, zxbcdt: Tensor, state: Tensor, meta: StepMeta) -> Tensor:
        kind, weights = self._kind, self._weights
        gates, channels, steps = zxbcdt.split([kind.inner, kind.channels, kind.num_heads], dim=1)
        memories, past = state.split([kind.memory_size, kind.state_size - kind.memory_size], dim=1)
        mixed = silu(convolve(channels, weights.conv, weights.conv_bias, past, meta))
        steps = softplus(steps.float() * kind.scales[-1] + weights.step_bias).clamp(kind.least_step, kind.most_step)
        x, b, c = mixed.split([kind.inner, kind.keys, kind.keys], dim=1)
        x = x.unflatten(1, (kind.num_heads, kind.head_dim))
        inputs = (x * steps.unsqueeze(2), self._of_each_head(b), self._of_each_head(c), (-weights.decay * steps).exp())
        read = torch.empty_like(x)
        for sequences, tokens, count in groups(meta):
            rows, before = rows_of(memories, meta, sequences, tokens, count)
            parts = [part[tokens].unflatten(0, (-1, count)) for part in inputs]
            read[tokens], after = self._advance(before, *parts)
            memories.index_copy_(0, rows, after)
        return self._finished(read + weights.skip.unsqueeze(1) * x, gates).to(zxbcdt.dtype)

    def _advance(self, before: Tensor, v: Tensor, k: Tensor, q: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """What sequences read [n L, N, P], and what their memories `before` [n, N P d] become."""
        kind = self._kind
        memory = before.view(-1, kind.num_heads, kind.head_dim, kind.key_dim)
        read = torch.empty_like(v)
        for t in range(v.shape[1]):
            memory = memory * kept[:, t, :, None, None] + v[:, t].unsqueeze(3) * k[:, t].unsqueeze(2)
            read[:, t] = (memory * q[:, t].unsqueeze(2)).sum(dim=3)
        return read.flatten(0, 1), memory.flatten(1)

    def _of_each_head(self, x: Tensor) -> Tensor:
        """Keys or queries [T, G d], repeated for the heads [T, N, d] that share them."""
        kind = self._kind
        return x.unflatten(1, (kind.num_groups, kind.key_dim)).repeat_interleave(kind.num_heads // kind.num_groups, 1)

    def _finished(self, read: Tensor, gates: Tensor) -> Tensor:
        """[T, N, P], normalised in groups and multiplied by a function of its gates [T, N P]."""
        kind, y = self._kind, read.flatten(1)
        gates = silu(gates.float() * kind.scales[0])
        if kind.norm is GateNorm.NONE:
            return y * gates * self._weights.norm
        if kind.norm is GateNorm.BEHIND:
            return self._normed(y * gates) * self._weights.norm
        return self._normed(y) * self._weights.norm * gates

    def _normed(self, y: Tensor) -> Tensor:
        weights, grouped = self._weights, y.unflatten(1, (self._kind.num_groups, -1))
        squares = grouped.square().sum(dim=2)
        if weights.sum_over_ranks is not None:
            squares = weights.sum_over_ranks(squares)
        return (grouped * torch.rsqrt(squares / weights.norm_size + self._kind.eps).unsqueeze(2)).flatten(1)
