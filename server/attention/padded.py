"""Attention in stock torch operators, batched: decodes are padded to the longest context of their group.

Works on any device. Decodes are two batched matrix products over gathered blocks (scaled_dot_product_attention with
one query reaches a few percent of the memory bandwidth on a CPU); a prompt chunk is one fused
scaled_dot_product_attention. The gather costs a copy of the context per layer; kernels that read the blocks in place
do without.

Shapes: T tokens, L context length, G sequences of a group, n queries of one sequence, N local heads, K local kv heads,
H head dim, g heads per kv head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from server.attention.interface import StepMeta, write_slots

# Padded context tokens gathered at once: bounds the copy (64 MiB per layer at K*H = 1024 in 16 bits) while a group
# stays large enough that the cost of a launch is small beside it.
GROUP_TOKENS = 16384


class PaddedAttention:
    """Softmax attention with ALiBi over the paged cache, batched over sequences."""

    name = "padded"

    def __init__(self, slopes: list[float], scale: float):
        self._slopes = slopes
        self._scale = scale

    def write(self, kv: Tensor, k: Tensor, v: Tensor, meta: StepMeta) -> None:
        write_slots(kv, k, v, meta.slots)

    def attend(self, q: Tensor, kv: Tensor, meta: StepMeta) -> Tensor:
        slopes = torch.tensor(self._slopes, device=q.device)
        parts = [self._decode(q, kv, meta, first, last, slopes) for first, last in _groups(meta)]
        chunks = range(meta.num_decodes, len(meta.context_lengths))
        parts += [self._chunk(q, kv, meta, s, slopes) for s in chunks]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _decode(self, q: Tensor, kv: Tensor, meta: StepMeta, first: int, last: int, slopes: Tensor) -> Tensor:
        """Sequences [first, last), one query each: q rows [G, N, H] → [G, N, H]."""
        longest = max(meta.context_lengths[first:last])
        k, v = _gather(kv, meta.block_tables[first:last], longest)  # [G, K, L, H]
        kv_heads, head_dim = k.shape[1], k.shape[3]
        queries = q[first:last].view(last - first, kv_heads, -1, head_dim)  # [G, K, g, H]
        scores = (queries @ k.transpose(2, 3)).float().mul_(self._scale)  # [G, K, g, L]
        distance = torch.arange(longest, device=q.device) - meta.positions[first:last].unsqueeze(1)  # [G, L]
        scores += slopes.view(kv_heads, -1, 1) * distance[:, None, None]
        scores.masked_fill_((distance > 0)[:, None, None], float("-inf"))
        return (scores.softmax(dim=-1).to(q.dtype) @ v).view(last - first, -1, head_dim)

    def _chunk(self, q: Tensor, kv: Tensor, meta: StepMeta, s: int, slopes: Tensor) -> Tensor:
        """One sequence's queries [n, N, H] over its own context."""
        start, stop = meta.query_starts[s : s + 2]
        length = meta.context_lengths[s]
        k, v = _gather(kv, meta.block_tables[s : s + 1], length)  # [1, K, L, H]
        distance = torch.arange(length, device=q.device) - meta.positions[start:stop].unsqueeze(1)  # [n, L]
        bias = (slopes.view(-1, 1, 1) * distance).masked_fill_(distance > 0, float("-inf"))  # [N, n, L]
        out = F.scaled_dot_product_attention(
            q[start:stop].transpose(0, 1).unsqueeze(0),
            k,
            v,
            attn_mask=bias.to(q.dtype).unsqueeze(0),
            scale=self._scale,
            enable_gqa=k.shape[1] != q.shape[1],
        )
        return out[0].transpose(0, 1)


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


def _gather(kv: Tensor, block_tables: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Keys and values [G, K, L, H] of the first `longest` tokens of each block table [G, blocks]."""
    num_blocks = -(-longest // kv.shape[2])
    picked = kv[:, block_tables[:, :num_blocks]]  # [2, G, blocks, P, K, H]
    k, v = picked.flatten(2, 3)[:, :, :longest].transpose(2, 3)
    return k, v
