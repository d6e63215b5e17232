"""The model beside which a speculative one is loaded, as its loaders know it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from server.backends.protocol import Backend
from server.checkpoint.weights import Weights
from server.model.transformer import Transformer
from server.quantisation.kv import KvFormat


@dataclass(frozen=True)
class Served:
    """The model that is served, on one rank."""

    model: Transformer
    weights: Weights
    backend: Backend
    dtype: torch.dtype
    cache: KvFormat
