"""Attention over the paged KV cache: one interface, several backends.

`reference.py` supports everything and defines correct. `padded.py` is fast on any device with stock torch operators.
`choose` picks one and says which; the start-up table shows it.
"""

from __future__ import annotations

from server.attention.interface import Attention, StepMeta
from server.attention.padded import PaddedAttention
from server.attention.reference import ReferenceAttention

__all__ = ["Attention", "StepMeta", "choose"]


def choose(*, slopes: list[float], scale: float, disable_custom_kernels: bool) -> Attention:
    """The fastest backend that supports the model, or the reference when custom kernels are disabled.

    slopes: ALiBi slope of each local head; scale: what scores are multiplied by.
    """
    backend = ReferenceAttention if disable_custom_kernels else PaddedAttention
    return backend(slopes, scale)
