"""Attention over the paged KV cache: one interface, several backends.

`reference.py` supports everything and defines correct. `padded.py` is fast on any device with stock torch operators,
`native.py` on CPUs and `paged.py` on NVIDIA GPUs with kernels of their own.
`choose` picks one; the start-up table shows it.
"""

from __future__ import annotations

import torch

from server.attention.interface import Attention, MakeAttention, Scores, StepMeta, split_heads
from server.attention.native import NativeBackend
from server.attention.padded import PaddedAttention
from server.attention.reference import ReferenceAttention
from server.native import Kernels

__all__ = ["Attention", "MakeAttention", "Scores", "StepMeta", "choose", "split_heads"]


def choose(device: torch.device, kernels: Kernels | None, *, disable_custom_kernels: bool) -> MakeAttention:
    """The fastest backend for `device`, or the reference when custom kernels are disabled.

    kernels: compiled for the CPU, None where they are not.
    """
    if disable_custom_kernels:
        return ReferenceAttention
    if kernels is not None:
        return NativeBackend(kernels)
    if device.type == "cuda":
        from server.attention import paged  # imports Triton, which a CPU server does not have

        if paged.can_run_on(device):
            return paged.PagedAttention
    return PaddedAttention
