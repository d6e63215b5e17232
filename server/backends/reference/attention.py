"""Attention as one would write it on paper: sequence by sequence, in float32. Defines correct; every fast backend is
tested against it.

Shapes: T tokens, L context length, n queries of one sequence, N local heads, K local kv heads, H head dim, P tokens per
block, W elements that a token's key or value takes in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from server.backends.protocol import StepMeta
from server.backends.reference.scoring import StockAttention, distances, score_bias


class ReferenceAttention(StockAttention):
    """Softmax attention over the paged cache, with biases, windows, capped scores and shared kv heads."""

    def attend(self, q: Tensor, kv: Tensor, meta: StepMeta, window: int) -> Tensor:
        return torch.cat([self._one(q, kv, meta, s, window) for s in range(len(meta.context_lengths))])

    def _one(self, q: Tensor, kv: Tensor, meta: StepMeta, s: int, window: int) -> Tensor:
        """One sequence's queries [n, N, H] over its own context."""
        start, stop = meta.query_starts[s : s + 2]
        k, v = self._context(kv, meta, s, *q.shape[1:])
        distance, hidden = distances(meta, slice(start, stop), len(k), window)  # [n, L]
        scores = torch.einsum("nhd,lhd->hnl", q[start:stop].float(), k) * self._scores.scale
        if self._scores.cap:
            scores = self._scores.cap * torch.tanh(scores / self._scores.cap)
        if (bias := score_bias(self._scores, distance)) is not None:
            scores = scores + bias
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        return torch.einsum("hnl,lhd->nhd", weights, v).to(q.dtype)

    def _context(self, kv: Tensor, meta: StepMeta, s: int, heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Keys and values [L, N, H] of one sequence, kv heads repeated for the heads that share them."""
        length, block_size = meta.context_lengths[s], kv.shape[3]
        raw = kv[:, meta.block_tables[s, : -(-length // block_size)]].flatten(3)  # [2, blocks, K, P * W]
        k, v = (
            self._cache.expand(blocks, head_dim, part).transpose(1, 2).flatten(0, 1)[:length].float()  # [L, K, H]
            for part, blocks in enumerate(raw)
        )
        group = heads // kv.shape[2]
        return k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
