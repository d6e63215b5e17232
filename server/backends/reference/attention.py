"""Attention in stock torch operators, twice: `ReferenceAttention` defines correct, `BatchedAttention` serves.

The reference is attention as one would write it on paper: sequence by sequence, in float32. Every fast backend is
tested against it. The batched one works on any device. Its decodes are two batched matrix products over gathered
blocks, padded to the longest context of their group (scaled_dot_product_attention with one query reaches a few percent
of the memory bandwidth on a CPU); a prompt chunk is one fused scaled_dot_product_attention. The gather costs a copy of
the context per layer; kernels that read the blocks in place do without.

Shapes: T tokens, L context length (of `BatchedAttention` in whole blocks), G sequences of a group, n queries of one
sequence, N local heads, K local kv heads, g heads per kv head, H head dim, P tokens per block, W elements that a
token's key or value takes in the cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from server.backends.protocol import Rotation, Scores, StepMeta
from server.quantisation.kv import AS_COMPUTED, KvFormat


class StoringAttention(ABC):
    """An `Attention` that stores a step's keys and values before it attends to any of them."""

    @abstractmethod
    def rotate_and_write(self, heads: Tensor, kv: Tensor, rotation: Rotation | None, meta: StepMeta) -> Tensor:
        """Rotate the queries and keys of `heads`, store keys and values; the queries [T, N, H]."""

    @abstractmethod
    def attend(self, q: Tensor, kv: Tensor, meta: StepMeta, window: int) -> Tensor:
        """See `protocol.Attention`."""

    def attend_rotated(self, q: Tensor, kv: Tensor, rotation: Rotation | None, meta: StepMeta, window: int) -> Tensor:
        return self.attend(q if rotation is None else self.rotated(q, rotation), kv, meta, window)

    def rotated(self, q: Tensor, rotation: Rotation) -> Tensor:
        """Queries [T, N, H] rotated, perhaps in place."""
        return rotate(rotation, q)

    def self_attend(self, heads: Tensor, kv: Tensor, rotation: Rotation | None, meta: StepMeta, window: int) -> Tensor:
        return self.attend(self.rotate_and_write(heads, kv, rotation, meta), kv, meta, window)


