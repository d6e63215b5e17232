"""How tokens find their experts and come back from them, in stock torch operators.

Tokens are sorted by expert, so that each expert's are in one run; the host is asked nothing.

Shapes: T tokens, D model width, E experts, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from server.backends.protocol import LinearFormat


@dataclass(frozen=True)
class StockRoutes:
    """See `protocol.Routes`."""

    tokens: Tensor
    ends: Tensor
    weights: Tensor  # [T, k], in the tokens' dtype
    order: Tensor  # [T * k] which pair of a token and an expert stands at each place

    def combine(self, y: Tensor) -> Tensor:
        pairs = torch.empty_like(y).index_copy_(0, self.order, y).view(*self.weights.shape, -1)
        return (pairs * self.weights.unsqueeze(2)).sum(dim=1)


@dataclass(frozen=True)
class StockRouting:
    """See `protocol.Routing`."""

    expert_ids: Tensor  # [E]: 0 … E - 1
    top_k: int
    renormalise: bool

    def choose(self, router: LinearFormat, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = router.finest(x, None).float().softmax(dim=-1).topk(self.top_k, dim=-1)
        if self.renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen

    def __call__(self, router: LinearFormat, x: Tensor) -> StockRoutes:
        weights, chosen = self.choose(router, x)
        sorted_experts, order = chosen.flatten().sort(stable=True)  # of the T * k pairs of a token and an expert
        ends = torch.searchsorted(sorted_experts, self.expert_ids, right=True, out_int32=True)
        return StockRoutes(order // self.top_k, ends, weights, order)
