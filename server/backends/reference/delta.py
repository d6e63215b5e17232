"""The gated delta rule in stock torch operators, one token after the other: what defines correct.

Left out: the chunked form of the paper, which sums in another order. Here a prompt's chunks, decodes and a rebuilt
sequence add the same numbers in the same order.

Shapes: T tokens in the step, S sequences, n of them that have L tokens each, C channels, N heads, K heads of keys, d
features of a key, v of a value.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from server.backends.protocol import DeltaWeights, StepMeta

TINY = 1e-6  # below the sum of squares of a query or key


class StockDelta:
    """See `protocol.DeltaRule`."""

    def __init__(self, weights: DeltaWeights):
        self._weights = weights
        self._kind = weights.kind

    def __call__(self, qkvz: Tensor, ba: Tensor, state: Tensor, meta: StepMeta) -> Tensor:
        assert meta.rows is not None, "steps of models with recurrent layers name their rows"
        kind = self._kind
        channels, gates = qkvz.split([kind.channels, kind.num_heads * kind.value_dim], dim=1)
        correction, fading = ba.float().chunk(2, dim=1)
        kept = (-self._weights.decay * F.softplus(fading + self._weights.step_bias)).exp()
        inputs = (channels.float(), kept, correction.sigmoid())
        read = torch.empty(len(qkvz), kind.num_heads, kind.value_dim, device=qkvz.device)
        for first, last, tokens in _groups(meta):
            start = meta.query_starts[first]
            stop = start + (last - first) * tokens
            parts = [part[start:stop].unflatten(0, (last - first, tokens)) for part in inputs]
            firsts = meta.positions[start:stop:tokens]
            read[start:stop] = self._advance(state, meta.rows[first:last], firsts, *parts).flatten(0, 1)
        return self._gated(read, gates).to(qkvz.dtype)

    def _advance(self, state: Tensor, rows: Tensor, firsts: Tensor, x: Tensor, kept: Tensor, beta: Tensor) -> Tensor:
        """What sequences read [n, L, N, v] whose states are `rows` [n], which are changed. firsts: [n] positions."""
        kind = self._kind
        before = state.index_select(0, rows)
        before = torch.where((firsts == 0).unsqueeze(1), torch.zeros_like(before), before)
        memory = before[:, : kind.memory_size].reshape(-1, kind.num_heads, kind.key_dim, kind.value_dim)
        seen = torch.cat([before[:, kind.memory_size :].unflatten(1, (kind.conv - 1, kind.channels)), x], dim=1)
        q, k, v = self._convolved(seen)
        read = torch.empty_like(v)
        for t in range(x.shape[1]):
            key = k[:, t].unsqueeze(3)  # [n, N, d, 1]
            memory = memory * kept[:, t, :, None, None]
            error = (v[:, t] - (memory * key).sum(dim=2)) * beta[:, t].unsqueeze(2)
            memory = memory + key * error.unsqueeze(2)
            read[:, t] = (memory * q[:, t].unsqueeze(3)).sum(dim=2)
        state.index_copy_(0, rows, torch.cat([memory.flatten(1), seen[:, x.shape[1] :].flatten(1)], dim=1))
        return read

    def _convolved(self, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Channels [n, conv - 1 + L, C] → queries and keys [n, L, N, d] and values [n, L, N, v]."""
        kind = self._kind
        windows = seen.unfold(1, kind.conv, 1)  # [n, L, C, conv]
        mixed = F.silu((windows * self._weights.conv).sum(dim=3))
        keys = kind.num_key_heads * kind.key_dim
        q, k, v = mixed.split([keys, keys, kind.num_heads * kind.value_dim], dim=2)
        q, k = (self._of_each_head(part.unflatten(2, (kind.num_key_heads, kind.key_dim))) for part in (q, k))
        return q * kind.key_dim**-0.5, k, v.unflatten(2, (kind.num_heads, kind.value_dim))

    def _of_each_head(self, x: Tensor) -> Tensor:
        """Queries or keys [n, L, K, d] of length 1, repeated for the heads [n, L, N, d] that share them."""
        x = x * torch.rsqrt((x * x).sum(dim=3, keepdim=True) + TINY)
        return x.repeat_interleave(self._kind.num_heads // self._kind.num_key_heads, dim=2)

    def _gated(self, read: Tensor, gates: Tensor) -> Tensor:
        """[T, N, v] normalised for each head, and multiplied by a function of its gates [T, N * v]."""
        normed = F.rms_norm(read, self._weights.norm.shape, self._weights.norm, self._weights.eps)
        return normed.flatten(1) * F.silu(gates.float())


def _groups(meta: StepMeta) -> list[tuple[int, int, int]]:
    """Sequences [first, last) of as many tokens each: all that decode, then each chunk by itself."""
    counts = [stop - start for start, stop in pairwise(meta.query_starts)]
    decodes = [(0, meta.num_decodes, 1)] if meta.num_decodes else []
    return decodes + [(s, s + 1, counts[s]) for s in range(meta.num_decodes, len(counts)) if counts[s]]
