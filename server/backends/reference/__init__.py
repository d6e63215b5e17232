"""Stock torch operators: the backend that runs on every device, supports everything, and defines correct.

The other backends are subclasses that replace what they do faster. `attention.py` is attention as one would write it on
paper, against which every other one is tested; what serves is `batched_attention.py`, its equal in batched operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from server.arch.spec import ArchSpec
from server.backends.protocol import (
    Attention,
    Device,
    GraphCapture,
    GroupedLinear,
    Logits,
    MakeLinear,
    Norm,
    Routing,
    Scores,
)
from server.backends.reference.activation import Gate, stock_gate
from server.backends.reference.batched_attention import BatchedAttention
from server.backends.reference.experts import GroupedDense, LoopedExperts
from server.backends.reference.int8 import Int8Format
from server.backends.reference.linear import DenseFormat
from server.backends.reference.logits import StockLogits
from server.backends.reference.norm import make_norm
from server.backends.reference.routing import StockRouting


class ReferenceBackend:
    """See `protocol.Backend`. A subclass replaces attributes and methods, and says so in its `name`.

    notes: why no faster backend serves, in sentences.
    """

    name = "reference"
    gate: Gate = staticmethod(stock_gate)

    def __init__(self, device: Device, notes: Sequence[str] = ()):
        self.device = device
        self.notes = tuple(notes)
        self.logits: Logits = StockLogits()
        self.formats: Mapping[str, MakeLinear] = {
            "dense": partial(DenseFormat, gate=self.gate),
            "int8": partial(Int8Format, gate=self.gate),
        }

    @property
    def description(self) -> str:
        return "; ".join(self.notes) or "stock torch operators"

    def attention(self, scores: Scores) -> Attention:
        return BatchedAttention(scores)

    def norm(self, weight: Tensor, bias: Tensor | None, eps: float, *, is_centred: bool) -> Norm:
        return make_norm(weight, bias, eps, is_centred=is_centred)

    def grouped(self, weights: Iterable[Tensor], count: int, format: str, *, is_gated: bool = False) -> GroupedLinear:
        if format == "dense":
            return GroupedDense(weights, count, is_gated=is_gated, gate=self.gate)
        return LoopedExperts([self.formats[format](weight, is_gated=is_gated) for weight in weights])

    def routing(self, num_experts: int, top_k: int, *, renormalise: bool) -> Routing:
        expert_ids = torch.arange(num_experts, device=self.device.torch_device)
        return StockRouting(expert_ids, top_k, renormalise)

    def why_not_captured(self, spec: ArchSpec, format: str, world_size: int) -> str | None:
        return "attention in stock operators needs the sequences' lengths on the host"

    def graph_capture(self, sizes: Sequence[int] | None) -> GraphCapture:
        raise AssertionError("why_not_captured says that nothing is")
