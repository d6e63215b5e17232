"""Which experts a router chooses, in stock torch operators: what defines correct for every backend.

Shapes: T tokens, E experts, k experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from server.arch.spec import Scoring
from server.backends.protocol import RouterRule
from server.backends.reference.functions import sigmoid

LEAST_SUM = 1e-20  # of weights that are to sum to 1


def choose(logits: Tensor, top_k: int, rule: RouterRule, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The weights, float32, and the numbers of each token's experts, both [T, k], from a router's logits [T, E]."""
    if rule.scoring is Scoring.SPARSE_MIXER:
        return _mix(logits, top_k, rule.tolerance)
    scores = sigmoid(logits) if rule.scoring is Scoring.SIGMOID else logits.softmax(dim=-1)
    # The sigmoids of large logits may be rounded to the same: alone, they are ordered by their logits.
    is_plain = rule.scoring is Scoring.SIGMOID and rule.top_groups == rule.num_groups
    wanted = scores + rule.bias if rule.bias is not None else logits if is_plain else scores
    if rule.top_groups < rule.num_groups:
        wanted = _of_best_groups(wanted, rule)
    chosen = wanted.topk(top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_SUM)
    scale = rule.scale if rule.expert_scales is None else rule.scale * rule.expert_scales[chosen]
    return weights * scale, chosen


def _of_best_groups(wanted: Tensor, rule: RouterRule) -> Tensor:
    """wanted [T, E], but minus infinity outside of each token's best groups."""
    grouped = wanted.unflatten(1, (rule.num_groups, -1))
    groups = grouped.topk(rule.group_best, dim=-1).values.sum(dim=-1).topk(rule.top_groups, dim=-1).indices
    is_left_out = torch.ones_like(grouped[:, :, 0], dtype=torch.bool).scatter(1, groups, False)
    return grouped.masked_fill(is_left_out.unsqueeze(-1), float("-inf")).flatten(1)


def _mix(logits: Tensor, top_k: int, tolerance: float) -> tuple[Tensor, Tensor]:
    """Expert after expert: the best that is left, weighted among those whose logits are within the tolerance of its."""
    left, weights, chosen = logits, [], []
    for _ in range(top_k):
        best, expert = left.max(dim=-1, keepdim=True)
        is_far = (best - logits) / logits.abs().maximum(best) > tolerance
        weights.append(left.masked_fill(is_far, float("-inf")).softmax(dim=-1).gather(1, expert))
        chosen.append(expert)
        left = left.scatter(1, expert, float("-inf"))
    return torch.cat(weights, dim=1), torch.cat(chosen, dim=1)
