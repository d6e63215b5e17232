"""Normalisation, replicated on every rank."""

from __future__ import annotations

from server.arch.spec import LayerNormSpec, RmsNormSpec
from server.backends.protocol import Backend, Norm
from server.checkpoint.weights import Weights


def load_norm(weights: Weights, role: str, size: int, kind: LayerNormSpec | RmsNormSpec, backend: Backend) -> Norm:
    """The norm called `role`, over `size` features."""
    weight = weights.vector(role, size)
    if isinstance(kind, LayerNormSpec):
        bias = weights.bias(role, size) if kind.bias else None
        return backend.norm(weight, bias, kind.eps, is_centred=True)
    # In float32: near 1 the checkpoint's dtype has no room for what is stored as a distance from 1.
    return backend.norm(weight.float() + 1 if kind.unit_offset else weight, None, kind.eps, is_centred=False)
