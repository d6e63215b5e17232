"""Weights in 8 bits: one scale per output feature, converted from the dense weight while loading.

Symmetric round-to-nearest over each row (as in LLM.int8(), Dettmers et al. 2022, arXiv 2208.07339, without its outlier
path). Activations stay in the model's dtype, so this saves memory and bandwidth, not arithmetic.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from server.backends.reference.activation import Gate, stock_gate
from server.backends.reference.linear import StockFormat


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [F, D] → its values in int8 [F, D], and their scale [F] in its dtype."""
    # In float32: the largest magnitude of a row must map to 127 exactly, whatever the checkpoint's dtype.
    exact = weight.float()
    scale = exact.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (exact / scale.unsqueeze(1)).round().to(torch.int8), scale.to(weight.dtype)


class Int8Format(StockFormat):
    """weight ≈ quantised * scale, with quantised [F, D] in int8 and scale [F]."""

    def __init__(self, weight: Tensor, *, is_gated: bool = False, gate: Gate = stock_gate):
        super().__init__(is_gated=is_gated, gate=gate)
        self._quantised, self._scale = quantise(weight)
        # The fused kernel of stock torch exists for the CPU in bfloat16 alone.
        self._fused = weight.device.type == "cpu" and weight.dtype == torch.bfloat16

    @property
    def nbytes(self) -> int:
        return self._quantised.nbytes + self._scale.nbytes

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._fused:
            y = torch._weight_int8pack_mm(x, self._quantised, self._scale)
        else:
            y = F.linear(x, self._quantised.to(x.dtype)) * self._scale
        return y if bias is None else y + bias
