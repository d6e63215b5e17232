"""Attention in stock torch operators, batched: decodes are padded to the longest context of their group.

Works on any device. Decodes are two batched matrix products over gathered blocks (scaled_dot_product_attention with
one query reaches a few percent of the memory bandwidth on a CPU); a prompt chunk is one fused
scaled_dot_product_attention. The gather costs a copy of the context per layer; kernels that read the blocks in place
do without.

Shapes: T tokens, L context length in whole blocks, G sequences of a group, n queries of one sequence, N local heads,
K local kv heads, H head dim, g heads per kv head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from server.backends.protocol import StepMeta
from server.backends.reference.scoring import StockAttention, distances, score_bias

# Padded context tokens gathered at once: bounds the copy (64 MiB per layer at K*H = 1024 in 16 bits) while a group
# stays large enough that the cost of a launch is small beside it.
GROUP_TOKENS = 16384


class BatchedAttention(StockAttention):
    """Softmax attention over the paged cache, batched over sequences."""

    def attend(self, q: Tensor, kv: Tensor, meta: StepMeta, window: int) -> Tensor:
        parts = [self._decode(q, kv, meta, first, last, window) for first, last in _groups(meta)]
        chunks = range(meta.num_decodes, len(meta.context_lengths))
        parts += [self._chunk(q, kv, meta, s, window) for s in chunks]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _decode(self, q: Tensor, kv: Tensor, meta: StepMeta, first: int, last: int, window: int) -> Tensor:
        """Sequences [first, last), one query each: q rows [G, N, H] → [G, N, H]."""
        longest = max(meta.context_lengths[first:last])
        k, v = self._gather(q, kv, meta.block_tables[first:last], longest)  # [G, K, L, H]
        kv_heads, length, head_dim = k.shape[1:]
        queries = q[first:last].view(last - first, kv_heads, -1, head_dim)  # [G, K, g, H]
        raw = (queries @ k.transpose(2, 3)).float()  # [G, K, g, L]
        scores = self._finish(raw.flatten(1, 2).transpose(0, 1), *distances(meta, slice(first, last), length, window))
        weights = scores.transpose(0, 1).unflatten(1, (kv_heads, -1)).softmax(dim=-1)
        return (weights.to(q.dtype) @ v).view(last - first, -1, head_dim)

    def _chunk(self, q: Tensor, kv: Tensor, meta: StepMeta, s: int, window: int) -> Tensor:
        """One sequence's queries [n, N, H] over its own context."""
        start, stop = meta.query_starts[s : s + 2]
        k, v = self._gather(q, kv, meta.block_tables[s : s + 1], meta.context_lengths[s])  # [1, K, L, H]
        queries = q[start:stop].transpose(0, 1)  # [N, n, H]
        distance, hidden = distances(meta, slice(start, stop), k.shape[2], window)  # [n, L]
        if self._scores.cap:  # the fused operator has no cap
            grouped = queries.view(k.shape[1], -1, *queries.shape[1:])  # [K, g, n, H]
            raw = (grouped @ k[0].transpose(1, 2).unsqueeze(1)).float()  # [K, g, n, L]
            weights = self._finish(raw.flatten(0, 1), distance, hidden).softmax(dim=-1).view(raw.shape)
            out = (weights.to(q.dtype) @ v[0].unsqueeze(1)).flatten(0, 1)
        else:
            out = self._fused(queries, k, v, distance, hidden)
        return out.transpose(0, 1)

    def _fused(self, queries: Tensor, k: Tensor, v: Tensor, distance: Tensor, hidden: Tensor) -> Tensor:
        """queries [N, n, H], k and v [1, K, L, H] → [N, n, H]."""
        bias = score_bias(self._scores, distance)
        bias = torch.zeros(1, *hidden.shape, device=queries.device) if bias is None else bias
        return F.scaled_dot_product_attention(
            queries.unsqueeze(0),
            k,
            v,
            attn_mask=bias.masked_fill_(hidden, float("-inf")).to(queries.dtype).unsqueeze(0),
            scale=self._scores.scale,
            enable_gqa=k.shape[1] != queries.shape[0],
        )[0]

    def _gather(self, q: Tensor, kv: Tensor, block_tables: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Keys and values [G, K, L, H] of each block table [G, blocks], with `longest` rounded up to whole blocks.

        In the queries' dtype. One copy that leaves every head's tokens in one run, which is how a matrix product wants
        them; from a quantised cache, one of the codes and one of what they stand for.
        """
        _, _, kv_heads, block_size, width = kv.shape
        wanted = block_tables[:, None, : -(-longest // block_size)]  # [G, 1, blocks]
        rows = wanted * kv_heads + torch.arange(kv_heads, device=kv.device).unsqueeze(1)  # [G, K, blocks]
        flat = kv.view(2, -1, block_size * width)
        k, v = (
            self._cache.expand(blocks.index_select(0, rows.flatten()), q.shape[-1], part)
            .to(q.dtype)
            .view(*rows.shape[:2], -1, q.shape[-1])
            for part, blocks in enumerate(flat)
        )
        return k, v

    def _finish(self, scores: Tensor, distance: Tensor, hidden: Tensor) -> Tensor:
        """Scale, cap, bias and mask raw scores [N, n, L] in place; distance and hidden are [n, L]."""
        scores.mul_(self._scores.scale)
        if self._scores.cap:
            scores.div_(self._scores.cap).tanh_().mul_(self._scores.cap)
        if (bias := score_bias(self._scores, distance)) is not None:
            scores += bias
        return scores.masked_fill_(hidden, float("-inf"))


def _groups(meta: StepMeta) -> Iterator[tuple[int, int]]:
    """Half-open ranges of decoding sequences whose padded contexts stay within GROUP_TOKENS; at least one each."""
    first = longest = 0
    for s in range(meta.num_decodes):
        longest = max(longest, meta.context_lengths[s])
        if s > first and longest * (s + 1 - first) > GROUP_TOKENS:
            yield first, s
            first, longest = s, meta.context_lengths[s]
    if meta.num_decodes:
        yield first, meta.num_decodes
