"""The backend for CPUs: kernels in C++, compiled when a server first starts on a machine, or before for all kinds.

They are optional. Everything here has an equal in stock torch operators (`backends/reference/`), against which it is
tested, and which serves where there is no compiler or `--cpu-kernels` is none; there only the linear layers have a
faster form (`OneDnnFormat`). Left out: dtypes other than float32 and bfloat16, which the reference backend serves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from host import cpu_kinds
from host.cpu_kinds import Kind
from server.arch.spec import ArchSpec
from server.backends.cpu import build
from server.backends.cpu.adapters import PanelAdapted, PanelAdaptedExperts, StackedAdapted
from server.backends.cpu.attention import KernelAttention, can_read
from server.backends.cpu.build import COMPILERS, BuildError, compiled_library
from server.backends.cpu.device import CpuDevice
from server.backends.cpu.graph import CpuGraphCapture
from server.backends.cpu.kernels import Kernels, Library
from server.backends.cpu.layers import KernelExperts, KernelNorm, OneDnnFormat, PanelFormat, kernel_gate, onednn_packs
from server.backends.cpu.logits import KernelLogits
from server.backends.cpu.memory import Arena, Pool
from server.backends.cpu.quantised import CodeFormat, LevelFormat, int4_groups, takes
from server.backends.cpu.recurrence import KernelDelta, KernelMamba, KernelShortConv, can_compute
from server.backends.cpu.routing import KernelRouting
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
from server.backends.reference import ReferenceBackend
from server.backends.reference.linear import LoopedExperts, StackedLinear
from server.quantisation import rounding
from server.quantisation.kv import AS_COMPUTED, Int8, KvFormat
from server.quantisation.stored import Quantise, QuantisedWeight, Stored
from server.ranks import shared_memory
from server.ranks.collectives import Shard

DTYPES = (torch.float32, torch.bfloat16)


class CpuBackend(ReferenceBackend):
    """Compiled kernels for attention, dense linear layers, norms, gates and logits, and graphs of their calls."""

    name = "cpu"

    def __init__(self, kernels: Kernels, dtype: torch.dtype, *, rounds_inputs: bool = True):
        super().__init__(CpuDevice())
        self._kernels = kernels
        self._dtype = dtype
        self._rounds_inputs = rounds_inputs
        self._arena = Arena()
        self._pool = Pool()  # for adapters, which come and go
        self._calls_experts_one_by_one = False  # those that it has made a layer of
        self.logits: Logits = KernelLogits(kernels)
        self.gate = partial(kernel_gate, kernels)

    @property
    def description(self) -> str:
        # Kept keys and values are told apart by this sentence as well (`loading.tiers`).
        inputs = "" if self._rounds_inputs else "; inputs of integer weights as they are"
        return f"compiled kernels ({self._kernels.instructions(self._dtype)}){inputs}"

    def attention(self, scores: Scores, cache: KvFormat = AS_COMPUTED) -> Attention:
        return KernelAttention(self._kernels, scores, cache)

    def block_parts(self, kv: Tensor, cache: KvFormat, head_dim: int) -> list[Tensor]:
        if cache.name != Int8.name or not can_read(self._dtype, head_dim):
            return super().block_parts(kv, cache, head_dim)
        _, blocks, kv_heads, block_size, _ = kv.shape
        codes = blocks * kv_heads * block_size * head_dim  # of all blocks; their scales are behind them
        return [some.view(blocks, -1) for half in kv.flatten(1) for some in (half[:codes], half[codes:])]

    def dense(self, weight: Tensor, *, is_gated: bool) -> LinearFormat:
        return PanelFormat(self._kernels, self._arena, weight, is_gated=is_gated)

    def quantised(self, weight: QuantisedWeight, *, is_gated: bool, maximum: Maximum | None) -> LinearFormat:
        if self._dtype == torch.float32 and weight.inputs is not None and not takes(weight, self._dtype):
            # float32 is for comparisons: exact, not fast
            return super().quantised(weight, is_gated=is_gated, maximum=maximum)
        is_taken = takes(weight, self._dtype, rounds_inputs=self._rounds_inputs)
        format = CodeFormat if is_taken else LevelFormat
        return format(self._kernels, self._arena, weight, self._dtype, is_gated=is_gated, maximum=maximum)

    def rounding(self, quantise: Quantise) -> Quantise:
        return partial(int4_groups, self._kernels) if quantise is rounding.int4_groups else quantise

    def adapted(self, layer: LinearFormat, num_rows: int, tokens: TokenAdapters, *, is_gated: bool) -> AdaptedLinear:
        if isinstance(layer, PanelFormat):
            return PanelAdapted(self._kernels, self._pool, layer, num_rows, tokens)
        if isinstance(layer, StackedLinear) and all(isinstance(part, PanelFormat) for part in layer.parts):
            heights = [part.outputs for part in layer.parts if isinstance(part, PanelFormat)]
            parts = [self.adapted(part, num_rows, tokens, is_gated=False) for part in layer.parts]
            return StackedAdapted(parts, heights, is_gated=is_gated)
        return super().adapted(layer, num_rows, tokens, is_gated=is_gated)

    def adapted_experts(
        self, layer: GroupedLinear, num_rows: int, tokens: TokenAdapters, *, is_gated: bool
    ) -> AdaptedExperts:
        if isinstance(layer, KernelExperts):
            return PanelAdaptedExperts(self._kernels, self._pool, layer, num_rows, tokens)
        return super().adapted_experts(layer, num_rows, tokens, is_gated=is_gated)

    def norm(self, weight: Tensor, bias: Tensor | None, eps: float, *, is_centred: bool) -> Norm:
        return KernelNorm(self._kernels, weight, bias, eps, is_centred=is_centred)

    def routing(self, num_experts: int, top_k: int, *, renormalise: bool, rule: RouterRule = SOFTMAX) -> Routing:
        return KernelRouting(self._kernels, num_experts, top_k, renormalise, rule)

    def grouped_dense(self, weights: Iterable[Tensor], count: int, *, is_gated: bool) -> GroupedLinear:
        experts = [PanelFormat(self._kernels, self._arena, weight, is_gated=is_gated) for weight in weights]
        return KernelExperts(experts)

    def grouped_quantised(
        self, first: QuantisedWeight, weights: Iterable[Stored], count: int, *, is_gated: bool, maximum: Maximum | None
    ) -> GroupedLinear:
        experts = [self.linear(weight, is_gated=is_gated, maximum=maximum) for weight in weights]
        in_codes = [expert for expert in experts if isinstance(expert, CodeFormat) and expert.maximum is None]
        expanded = [expert for expert in experts if isinstance(expert, LevelFormat) and not expert.rounds_inputs]
        if count in (len(in_codes), len(expanded)):
            return KernelExperts(in_codes or expanded)
        self._calls_experts_one_by_one = True
        return LoopedExperts(experts)

    def gated_delta(self, weights: DeltaWeights) -> DeltaRule:
        return KernelDelta(self._kernels, weights) if can_compute(weights.kind) else super().gated_delta(weights)

    def short_conv(self, weights: ShortConvWeights) -> ConvRule:
        return KernelShortConv(self._kernels, weights)

    def mamba(self, weights: MambaWeights) -> MambaRule:
        return KernelMamba(self._kernels, weights) if can_compute(weights.kind) else super().mamba(weights)

    def joined(self, shard: Shard) -> Shard:
        return shared_memory.join(shard, self._kernels, self.device.torch_device)

    def why_not_captured(self, spec: ArchSpec, quantised: str | None, world_size: int) -> str | None:
        if world_size > 1:
            return "ranks on CPUs speak to each other within a step"
        latent = spec.layers[0].latent
        if not can_read(self._dtype, spec.head_dim, latent.rank if latent else 0):
            return f"attention with {spec.head_dim} features a head needs the sequences' lengths on the host"
        if self._calls_experts_one_by_one:
            return f"experts in {quantised} are called one by one"
        return None

    def graph_capture(self, sizes: Sequence[int] | None) -> GraphCapture:
        return CpuGraphCapture(self._kernels)


class OneDnnBackend(ReferenceBackend):
    """Stock operators, with dense weights in the order in which oneDNN reads them: where nothing could be compiled."""

    name = "onednn"

    def __init__(self, notes: Sequence[str]):
        super().__init__(CpuDevice(), notes)

    def dense(self, weight: Tensor, *, is_gated: bool) -> LinearFormat:
        return OneDnnFormat(weight, is_gated=is_gated)


def choose(
    dtype: torch.dtype,
    compilers: Sequence[str] = COMPILERS,
    *,
    kernels: str = cpu_kinds.AUTO,
    inputs: str = cpu_kinds.ROUNDED,
) -> ReferenceBackend:
    """The fastest backend for a CPU that computes in `dtype`. Takes seconds where nothing is compiled yet.

    kernels: of which kind, as `--cpu-kernels`; inputs: as `--cpu-inputs`. Raises ValueError where kernels that are
    named cannot be had.
    """
    reason = f"there are no compiled kernels for {str(dtype).removeprefix('torch.')}"
    if kernels == cpu_kinds.NONE:
        reason = "--cpu-kernels is none"
    elif dtype in DTYPES:
        try:
            found = load(compilers, kind=cpu_kinds.NAMED.get(kernels, cpu_kinds.NATIVE))
            return CpuBackend(found, dtype, rounds_inputs=inputs == cpu_kinds.ROUNDED)
        except BuildError as error:
            if kernels in cpu_kinds.NAMED:
                raise ValueError(f"--cpu-kernels is {kernels}: {error}") from error
            reason = f"the compiled CPU kernels are not used: {error}"
    return OneDnnBackend([reason]) if onednn_packs(dtype) else ReferenceBackend(CpuDevice(), [reason])


def usable(kernels: str, compilers: Sequence[str] = COMPILERS, shipped: Path = build.PORTABLE) -> str:
    """The same, as `--cpu-kernels`, or `none` where they cannot be had."""
    if kernels == cpu_kinds.NONE:
        return kernels
    try:
        load(compilers, shipped, cpu_kinds.NAMED.get(kernels, cpu_kinds.NATIVE))
    except BuildError:
        return cpu_kinds.NONE
    return kernels


def load(
    compilers: Sequence[str] = COMPILERS, shipped: Path = build.PORTABLE, kind: Kind = cpu_kinds.NATIVE
) -> Kernels:
    """The compiled kernels of a kind, by default all that this machine can do: those in `shipped`, or its own.

    Raises BuildError, which says why there are none.
    """
    if problem := kind.why_not():
        raise BuildError(problem)
    kinds = cpu_kinds.KINDS if kind == cpu_kinds.NATIVE else (kind,)
    library = build.portable_library(shipped, kinds=kinds)
    return Kernels(Library(library or compiled_library(compilers=compilers, kind=kind)))
