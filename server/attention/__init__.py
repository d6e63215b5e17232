"""Attention over the paged KV cache: one interface, several backends.

`reference.py` supports everything and defines correct. `padded.py` is fast on any device with stock torch operators.
`choose` picks one; the start-up table shows it.
"""

from __future__ import annotations

from server.attention.interface import Attention, MakeAttention, Scores, StepMeta
from server.attention.padded import PaddedAttention
from server.attention.reference import ReferenceAttention

__all__ = ["Attention", "MakeAttention", "Scores", "StepMeta", "choose"]


def choose(*, disable_custom_kernels: bool) -> MakeAttention:
    """The fastest backend, or the reference when custom kernels are disabled."""
    return ReferenceAttention if disable_custom_kernels else PaddedAttention
