"""Dense weights in the order in which oneDNN's CPU kernels read them, rearranged once while loading.

`F.linear` lets oneDNN rearrange a bfloat16 weight at every call, which costs more than the product itself when there
are few tokens: at 1 to 32 tokens the packed weight is 1.4 to 2.6 times as fast, and never slower up to 3,200.
"""

from __future__ import annotations

import torch
from torch import Tensor

from server.backends.reference.linear import StockFormat

# Tokens that the layout is chosen for: a decode batch. The choice makes no difference that could be measured.
TYPICAL_TOKENS = 32


class OneDnnFormat(StockFormat):
    """A weight [F, D] that only oneDNN can read; the original is not kept."""

    def __init__(self, weight: Tensor, *, is_gated: bool = False):
        super().__init__(is_gated=is_gated)
        self.nbytes = weight.nbytes
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_TOKENS)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return product


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch packs weights of `dtype` on this processor.

    That is the check which the operator itself makes. It heeds what ONEDNN_MAX_CPU_ISA leaves of the processor: with
    AVX2 alone there is nothing for bfloat16.
    """
    if dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