class StockAttention(StoringAttention):
    """The part that both kinds of attention in stock operators share: everything but `attend`."""

    def __init__(self, scores: Scores, cache: KvFormat = AS_COMPUTED):
        self._scores = scores
        self._cache = cache

    def write(self, kv: Tensor, k: Tensor, v: Tensor, meta: StepMeta) -> None:
        self._cache.write(kv, k, v, meta.slots)

    def rotate_and_write(self, heads: Tensor, kv: Tensor, rotation: Rotation | None, meta: StepMeta) -> Tensor:
        kv_heads, rank = kv.shape[2], self._scores.rank
        turned, v = (heads, None) if rank else (heads[:, :-kv_heads], heads[:, -kv_heads:])
        if rotation is not None:
            turned = rotate(rotation, turned, rank)
        self._cache.write(kv, turned[:, -kv_heads:], v, meta.slots)
        return turned[:, :-kv_heads]

    def _keys_and_values(self, parts: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
        """Of all parts [..., H] of a cache."""
        k, *v = parts
        return k, v[0] if v else k[..., : self._scores.rank]


class ReferenceAttention(StockAttention):
    """Softmax attention over the paged cache, with biases, sinks, windows, capped scores and shared kv heads."""

    def attend(self, q: Tensor, kv: Tensor, meta: StepMeta, window: int) -> Tensor:
        return torch.cat([self._one(q, kv, meta, s, window) for s in range(len(meta.context_lengths))])

    def _one(self, q: Tensor, kv: Tensor, meta: StepMeta, s: int, window: int) -> Tensor:
        """One sequence's queries [n, N, H] over its own context."""
        start, stop = meta.query_starts[s : s + 2]
        k, v = self._context(kv, meta, s, *q.shape[1:])
        distance, hidden = distances(meta, slice(start, stop), len(k), window, self._scores.chunk)  # [n, L]
        scores = torch.einsum("nhd,lhd->hnl", q[start:stop].float(), k) * self._scores.scale
        if self._scores.cap:
            scores = self._scores.cap * torch.tanh(scores / self._scores.cap)
        if (bias := _score_bias(self._scores, distance)) is not None:
            scores = scores + bias
        weights = _weights(self._scores, scores.masked_fill(hidden, float("-inf")))
        return torch.einsum("hnl,lhd->nhd", weights, v).to(q.dtype)

    def _context(self, kv: Tensor, meta: StepMeta, s: int, heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Keys and values [L, N, H] of one sequence, kv heads repeated for the heads that share them."""
        length, block_size = meta.context_lengths[s], kv.shape[3]
        raw = kv[:, meta.block_tables[s, : -(-length // block_size)]].flatten(3)  # [2, blocks, K, P * W]
        k, v = self._keys_and_values(
            self._cache.expand(blocks, head_dim, part).transpose(1, 2).flatten(0, 1)[:length].float()  # [L, K, H]
            for part, blocks in enumerate(raw)
        )
        group = heads // kv.shape[2]
        return k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


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
        places = distances(meta, slice(first, last), length, window, self._scores.chunk)
        scores = self._finish(raw.flatten(1, 2).transpose(0, 1), *places)
        weights = _weights(self._scores, scores).transpose(0, 1).unflatten(1, (kv_heads, -1))
        return (weights.to(q.dtype) @ v).view(last - first, -1, v.shape[-1])

    def _chunk(self, q: Tensor, kv: Tensor, meta: StepMeta, s: int, window: int) -> Tensor:
        """One sequence's queries [n, N, H] over its own context."""
        start, stop = meta.query_starts[s : s + 2]
        k, v = self._gather(q, kv, meta.block_tables[s : s + 1], meta.context_lengths[s])  # [1, K, L, H]
        queries = q[start:stop].transpose(0, 1)  # [N, n, H]
        distance, hidden = distances(meta, slice(start, stop), k.shape[2], window, self._scores.chunk)  # [n, L]
        if self._scores.cap or self._scores.sinks is not None:  # which the fused operator has not
            grouped = queries.view(k.shape[1], -1, *queries.shape[1:])  # [K, g, n, H]
            raw = (grouped @ k[0].transpose(1, 2).unsqueeze(1)).float()  # [K, g, n, L]
            weights = _weights(self._scores, self._finish(raw.flatten(0, 1), distance, hidden)).view(raw.shape)
            out = (weights.to(q.dtype) @ v[0].unsqueeze(1)).flatten(0, 1)
        else:
            out = self._fused(queries, k, v, distance, hidden)
        return out.transpose(0, 1)

    def _fused(self, queries: Tensor, k: Tensor, v: Tensor, distance: Tensor, hidden: Tensor) -> Tensor:
        """queries [N, n, H], k and v [1, K, L, H] → [N, n, H]."""
        bias = _score_bias(self._scores, distance)
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
        parts, _, kv_heads, block_size, width = kv.shape
        wanted = block_tables[:, None, : -(-longest // block_size)]  # [G, 1, blocks]
        rows = wanted * kv_heads + torch.arange(kv_heads, device=kv.device).unsqueeze(1)  # [G, K, blocks]
        flat = kv.view(parts, -1, block_size * width)
        return self._keys_and_values(
            self._cache.expand(blocks.index_select(0, rows.flatten()), q.shape[-1], part)
            .to(q.dtype)
            .view(*rows.shape[:2], -1, q.shape[-1])
            for part, blocks in enumerate(flat)
        )

    def _finish(self, scores: Tensor, distance: Tensor, hidden: Tensor) -> Tensor:
        """Scale, cap, bias and mask raw scores [N, n, L] in place; distance and hidden are [n, L]."""
        scores.mul_(self._scores.scale)
        if self._scores.cap:
            scores.div_(self._scores.cap).tanh_().mul_(self._scores.cap)
        if (bias := _score_bias(self._scores, distance)) is not None:
            scores += bias
        return scores.masked_fill_(hidden, float("-inf"))


def rotate(rotation: Rotation, x: Tensor, first: int = 0) -> Tensor:
    """Rotate the features from `first` on of every head of x [T, heads, H] in float32; the others are kept."""
    half = rotation.cos.shape[-1]
    rotated = x[..., first : first + 2 * half].float()
    a, b = (rotated[..., ::2], rotated[..., 1::2]) if rotation.interleaved else rotated.chunk(2, dim=-1)
    parts = (a * rotation.cos - b * rotation.sin, b * rotation.cos + a * rotation.sin)
    turned = torch.stack(parts, dim=-1).flatten(-2) if rotation.interleaved else torch.cat(parts, dim=-1)
    return torch.cat([x[..., :first], turned.to(x.dtype), x[..., first + 2 * half :]], dim=-1)


def distances(meta: StepMeta, tokens: slice, length: int, window: int, chunk: int) -> tuple[Tensor, Tensor]:
    """How far keys 0 … length-1 are from the step's `tokens` (key minus query), and which they must not see.

    Both [n, length]: hidden are keys that are not visible, and those before the window or the query's chunk.
    """
    keys, positions = torch.arange(length, device=meta.positions.device), meta.positions[tokens].unsqueeze(1)
    distance = keys - positions
    hidden = keys >= meta.visible[tokens].unsqueeze(1)
    if chunk:
        hidden |= keys < positions - positions % chunk
    return distance, hidden | (distance <= -window) if window else hidden


def _score_bias(scores: Scores, distance: Tensor) -> Tensor | None:
    """What is added to the scores at `distance` [n, L] for each local head: [N, n, L], None for nothing."""
    if scores.slopes:
        return torch.tensor(scores.slopes, device=distance.device).view(-1, 1, 1) * distance
    if scores.bias is not None:
        reach = scores.bias.shape[1] // 2
        return scores.bias[:, distance.clamp(-reach, reach) + reach]
    return None


def _weights(scores: Scores, finished: Tensor) -> Tensor:
    """The softmax [N, n, L] of finished scores, of which a sink takes its share."""
    if scores.sinks is None:
        return finished.softmax(dim=-1)
    sinks = scores.sinks.view(-1, 1, 1).expand(*finished.shape[:2], 1)
    return torch.cat([finished, sinks], dim=-1).softmax(dim=-1)[..., :-1]


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
