"""`CudaBackend`: what the reference backend does, with kernels of its own. Importing it imports Triton."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from server.arch.spec import ArchSpec
from server.backends.cuda import has_grouped_products, why_not_captured
from server.backends.cuda.attention import PagedAttention
from server.backends.cuda.fused import FusedNorm, fused_gate
from server.backends.cuda.graph import SIZES, CudaGraphCapture
from server.backends.cuda.kernels.routing import FusedRouting
from server.backends.cuda.logits import KernelLogits
from server.backends.protocol import Attention, Device, GraphCapture, Norm, Routing, Scores
from server.backends.reference import ReferenceBackend


class CudaBackend(ReferenceBackend):
    """Triton kernels and CUDA graphs. See `protocol.Backend`."""

    name = "cuda"
    gate = staticmethod(fused_gate)

    def __init__(self, device: Device, dtype: torch.dtype):
        super().__init__(device)
        self.logits = KernelLogits()
        self._dtype = dtype

    @property
    def description(self) -> str:
        return "Triton kernels"

    def attention(self, scores: Scores) -> Attention:
        return PagedAttention(scores)

    def norm(self, weight: Tensor, bias: Tensor | None, eps: float, *, is_centred: bool) -> Norm:
        return FusedNorm(weight, bias, eps, is_centred=is_centred)

    def routing(self, num_experts: int, top_k: int, *, renormalise: bool) -> Routing:
        return FusedRouting(num_experts, top_k, renormalise)

    def why_not_captured(self, spec: ArchSpec, format: str, world_size: int) -> str | None:
        return why_not_captured(spec, format, has_grouped_products(self.device.torch_device, self._dtype))

    def graph_capture(self, sizes: Sequence[int] | None) -> GraphCapture:
        return CudaGraphCapture(sizes or SIZES, self._capture_stream)

    @cached_property
    def _capture_stream(self) -> torch.cuda.Stream:
        """The one stream of all captures: made when the first is, since kernels alone need no GPU."""
        return torch.cuda.Stream(self.device.torch_device)
