"""Norms of a token's queries and keys: of each head alone, or of all heads together, which ranks divide.

Shapes: T tokens, N local heads, K local kv heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from server.backends.protocol import Norm, split_heads
from server.ranks.collectives import Shard

# heads [T, N + 2 K, H] and K → the same with queries and keys normalised, perhaps in place.
QkNorm = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class HeadNorm:
    """Each head for itself; all heads share their weights."""

    of_queries: Norm
    of_keys: Norm

    def __call__(self, heads: Tensor, kv_heads: int) -> Tensor:
        return self.of_queries.normalise_heads(self.of_keys, heads, kv_heads)


@dataclass(frozen=True)
class RowNorm:
    """All heads of one rank together: the row of a token's queries, and that of its keys."""

    of_queries: Norm
    of_keys: Norm

    def __call__(self, heads: Tensor, kv_heads: int) -> Tensor:
        q, k, v = split_heads(heads, kv_heads)
        q, k = (norm(x.flatten(1)).view(x.shape) for norm, x in ((self.of_queries, q), (self.of_keys, k)))
        return torch.cat([q, k, v], dim=1)


@dataclass(frozen=True)
class DividedRowNorm:
    """The same of heads that ranks divide, by their root mean square: the ranks add up their squares."""

    weights: Tensor  # [N + K, H] float32, of this rank's queries and keys
    sizes: Tensor  # [2] float32: features of all queries, and of all keys as often as ranks have them
    eps: float
    shard: Shard

    def __call__(self, heads: Tensor, kv_heads: int) -> Tensor:
        q, k, v = split_heads(heads, kv_heads)
        squares = torch.stack([x.float().square().sum((1, 2)) for x in (q, k)], dim=1)
        scales = torch.rsqrt(self.shard.all_reduce(squares) / self.sizes + self.eps)  # [T, 2]
        counts = (q.shape[1], kv_heads)
        scales = torch.cat([scales[:, i : i + 1].expand(-1, count) for i, count in enumerate(counts)], dim=1)
        turned = heads[:, :-kv_heads].float() * scales.unsqueeze(2) * self.weights
        return torch.cat([turned.to(v.dtype), v], dim=1)
