"""Layer normalisation, replicated on every rank.

Shapes: T tokens, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from server.model.spec import LayerNorm
from server.weights import Weights


@dataclass(frozen=True)
class Norm:
    """x [T, D] → normalised, scaled and shifted, in x's dtype."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def load_norm(weights: Weights, role: str, hidden_size: int, spec: LayerNorm) -> Norm:
    """The norm called `role`."""
    shape = (hidden_size,)
    return Norm(weights.read(role, "weight", shape), weights.read(role, "bias", shape), spec.eps)
