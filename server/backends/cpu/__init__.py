"""The backend for CPUs: kernels in C++, compiled when a server first starts on a machine.

They are optional. Everything here has an equal in stock torch operators (`backends/reference/`), against which it is
tested, and which serves where there is no compiler; there only the linear layers have a faster form of their own
(`onednn.py`). Left out: dtypes other than float32 and bfloat16, which the reference backend serves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from server.arch.spec import ArchSpec
from server.backends.cpu.attention import KernelAttention, can_read
from server.backends.cpu.build import COMPILERS, BuildError, build
from server.backends.cpu.device import CpuDevice
from server.backends.cpu.experts import KernelExperts
from server.backends.cpu.graph import CpuGraphCapture
from server.backends.cpu.kernels import Kernels
from server.backends.cpu.layers import KernelNorm, PanelFormat, kernel_gate
from server.backends.cpu.logits import KernelLogits
from server.backends.cpu.memory import Arena
from server.backends.cpu.onednn import OneDnnFormat, can_pack
from server.backends.protocol import Attention, GraphCapture, GroupedLinear, Logits, MakeLinear, Norm, Scores
from server.backends.reference import ReferenceBackend
from server.backends.reference.int8 import Int8Format

DTYPES = (torch.float32, torch.bfloat16)


class CpuBackend(ReferenceBackend):
    """Compiled kernels for attention, dense linear layers, norms, gates and logits, and graphs of their calls."""

    name = "cpu"

    def __init__(self, kernels: Kernels, dtype: torch.dtype):
        super().__init__(CpuDevice())
        self._kernels = kernels
        self._dtype = dtype
        self._arena = Arena()
        self.logits: Logits = KernelLogits(kernels)
        self.formats: dict[str, MakeLinear] = {
            "dense": partial(PanelFormat, kernels, self._arena),
            "int8": partial(Int8Format, gate=partial(kernel_gate, kernels)),
        }

    @property
    def description(self) -> str:
        return f"compiled kernels ({self._kernels.instructions(self._dtype)})"

    def attention(self, scores: Scores) -> Attention:
        return KernelAttention(self._kernels, scores)

    def norm(self, weight: Tensor, bias: Tensor | None, eps: float, *, is_centred: bool) -> Norm:
        return KernelNorm(self._kernels, weight, bias, eps, is_centred=is_centred)

    def grouped(self, weights: Iterable[Tensor], count: int, format: str, *, is_gated: bool = False) -> GroupedLinear:
        if format != "dense":
            return super().grouped(weights, count, format, is_gated=is_gated)
        experts = [PanelFormat(self._kernels, self._arena, weight, is_gated=is_gated) for weight in weights]
        return KernelExperts(self._kernels, experts)

    def why_not_captured(self, spec: ArchSpec, format: str, world_size: int) -> str | None:
        if world_size > 1:
            return "ranks on CPUs speak to each other within a step"
        if not can_read(self._dtype, spec.head_dim):
            return f"attention with {spec.head_dim} features a head needs the sequences' lengths on the host"
        if spec.has_experts and format != "dense":
            return f"experts in {format} are called one by one"
        return None

    def graph_capture(self, sizes: Sequence[int] | None) -> GraphCapture:
        return CpuGraphCapture(self._kernels)


class OneDnnBackend(ReferenceBackend):
    """Stock operators, with dense weights in the order in which oneDNN reads them: where nothing could be compiled."""

    name = "onednn"

    def __init__(self, notes: Sequence[str]):
        super().__init__(CpuDevice(), notes)
        self.formats = {**self.formats, "dense": OneDnnFormat}


def choose(dtype: torch.dtype, compilers: Sequence[str] = COMPILERS) -> ReferenceBackend:
    """The fastest backend for a CPU that computes in `dtype`. Takes seconds where nothing is compiled yet."""
    reason = f"there are no compiled kernels for {str(dtype).removeprefix('torch.')}"
    if dtype in DTYPES:
        try:
            return CpuBackend(load(compilers), dtype)
        except BuildError as error:
            reason = f"the compiled CPU kernels are not used: {error}"
    return OneDnnBackend([reason]) if can_pack(dtype) else ReferenceBackend(CpuDevice(), [reason])


def load(compilers: Sequence[str] = COMPILERS) -> Kernels:
    """The compiled kernels. Raises BuildError, which says why there are none."""
    return Kernels(build(compilers=compilers))
