"""Normalisation, replicated on every rank.

Shapes: x [..., D] over its last dimension, T tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

import torch.nn.functional as F
from torch import Tensor

from server.model import spec
from server.weights import Weights


class Norm(ABC):
    """Normalises alone, or behind the addition of a layer's summand to the residual."""

    # Whether adding in `add` costs less than adding what follows a matrix product to the product.
    absorbs_addition: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] → normalised [..., D]."""

    def add(self, x: Tensor, summand: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [T, D] and a layer's summand [T, D], with its bias [D] if it has one → their sum and the sum normalised."""
        total = x + summand if bias is None else x + summand + bias
        return total, self(total)


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


class MakeNorm(Protocol):
    def __call__(self, weight: Tensor, bias: Tensor | None, eps: float, *, is_centred: bool) -> Norm: ...


def stock_norm(weight: Tensor, bias: Tensor | None, eps: float, *, is_centred: bool) -> Norm:
    """LayerNorm where `is_centred`, else RMSNorm, in torch operators."""
    return LayerNorm(weight, bias, eps) if is_centred else RmsNorm(weight, eps)


def load_norm(weights: Weights, role: str, size: int, kind: spec.LayerNorm | spec.RmsNorm, make_norm: MakeNorm) -> Norm:
    """The norm called `role`, over `size` features."""
    weight = weights.vector(role, size)
    if isinstance(kind, spec.LayerNorm):
        return make_norm(weight, weights.bias(role, size) if kind.bias else None, kind.eps, is_centred=True)
    # In float32: near 1 the checkpoint's dtype has no room for what is stored as a distance from 1.
    return make_norm(weight.float() + 1 if kind.unit_offset else weight, None, kind.eps, is_centred=False)
