"""Recurrences by compiled kernels, for prompts and single tokens alike (`delta.cpp`, `mamba.cpp`, `short_conv.cpp`).

The order of the numbers within a head's memory is the kernels' own: what this backend writes, only it reads.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from server.arch.recurrences import GatedDelta, GateNorm, Mamba2
from server.backends.cpu.kernels import Function, Kernels
from server.backends.protocol import DeltaWeights, MambaWeights, ShortConvWeights, StepMeta
from server.backends.reference.mamba import StockMamba

TILE = 32  # columns of a memory, of which a head has whole tiles


class _Delta(ctypes.Structure):
    """`Delta` of delta.cpp."""

    _fields_ = (
        ("heads", ctypes.c_long),
        ("key_heads", ctypes.c_long),
        ("key_dim", ctypes.c_long),
        ("value_dim", ctypes.c_long),
        ("taps", ctypes.c_long),
        ("conv", ctypes.c_void_p),
        ("decay", ctypes.c_void_p),
        ("step_bias", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("eps", ctypes.c_float),
    )


def can_compute(kind: GatedDelta | Mamba2) -> bool:
    """Whether the kernels compute with such heads."""
    return (kind.head_dim if isinstance(kind, Mamba2) else kind.value_dim) % TILE == 0


class KernelDelta:
    """See `protocol.DeltaRule`."""

    def __init__(self, kernels: Kernels, weights: DeltaWeights):
        kind = weights.kind
        self._kernels = kernels
        self._width = kind.num_heads * kind.value_dim
        self._kept = [
            weights.conv.t().contiguous(),
            *map(Tensor.contiguous, (weights.decay, weights.step_bias, weights.norm)),
        ]
        sizes = (kind.num_heads, kind.num_key_heads, kind.key_dim, kind.value_dim, kind.conv)
        self._fields = _Delta(*sizes, *map(_address, self._kept), weights.eps)
        self._at = ctypes.addressof(self._fields)

    def __call__(self, qkvz: Tensor, ba: Tensor, state: Tensor, meta: StepMeta) -> Tensor:
        out = qkvz.new_empty(len(qkvz), self._width)
        _advance(self._kernels.delta[qkvz.dtype], self._at, (qkvz, ba), state, meta, (out,))
        return out


class _ShortConv(ctypes.Structure):
    """`ShortConv` of short_conv.cpp."""

    _fields_ = (
        ("channels", ctypes.c_long),
        ("taps", ctypes.c_long),
        ("filters", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class KernelShortConv:
    """See `protocol.ConvRule`."""

    def __init__(self, kernels: Kernels, weights: ShortConvWeights):
        kind = weights.kind
        self._kernels = kernels
        self._width = kind.channels
        self._kept = [weights.conv.t().contiguous(), weights.bias]
        self._fields = _ShortConv(kind.channels, kind.conv, *map(_address, self._kept))
        self._at = ctypes.addressof(self._fields)

    def __call__(self, bcx: Tensor, state: Tensor, meta: StepMeta) -> Tensor:
        out = bcx.new_empty(len(bcx), self._width)
        _advance(self._kernels.short_conv[bcx.dtype], self._at, (bcx,), state, meta, (out,))
        return out


class _Mamba(ctypes.Structure):
    """`Mamba` of mamba.cpp."""

    _fields_ = (
        *((name, ctypes.c_long) for name in ("heads", "groups", "head_dim", "key_dim", "taps", "norm_kind")),
        *((name, ctypes.c_void_p) for name in ("conv", "conv_bias", "decay", "step_bias", "skip", "norm")),
        *((name, ctypes.c_float) for name in ("eps", "gate_scale", "step_scale", "least_step", "most_step")),
    )


NORM_KINDS = {GateNorm.NONE: 0, GateNorm.BEHIND: 1, GateNorm.BEFORE: 2}  # as in mamba.cpp


class KernelMamba(StockMamba):
    """See `protocol.MambaRule`. A norm over what several ranks have is left to stock operators."""

    def __init__(self, kernels: Kernels, weights: MambaWeights):
        super().__init__(weights)
        kind = weights.kind
        self._kernels = kernels
        vectors = (weights.conv_bias, weights.decay, weights.step_bias, weights.skip, weights.norm)
        self._kept = [weights.conv.t().contiguous(), *(v if v is None else v.contiguous() for v in vectors)]
        sizes = (kind.num_heads, kind.num_groups, kind.head_dim, kind.key_dim, kind.conv, NORM_KINDS[kind.norm])
        numbers = (kind.eps, kind.scales[0], kind.scales[-1], kind.least_step, kind.most_step)
        self._fields = _Mamba(*sizes, *map(_address, self._kept), *numbers)
        self._at = ctypes.addressof(self._fields)

    def __call__(self, zxbcdt: Tensor, state: Tensor, meta: StepMeta) -> Tensor:
        kind, tokens = self._kind, len(zxbcdt)
        mixed = zxbcdt.new_empty(tokens, kind.channels, dtype=torch.float32)
        read = zxbcdt.new_empty(tokens, kind.inner, dtype=torch.float32)
        out = zxbcdt.new_empty(tokens, kind.inner) if self._weights.sum_over_ranks is None else None
        _advance(self._kernels.mamba[zxbcdt.dtype], self._at, (zxbcdt,), state, meta, (mixed, read, out))
        return self._finished(read, zxbcdt[:, : kind.inner]).to(zxbcdt.dtype) if out is None else out


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _advance(
    kernel: Function,
    at: int,
    inputs: tuple[Tensor, ...],
    state: Tensor,
    meta: StepMeta,
    outputs: tuple[Tensor | None, ...],
) -> None:
    """Call a kernel of a recurrence. at: address of what it knows of its layer."""
    assert meta.rows is not None, "steps of models with recurrent layers name their rows"
    sequences = len(meta.rows)
    starts = None if sequences == meta.num_decodes else meta.starts.long()
    kernel(
        at,
        *(tensor.data_ptr() for tensor in inputs),
        state.data_ptr(),
        state.stride(0),
        meta.rows.data_ptr(),
        meta.positions.data_ptr(),
        _address(starts),
        *map(_address, outputs),
        sequences,
        torch.get_num_threads(),
    )
