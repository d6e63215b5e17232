"""Normalisation in stock torch operators.

Shapes: x [..., D] over its last dimension.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from server.backends.protocol import Norm


class LayerNorm(Norm):
    """Zero mean and unit variance, scaled and shifted, in x's dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float):
        self._weight = weight
        self._bias = bias
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)


class RmsNorm(Norm):
    """Unit root mean square, scaled; computed in float32, returned in x's dtype."""

    def __init__(self, weight: Tensor, eps: float):
        self._weight = weight.float()
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self._weight.shape, self._weight, self._eps).to(x.dtype)


def make_norm(weight: Tensor, bias: Tensor | None, eps: float, *, is_centred: bool) -> Norm:
    """LayerNorm where `is_centred`, else RMSNorm."""
    return LayerNorm(weight, bias, eps) if is_centred else RmsNorm(weight, eps)
