"""Recurrences by compiled kernels, for prompts and single tokens alike (see `delta.cpp` and `short_conv.cpp`).

The order of the numbers within a head's memory is the kernels' own: what this backend writes, only it reads.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from server.arch.recurrences import GatedDelta
from server.backends.cpu.kernels import Function, Kernels
from server.backends.protocol import DeltaWeights, ShortConvWeights, StepMeta

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


def can_compute(kind: GatedDelta) -> bool:
    """Whether the kernel computes with such heads."""
    return kind.value_dim % TILE == 0


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


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _advance(
    kernel: Function, at: int, inputs: tuple[Tensor, ...], state: Tensor, meta: StepMeta, outputs: tuple[Tensor, ...]
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
        *(tensor.data_ptr() for tensor in outputs),
        sequences,
        torch.get_num_threads(),
    )
