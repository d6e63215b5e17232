"""Rounds dense weights and the inputs of products to 8 bits.

int8 is symmetric round-to-nearest with one scale for each row (Jacob et al. 2017, arXiv 1712.05877; for inputs as
LLM.int8(), Dettmers et al. 2022, arXiv 2208.07339, without its outlier path). float8 is E4M3 (Micikevicius et al. 2022,
arXiv 2209.05433), whose largest number is 448.

Shapes: F output features, D input features, T tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from server.quant.stored import QuantisedWeight, RoundedInputs

MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
TINY = 1e-12  # for a row of zeros
PIECE = 1 << 18  # weights that are looked at together: a head in float32 would be gigabytes


def int8_rows(weight: Tensor) -> QuantisedWeight:
    """A dense weight [F, D] in int8, one scale for each row; inputs are rounded to int8 as well."""
    return _rows(weight, torch.int8)


def int8_weights(weight: Tensor) -> QuantisedWeight:
    """A dense weight [F, D] in int8, one scale for each row; inputs are taken as they are."""
    return replace(int8_rows(weight), inputs=None)


def float8_rows(weight: Tensor) -> QuantisedWeight:
    """A dense weight [F, D] in float8, one scale for each row; inputs are rounded to float8 as well."""
    return _rows(weight, torch.float8_e4m3fn)


def _rows(weight: Tensor, dtype: torch.dtype) -> QuantisedWeight:
    outputs, inputs = weight.shape
    codes = torch.empty(outputs, inputs, dtype=dtype, device=weight.device)
    scale = torch.empty(outputs, 1, device=weight.device)
    step = max(1, PIECE // inputs)
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        exact = weight[rows].float()
        scale[rows] = scale_of(exact.abs().amax(dim=1, keepdim=True), dtype)
        codes[rows] = rounded(exact / scale[rows], dtype)
    groups = torch.zeros(inputs, dtype=torch.int64, device=weight.device)
    return QuantisedWeight(codes, 8, scale, groups, inputs=RoundedInputs(dtype))


def scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """What numbers of at most this magnitude are divided by, to be rounded to `dtype`: float32."""
    return largest.float().clamp(min=TINY) / MOST[dtype]


def rounded(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest numbers of `dtype`, ties to even; what is out of its range becomes its end."""
    most = MOST[dtype]
    if dtype == torch.int8:
        return exact.round().clamp(-most - 1, most).to(dtype)
    return exact.clamp(-most, most).to(dtype)
