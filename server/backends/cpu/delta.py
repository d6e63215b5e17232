"""The gated delta rule by a compiled kernel, for prompts and single tokens alike (see `delta.cpp`).

The order of the numbers within a head's memory is the kernel's own: what this backend writes, only it reads.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from server.arch.spec import GatedDelta
from server.backends.cpu.kernels import Kernels
from server.backends.protocol import DeltaWeights, StepMeta

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
        self._kept = [weights.conv.t().contiguous(), weights.decay, weights.step_bias, weights.norm]
        sizes = (kind.num_heads, kind.num_key_heads, kind.key_dim, kind.value_dim, kind.conv)
        self._fields = _Delta(*sizes, *(tensor.contiguous().data_ptr() for tensor in self._kept), weights.eps)
        self._at = ctypes.addressof(self._fields)

    def __call__(self, qkvz: Tensor, ba: Tensor, state: Tensor, meta: StepMeta) -> Tensor:
        assert meta.rows is not None, "steps of models with recurrent layers name their rows"
        sequences = len(meta.rows)
        starts = None if sequences == meta.num_decodes else meta.starts.long()
        out = qkvz.new_empty(len(qkvz), self._width)
        self._kernels.delta[qkvz.dtype](
            self._at,
            qkvz.data_ptr(),
            ba.data_ptr(),
            state.data_ptr(),
            state.stride(0),
            meta.rows.data_ptr(),
            meta.positions.data_ptr(),
            None if starts is None else starts.data_ptr(),
            out.data_ptr(),
            sequences,
            torch.get_num_threads(),
        )
        return out
