"""Rounds dense weights to the nearest of 16 levels while they are loaded, in blocks of 64, as bitsandbytes does.

NF4 (QLoRA, Dettmers et al. 2023, arXiv 2305.14314) has levels at equally likely values of a normal number; FP4 has a
sign, two bits of exponent and one of fraction. A block's largest magnitude stands for 1. Left out: rounding those
magnitudes to 8 bits too (double quantisation), which would save 0.37 bits a weight of a checkpoint, but not of memory,
where scales are float32. Other than there, a block ends with its row, so that rows can be divided among ranks.

Shapes: F output features, D input features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from server.quant.rounding import TINY
from server.quant.stored import QuantisedWeight, contiguous_groups

BITS = 4
BLOCK = 64
PIECE = 1 << 18  # weights that are looked at together


def nf4_blocks(weight: Tensor) -> QuantisedWeight:
    """A dense weight [F, D] in NF4."""
    return _nearest(weight, nf4_levels().to(weight.device))


def fp4_blocks(weight: Tensor) -> QuantisedWeight:
    """A dense weight [F, D] in bitsandbytes' FP4."""
    return _nearest(weight, fp4_levels().to(weight.device))


def nf4_levels() -> Tensor:
    """[16] float32, ascending from -1 to 1: eight quantiles of a normal number above 0, seven below, and 0 itself.

    The outermost probability leaves out half a level at each end, in the mean of 30 and of 32 levels.
    """
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    above, below = (
        torch.special.ndtri(torch.linspace(outermost, 0.5, count, dtype=torch.float64)[:-1]) for count in (9, 8)
    )
    levels = torch.cat([-below, torch.zeros(1, dtype=torch.float64), above.flip(0)])
    return (levels / levels.max()).float()


def fp4_levels() -> Tensor:
    """[16] float32 by code: a sign, two bits of exponent, one of fraction. Higher exponents are smaller, but for 0."""
    positive = [0.0, 0.0625]  # exponent 0
    positive += [2.0 ** (4 - exponent) * (1 + fraction / 2) for exponent in (1, 2, 3) for fraction in (0, 1)]
    levels = torch.tensor(positive, dtype=torch.float64) / max(positive)
    return torch.cat([levels, -levels]).float()


def _nearest(weight: Tensor, levels: Tensor) -> QuantisedWeight:
    outputs, inputs = weight.shape
    groups = contiguous_groups(BLOCK, inputs)
    num_blocks = int(groups[-1]) + 1
    ascending, code_of = levels.unique(return_inverse=True)  # FP4 has two zeros
    code_of = torch.stack([(code_of == place).nonzero()[0, 0] for place in range(len(ascending))]).to(torch.uint8)
    between = (ascending[1:] + ascending[:-1]) / 2
    codes = torch.empty(outputs, inputs, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(outputs, num_blocks, device=weight.device)
    step = max(1, PIECE // inputs)
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        exact = F.pad(weight[rows].float(), (0, num_blocks * BLOCK - inputs)).unflatten(1, (num_blocks, BLOCK))
        largest = exact.abs().amax(2)
        scaled = (exact / largest.clamp(min=TINY)[..., None]).flatten(1)[:, :inputs]
        places = torch.bucketize(scaled.contiguous(), between, out_int32=True)
        codes[rows], scale[rows] = code_of.index_select(0, places.flatten()).view(places.shape), largest
    return QuantisedWeight(codes, BITS, scale, groups.to(weight.device), levels=levels)
