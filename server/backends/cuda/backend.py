"""`CudaBackend`: what the reference backend does, with kernels of its own. Importing it imports Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from server.arch.spec import ArchSpec
from server.backends.cuda import has_grouped_products, why_not_captured
from server.backends.cuda.attention import PagedAttention
from server.backends.cuda.fused import FusedNorm, fused_gate
from server.backends.cuda.graph import SIZES, CudaGraphCapture
from server.backends.cuda.logits import KernelLogits
from server.backends.protocol import Attention, Device, GraphCapture, Norm, Scores
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

    def why_not_captured(self, spec: ArchSpec, format: str, world_size: int) -> str | None:
        return why_not_captured(spec, format, has_grouped_products(self.device.torch_device, self._dtype))

    def graph_capture(self, sizes: Sequence[int] | None) -> GraphCapture:
        return CudaGraphCapture(sizes or SIZES)
