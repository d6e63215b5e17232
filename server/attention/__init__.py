"""Attention over the paged KV cache: one interface, several backends.

`reference.py` supports everything and defines correct. `padded.py` is fast on any device with stock torch operators.
`choose` picks one and says which; the start-up table shows it.
"""

from __future__ import annotations

from server.attention.interface import Attention, Scores, StepMeta
from server.attention.padded import PaddedAttention
from server.attention.reference import ReferenceAttention

__all__ = ["Attention", "Scores", "StepMeta", "choose"]


def choose(scores: Scores, *, disable_custom_kernels: bool) -> Attention:
    """The fastest backend that supports the model, or the reference when custom kernels are disabled."""
    return ReferenceAttention(scores) if disable_custom_kernels else PaddedAttention(scores)
