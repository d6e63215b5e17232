# mypy: disable-error-code="import-untyped, import-not-found"
"""`CudaBackend`: what the reference backend does, with kernels of its own. Importing it imports Triton."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.errors import TritonError

from server.arch.spec import ArchSpec
from server.backends.cuda import FLOAT8_SINCE
from server.backends.cuda.adapters import CudaAdapted
from server.backends.cuda.attention import PagedAttention
from server.backends.cuda.choice import Chooser, EventClock, MeasuredCapture, Shares
from server.backends.cuda.fused import FusedNorm, fused_gate
from server.backends.cuda.graph import SIZES
from server.backends.cuda.kernels.convolution import FusedShortConv
from server.backends.cuda.kernels.delta import FusedDelta
from server.backends.cuda.kernels.mamba import FusedMamba
from server.backends.cuda.kernels.routing import FusedRouting
from server.backends.cuda.linear import CudaDense, CudaGrouped, Products
from server.backends.cuda.logits import KernelLogits
from server.backends.cuda.packing import FLOAT8, why_not_packed
from server.backends.cuda.quantised import CudaQuantised, grouped
from server.backends.device import Device
from server.backends.protocol import (
    SOFTMAX,
    AdaptedLinear,
    Attention,
    ConvRule,
    DeltaRule,
    DeltaWeights,
    GraphCapture,
    GroupedLinear,
    LinearFormat,
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
from server.backends.reference import ReferenceBackend
from server.backends.reference.linear import LoopedExperts
from server.quantisation import rounding
from server.quantisation.kv import AS_COMPUTED, KvFormat
from server.quantisation.stored import Quantise, QuantisedWeight, Stored

# Weights that are rounded together: for each piece the host launches 190 operators, and a GPU would wait for it.
PIECE = 1 << 23
# Compute capabilities: with which major numbers `grouped_mm` is one kernel that asks the host nothing, and what kernels
# that are interpreted or only compiled count on.
GROUPED_MM = (9, 10)
BEST_KNOWN = (9, 0)
MICROSECONDS = 1e-6

log = logging.getLogger(__name__)


class CudaBackend(ReferenceBackend):
    """Triton kernels and CUDA graphs. See `protocol.Backend`.

    Matrix products in 16 bits are computed in the way that this GPU was seen to be fastest at; those in float32, with
    which one compares, in the usual one.
    """

    name = "cuda"
    gate = staticmethod(fused_gate)

    def __init__(self, device: Device, dtype: torch.dtype):
        super().__init__(device)
        self.logits = KernelLogits()
        self._compilations = Compilations()
        clock = EventClock(device.torch_device) if dtype != torch.float32 else None
        self._chooser = Chooser(clock, (RuntimeError, TritonError))
        is_gpu = device.torch_device.type == "cuda"
        capability = torch.cuda.get_device_capability(device.torch_device) if is_gpu else BEST_KNOWN
        self._products = Products(self._chooser, has_grouped_mm=capability[0] in GROUPED_MM, shares=Shares.read())
        self._dtype = dtype
        self._has_float8 = capability >= FLOAT8_SINCE
        self._left: dict[str, None] = {}  # why weights were left to the reference, each once
        self._why_not_captured: str | None = None

    @property
    def description(self) -> str:
        left = [f"quantised layers in stock operators: {why}" for why in self._left]
        return "; ".join(["Triton kernels", *left, *([self._why_not_captured] if self._why_not_captured else [])])

    def attention(self, scores: Scores, cache: KvFormat = AS_COMPUTED) -> Attention:
        return PagedAttention(scores, cache=cache)

    def dense(self, weight: Tensor, *, is_gated: bool) -> LinearFormat:
        return CudaDense(weight, is_gated=is_gated, gate=self.gate, products=self._products)

    def quantised(self, weight: QuantisedWeight, *, is_gated: bool, maximum: Maximum | None) -> LinearFormat:
        why = self._why_not(weight)
        if why is not None:
            self._left[why] = None
            return super().quantised(weight, is_gated=is_gated, maximum=maximum)
        return self._packed(weight, is_gated=is_gated, maximum=maximum)

    def _why_not(self, weight: QuantisedWeight) -> str | None:
        if weight.codes.dtype == FLOAT8 and not self._has_float8:
            return "float8 needs compute capability 8.9"
        return why_not_packed(weight)

    def _packed(self, weight: QuantisedWeight, *, is_gated: bool, maximum: Maximum | None) -> CudaQuantised:
        products, gate = self._products, self.gate
        return CudaQuantised(weight, self._dtype, is_gated=is_gated, gate=gate, products=products, maximum=maximum)

    def rounding(self, quantise: Quantise) -> Quantise:
        return partial(rounding.int4_groups, piece=PIECE) if quantise is rounding.int4_groups else quantise

    def adapted(self, layer: LinearFormat, num_rows: int, tokens: TokenAdapters, *, is_gated: bool) -> AdaptedLinear:
        return CudaAdapted(layer, num_rows, tokens, self.device, self._dtype, is_gated=is_gated)

    def norm(self, weight: Tensor, bias: Tensor | None, eps: float, *, is_centred: bool) -> Norm:
        return FusedNorm(weight, bias, eps, is_centred=is_centred)

    def routing(self, num_experts: int, top_k: int, *, renormalise: bool, rule: RouterRule = SOFTMAX) -> Routing:
        return FusedRouting(num_experts, top_k, renormalise, rule)

    def gated_delta(self, weights: DeltaWeights) -> DeltaRule:
        return FusedDelta(weights)

    def short_conv(self, weights: ShortConvWeights) -> ConvRule:
        return FusedShortConv(weights)

    def mamba(self, weights: MambaWeights) -> MambaRule:
        return FusedMamba(weights)

    def grouped_dense(self, weights: Iterable[Tensor], count: int, *, is_gated: bool) -> GroupedLinear:
        return CudaGrouped(weights, count, is_gated=is_gated, gate=self.gate, products=self._products)

    def grouped_quantised(
        self, first: QuantisedWeight, weights: Iterable[Stored], count: int, *, is_gated: bool, maximum: Maximum | None
    ) -> GroupedLinear:
        why = self._why_not(first)
        if why is not None:
            self._left[why] = None
            self._why_not_captured = f"experts are called one by one: {why}"
            return super().grouped_quantised(first, weights, count, is_gated=is_gated, maximum=maximum)
        experts = []
        for weight in weights:
            if not isinstance(weight, QuantisedWeight) or self._why_not(weight) is not None:
                raise ValueError("the experts of one layer are not quantised alike: quantise all of them in one way")
            experts.append(self._packed(weight, is_gated=is_gated, maximum=maximum))
        together = grouped(experts, is_gated=is_gated, gate=self.gate, products=self._products)
        if together is None:
            self._why_not_captured = "experts are called one by one: they are stored in different layouts"
            return LoopedExperts(experts)
        return together

    def why_not_captured(self, spec: ArchSpec, quantised: str | None, world_size: int) -> str | None:
        return self._why_not_captured

    def measured_products(self) -> Sequence[str]:
        return self._chooser.found

    def num_compilations(self) -> int:
        return self._compilations.count

    def graph_capture(self, sizes: Sequence[int] | None) -> GraphCapture:
        return MeasuredCapture(sizes or SIZES, self._capture_stream, self._chooser)

    @cached_property
    def _capture_stream(self) -> torch.cuda.Stream:
        """The one stream of all captures: made when the first is, since kernels alone need no GPU."""
        return torch.cuda.Stream(self.device.torch_device)


class Compilations:
    """How many kernels Triton has compiled in this process since this was made; it tells the latest one alone.

    A kernel is compiled at the first launch of its kind, for seconds, in which a step takes as long. Who watches the
    steps tells that from a hang by this count.
    """

    def __init__(self) -> None:
        self.count = 0
        knobs.compilation.listener = self._compiled

    def _compiled(self, *, src: Any, times: Any, **about: Any) -> None:
        self.count += 1
        log.debug("compiled the kernel %s in %.1f s", src.name, times.total * MICROSECONDS)
