"""Attention over the paged KV cache: one interface, several backends.

`reference.py` supports everything and defines correct. `padded.py` is fast on any device with stock torch operators,
`paged.py` on NVIDIA GPUs with kernels of its own.
`choose` picks one; the start-up table shows it.
"""

from __future__ import annotations

import torch

from server.attention.interface import Attention, MakeAttention, Scores, StepMeta
from server.attention.padded import PaddedAttention
from server.attention.reference import ReferenceAttention

__all__ = ["Attention", "MakeAttention", "Scores", "StepMeta", "choose"]


def choose(device: torch.device, *, disable_custom_kernels: bool) -> MakeAttention:
    """The fastest backend for `device`, or the reference when custom kernels are disabled."""
    if disable_custom_kernels:
        return ReferenceAttention
    if device.type == "cuda":
        from server.attention import paged  # imports Triton, which a CPU server does not have

        if paged.can_run_on(device):
            return paged.PagedAttention
    return PaddedAttention
