"""`CudaBackend`: what the reference backend does, with kernels of its own. Importing it imports Triton."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from server.arch.spec import ArchSpec
from server.backends.cuda.attention import PagedAttention
from server.backends.cuda.choice import Chooser, EventClock, MeasuredCapture
from server.backends.cuda.fused import FusedNorm, fused_gate
from server.backends.cuda.graph import SIZES
from server.backends.cuda.kernels.routing import FusedRouting
from server.backends.cuda.linear import CudaDense, CudaGrouped, CudaGroupedInt8, CudaInt8, Products
from server.backends.cuda.logits import KernelLogits
from server.backends.protocol import Attention, Device, GraphCapture, GroupedLinear, Norm, Routing, Scores
from server.backends.reference import ReferenceBackend


class CudaBackend(ReferenceBackend):
    """Triton kernels and CUDA graphs. See `protocol.Backend`.

    measures: whether matrix products in 16 bits are computed in the way that this GPU was seen to be fastest at;
    otherwise in the usual one, and a restart gives the same tokens in bfloat16 too. float32, with which one compares,
    always is.
    """

    name = "cuda"
    gate = staticmethod(fused_gate)

    def __init__(self, device: Device, dtype: torch.dtype, *, measures: bool = True):
        super().__init__(device)
        self.logits = KernelLogits()
        clock = EventClock(device.torch_device) if measures and dtype != torch.float32 else None
        self._chooser = Chooser(clock)
        is_older = device.torch_device.type == "cuda" and torch.cuda.get_device_capability(device.torch_device) < (9, 0)
        self._products = Products(self._chooser, has_grouped_mm=not is_older)
        self.formats = {
            "dense": partial(CudaDense, gate=self.gate, products=self._products),
            "int8": partial(CudaInt8, gate=self.gate, products=self._products),
        }

    @property
    def description(self) -> str:
        return "Triton kernels"

    def attention(self, scores: Scores) -> Attention:
        return PagedAttention(scores)

    def norm(self, weight: Tensor, bias: Tensor | None, eps: float, *, is_centred: bool) -> Norm:
        return FusedNorm(weight, bias, eps, is_centred=is_centred)

    def routing(self, num_experts: int, top_k: int, *, renormalise: bool) -> Routing:
        return FusedRouting(num_experts, top_k, renormalise)

    def grouped(self, weights: Iterable[Tensor], count: int, format: str, *, is_gated: bool = False) -> GroupedLinear:
        if format == "int8":
            return CudaGroupedInt8(weights, count, is_gated=is_gated, products=self._products)
        return CudaGrouped(weights, count, is_gated=is_gated, gate=self.gate, products=self._products)

    def why_not_captured(self, spec: ArchSpec, format: str, world_size: int) -> str | None:
        return None

    def graph_capture(self, sizes: Sequence[int] | None) -> GraphCapture:
        return MeasuredCapture(sizes or SIZES, self._capture_stream, self._chooser)

    @cached_property
    def _capture_stream(self) -> torch.cuda.Stream:
        """The one stream of all captures: made when the first is, since kernels alone need no GPU."""
        return torch.cuda.Stream(self.device.torch_device)
