"""Stock torch operators: the backend that runs on every device, supports everything, and defines correct.

The other backends are subclasses that replace what they do faster.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from server.arch.spec import ArchSpec
from server.backends.device import Device
from server.backends.protocol import (
    SOFTMAX,
    AdaptedExperts,
    AdaptedLinear,
    Attention,
    ConvRule,
    DeltaRule,
    DeltaWeights,
    GraphCapture,
    GroupedLinear,
    LinearFormat,
    Logits,
    MambaRule,
    MambaWeights,
    Maximum,
    Norm,
    RouterRule,
    Routing,
    Scores,
    ShortConvWeights,
    TokenAdapters,
)
from server.backends.reference.adapters import OneByOne, StockAdapted, StockAdaptedExperts
from server.backends.reference.attention import BatchedAttention
from server.backends.reference.convolution import StockShortConv
from server.backends.reference.delta import StockDelta
from server.backends.reference.linear import (
    DenseFormat,
    Gate,
    GroupedDense,
    LoopedExperts,
    StockRouting,
    make_norm,
    stock_gate,
)
from server.backends.reference.logits import StockLogits
from server.backends.reference.mamba import StockMamba
from server.backends.reference.quantised import QuantisedFormat
from server.quantisation.kv import AS_COMPUTED, KvFormat
from server.quantisation.stored import Quantise, QuantisedWeight, Stored
from server.ranks import shared_memory
from server.ranks.collectives import Shard


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

    @property
    def description(self) -> str:
        return "; ".join(self.notes) or "stock torch operators"

    def attention(self, scores: Scores, cache: KvFormat = AS_COMPUTED) -> Attention:
        return BatchedAttention(scores, cache)

    def block_parts(self, kv: Tensor, cache: KvFormat, head_dim: int) -> list[Tensor]:
        return [half.flatten(1) for half in kv]

    def linear(self, weight: Stored, *, is_gated: bool = False, maximum: Maximum | None = None) -> LinearFormat:
        if isinstance(weight, Tensor):
            return self.dense(weight, is_gated=is_gated)
        return self.quantised(weight, is_gated=is_gated, maximum=maximum)

    def dense(self, weight: Tensor, *, is_gated: bool) -> LinearFormat:
        """A dense weight."""
        return DenseFormat(weight, is_gated=is_gated, gate=self.gate)

    def rounding(self, quantise: Quantise) -> Quantise:
        return quantise

    def quantised(self, weight: QuantisedWeight, *, is_gated: bool, maximum: Maximum | None) -> LinearFormat:
        """A quantised weight."""
        return QuantisedFormat(weight, maximum, is_gated=is_gated, gate=self.gate)

    def adapted(self, layer: LinearFormat, num_rows: int, tokens: TokenAdapters, *, is_gated: bool) -> AdaptedLinear:
        return StockAdapted(layer, tokens, self.device, self.gate if is_gated else None)

    def adapted_experts(
        self, layer: GroupedLinear, num_rows: int, tokens: TokenAdapters, *, is_gated: bool
    ) -> AdaptedExperts:
        if isinstance(layer, LoopedExperts):
            return OneByOne(layer, tokens, lambda one, of: self.adapted(one, num_rows, of, is_gated=is_gated))
        return StockAdaptedExperts(layer, tokens, self.device, self.gate if is_gated else None)

    def norm(self, weight: Tensor, bias: Tensor | None, eps: float, *, is_centred: bool) -> Norm:
        return make_norm(weight, bias, eps, is_centred=is_centred)

    def grouped(
        self, weights: Iterable[Stored], count: int, *, is_gated: bool = False, maximum: Maximum | None = None
    ) -> GroupedLinear:
        others = iter(weights)
        first = next(others)
        every = itertools.chain([first], others)
        if isinstance(first, Tensor):
            return self.grouped_dense(_all_dense(every), count, is_gated=is_gated)
        return self.grouped_quantised(first, every, count, is_gated=is_gated, maximum=maximum)

    def grouped_dense(self, weights: Iterable[Tensor], count: int, *, is_gated: bool) -> GroupedLinear:
        """Experts whose weights are dense."""
        return GroupedDense(weights, count, is_gated=is_gated, gate=self.gate)

    def grouped_quantised(
        self, first: QuantisedWeight, weights: Iterable[Stored], count: int, *, is_gated: bool, maximum: Maximum | None
    ) -> GroupedLinear:
        """Experts of which `first`, the first of `weights`, is quantised."""
        return LoopedExperts([self.linear(weight, is_gated=is_gated, maximum=maximum) for weight in weights])

    def routing(self, num_experts: int, top_k: int, *, renormalise: bool, rule: RouterRule = SOFTMAX) -> Routing:
        expert_ids = torch.arange(num_experts, device=self.device.torch_device)
        return StockRouting(expert_ids, top_k, renormalise, rule)

    def gated_delta(self, weights: DeltaWeights) -> DeltaRule:
        return StockDelta(weights)

    def short_conv(self, weights: ShortConvWeights) -> ConvRule:
        return StockShortConv(weights)

    def mamba(self, weights: MambaWeights) -> MambaRule:
        return StockMamba(weights)

    def why_not_captured(self, spec: ArchSpec, quantised: str | None, world_size: int) -> str | None:
        return "attention in stock operators needs the sequences' lengths on the host"

    def joined(self, shard: Shard) -> Shard:
        device = self.device.torch_device
        return shared_memory.join(shard, None, device) if device.type == "cpu" else shard

    def measured_products(self) -> Sequence[str]:
        return ()

    def num_compilations(self) -> int:
        return 0

    def graph_capture(self, sizes: Sequence[int] | None) -> GraphCapture:
        raise AssertionError("why_not_captured says that nothing is")


def _all_dense(weights: Iterable[Stored]) -> Iterator[Tensor]:
    for weight in weights:
        if not isinstance(weight, Tensor):
            raise ValueError(
                "of the experts of one layer some are quantised and some are not: quantise all, or leave all alone"
            )
        yield weight
