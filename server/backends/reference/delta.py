"""The gated delta rule in stock torch operators, one token after the other: what defines correct.

Left out: the chunked form of the paper, which sums in another order. Here a prompt's chunks, decodes and a rebuilt
sequence add the same numbers in the same order.

Shapes: T tokens in the step, n sequences that have L tokens each, C channels, N heads, K heads of keys, d
features of a key, v of a value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from server.backends.protocol import DeltaWeights, StepMeta
from server.backends.reference.convolution import convolve, groups, rows_of
from server.backends.reference.functions import sigmoid, silu, softplus

TINY = 1e-6  # below the sum of squares of a query or key


class StockDelta:
    """See `protocol.DeltaRule`."""

    def __init__(self, weights: DeltaWeights):
        self._weights = weights
        self._kind = weights.kind

    def __call__(self, qkvz: Tensor, ba: Tensor, state: Tensor, meta: StepMeta) -> Tensor:
        kind = self._kind
        channels, gates = qkvz.split([kind.channels, kind.inner], dim=1)
        correction, fading = ba.float().chunk(2, dim=1)
        kept = (-self._weights.decay * softplus(fading + self._weights.step_bias)).exp()
        memories, past = state.split([kind.memory_size, kind.state_size - kind.memory_size], dim=1)
        inputs = (
            *self._split(silu(convolve(channels, self._weights.conv, None, past, meta))),
            kept,
            sigmoid(correction),
        )
        read = torch.empty(len(qkvz), kind.num_heads, kind.value_dim, device=qkvz.device)
        for sequences, tokens, count in groups(meta):
            rows, before = rows_of(memories, meta, sequences, tokens, count)
            parts = [part[tokens].unflatten(0, (-1, count)) for part in inputs]
            read[tokens], after = self._advance(before, *parts)
            memories.index_copy_(0, rows, after)
        return self._gated(read, gates).to(qkvz.dtype)

    def _advance(
        self, before: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What sequences read [n L, N, v], and what their memories `before` [n, N d v] become."""
        kind = self._kind
        memory = before.view(-1, kind.num_heads, kind.key_dim, kind.value_dim)
        read = torch.empty_like(v)
        for t in range(v.shape[1]):
            key = k[:, t].unsqueeze(3)  # [n, N, d, 1]
            memory = memory * kept[:, t, :, None, None]
            error = (v[:, t] - (memory * key).sum(dim=2)) * beta[:, t].unsqueeze(2)
            memory = memory + key * error.unsqueeze(2)
            read[:, t] = (memory * q[:, t].unsqueeze(3)).sum(dim=2)
        return read.flatten(0, 1), memory.flatten(1)

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convolved channels [T, C] → queries and keys [T, N, d] and values [T, N, v]."""
        kind = self._kind
        keys = kind.num_key_heads * kind.key_dim
        q, k, v = mixed.split([keys, keys, kind.inner], dim=1)
        q, k = (self._of_each_head(part.unflatten(1, (kind.num_key_heads, kind.key_dim))) for part in (q, k))
        return q * kind.key_dim**-0.5, k, v.unflatten(1, (kind.num_heads, kind.value_dim))

    def _of_each_head(self, x: Tensor) -> Tensor:
        """Queries or keys [T, K, d] of length 1, repeated for the heads [T, N, d] that share them."""
        x = x * torch.rsqrt((x * x).sum(dim=2, keepdim=True) + TINY)
        return x.repeat_interleave(self._kind.num_heads // self._kind.num_key_heads, dim=1)

    def _gated(self, read: Tensor, gates: Tensor) -> Tensor:
        """[T, N, v] normalised for each head, and multiplied by a function of its gates [T, N * v]."""
        normed = F.rms_norm(read, self._weights.norm.shape, self._weights.norm, self._weights.eps)
        return normed.flatten(1) * silu(gates.float())
