"""A mixture's experts by compiled kernels: one call for all of them.

The kernel reads where each expert's tokens end, so that nothing of it is decided in Python and a decode step can be
captured. Each expert with tokens is one product as in `layers.py`; a result is bit for bit the same whatever else is in
the step.

Shapes: T tokens, D input features, F output features, E experts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from server.arch.spec import Activation
from server.backends.cpu.codes import CodeFormat
from server.backends.cpu.kernels import Kernels
from server.backends.cpu.layers import ACTIVATIONS, PanelFormat


class KernelExperts:
    """A `GroupedLinear` of panels, which are all dense or all quantised."""

    def __init__(self, kernels: Kernels, experts: Sequence[PanelFormat] | Sequence[CodeFormat]):
        self._experts = experts
        grouped = kernels.grouped_codes if isinstance(experts[0], CodeFormat) else kernels.grouped
        self._table = (ctypes.c_void_p * len(experts))(*(expert.address for expert in experts))
        self._grouped = grouped[experts[0].dtype]
        self._outputs = experts[0].outputs

    @property
    def nbytes(self) -> int:
        return sum(expert.nbytes for expert in self._experts)

    @property
    def memory(self) -> Sequence[Tensor]:
        return [tensor for expert in self._experts for tensor in expert.memory]

    def moved(self) -> None:
        for expert in self._experts:
            expert.moved()

    def __call__(self, x: Tensor, ends: Tensor, activation: Activation | None = None) -> Tensor:
        x = x if x.is_contiguous() else x.contiguous()
        out = x.new_empty(x.shape[0], self._outputs)
        self._grouped(
            ctypes.addressof(self._table),
            len(self._experts),
            ends.data_ptr(),
            x.data_ptr(),
            out.data_ptr(),
            ACTIVATIONS[activation],
            torch.get_num_threads(),
        )
        return out
