"""What attention in stock torch operators is made of: rotating, storing, and scoring by distance.

Shapes: T tokens, N local heads, K local kv heads, H head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from server.backends.protocol import Rotation, Scores, StepMeta
from server.quant.kv import AS_COMPUTED, KvFormat


def rotate(rotation: Rotation, x: Tensor) -> Tensor:
    """Rotate the leading features of every head of x [T, heads, H] in float32; the others are kept."""
    half = rotation.cos.shape[-1]
    rotated = x[..., : 2 * half].float()
    a, b = (rotated[..., ::2], rotated[..., 1::2]) if rotation.interleaved else rotated.chunk(2, dim=-1)
    parts = (a * rotation.cos - b * rotation.sin, b * rotation.cos + a * rotation.sin)
    turned = torch.stack(parts, dim=-1).flatten(-2) if rotation.interleaved else torch.cat(parts, dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], dim=-1)


class StoringAttention(ABC):
    """Attention that stores a step's keys and values before it attends to any of them."""

    @abstractmethod
    def rotate_and_write(self, heads: Tensor, kv: Tensor, rotation: Rotation | None, meta: StepMeta) -> Tensor:
        """Rotate the queries and keys of heads [T, N + 2 K, H], store keys and values; the queries [T, N, H]."""

    @abstractmethod
    def attend(self, q: Tensor, kv: Tensor, meta: StepMeta, window: int) -> Tensor:
        """See `protocol.Attention`."""

    def self_attend(self, heads: Tensor, kv: Tensor, rotation: Rotation | None, meta: StepMeta, window: int) -> Tensor:
        """See `protocol.Attention`."""
        return self.attend(self.rotate_and_write(heads, kv, rotation, meta), kv, meta, window)


class StockAttention(StoringAttention):
    """The part that both kinds of attention in stock operators share: everything but `attend`."""

    def __init__(self, scores: Scores, cache: KvFormat = AS_COMPUTED):
        self._scores = scores
        self._cache = cache

    def write(self, kv: Tensor, k: Tensor, v: Tensor, meta: StepMeta) -> None:
        """See `protocol.Attention`."""
        self._cache.write(kv, k, v, meta.slots)

    def rotate_and_write(self, heads: Tensor, kv: Tensor, rotation: Rotation | None, meta: StepMeta) -> Tensor:
        """See `StoringAttention`."""
        kv_heads = kv.shape[2]
        turned, v = heads[:, :-kv_heads], heads[:, -kv_heads:]  # queries and keys, and what no position turns
        if rotation is not None:
            turned = rotate(rotation, turned)
        self._cache.write(kv, turned[:, -kv_heads:], v, meta.slots)
        return turned[:, :-kv_heads]


def distances(meta: StepMeta, tokens: slice, length: int, window: int) -> tuple[Tensor, Tensor]:
    """How far keys 0 … length-1 are from the step's `tokens` (key minus query), and which they must not see.

    Both [n, length]: hidden are keys that are not visible, and those before the window.
    """
    keys = torch.arange(length, device=meta.positions.device)
    distance = keys - meta.positions[tokens].unsqueeze(1)
    hidden = keys >= meta.visible[tokens].unsqueeze(1)
    return distance, hidden | (distance <= -window) if window else hidden


def score_bias(scores: Scores, distance: Tensor) -> Tensor | None:
    """What is added to the scores at `distance` [n, L] for each local head: [N, n, L], None for nothing."""
    if scores.slopes:
        return torch.tensor(scores.slopes, device=distance.device).view(-1, 1, 1) * distance
    if scores.bias is not None:
        reach = scores.bias.shape[1] // 2
        return scores.bias[:, distance.clamp(-reach, reach) + reach]
    return None
