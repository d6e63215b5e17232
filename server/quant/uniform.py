"""Rounds dense weights to 4 bits while they are loaded: equally spaced codes, a scale and a zero for each group.

A group's range is clipped where that makes the squared error least: shrunk ranges are tried one after the other (as
OCTAV, Sakr et al. 2022, arXiv 2206.06501, looks for the same optimum with other means), and the scale of the best one
is then fitted to its codes by least squares. Scales are numbers of 16 bits, so that kernels may keep them so. Left out:
what inputs do to the error, which takes texts to know.

Groups lie within a row, so a row's codes are the same whichever other rows are here.

Shapes: F output features, D input features, G groups of inputs, N groups of all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from server.quant.rounding import TINY
from server.quant.stored import QuantisedWeight, contiguous_groups

BITS = 4
GROUP = 128  # inputs that share a scale of 16 bits and a zero of 8: a fifth of a bit for each weight
MOST = (1 << BITS) - 1
# Of a group's range: 128 normal numbers want 0.85, and heavier tails less. Steps half as wide gain 0.5 % of the error.
SHRINKS = tuple(1 - 0.05 * step for step in range(9))
PIECE = 1 << 18  # weights that are looked at together: with their copies they fit into a core's cache


def int4_groups(weight: Tensor) -> QuantisedWeight:
    """A dense weight [F, D] in 4 bits, groups of 128 inputs, the last of a row being what is left."""
    outputs, inputs = weight.shape
    groups = contiguous_groups(GROUP, inputs)
    num_groups = int(groups[-1]) + 1
    device = weight.device
    codes = torch.empty(outputs, inputs, dtype=torch.uint8, device=device)
    scale, zero = torch.empty(2, outputs, num_groups, device=device)
    whole = inputs // GROUP * GROUP
    step = max(1, PIECE // inputs)
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        exact = weight[rows].float()
        for columns, size in ((slice(0, whole), GROUP), (slice(whole, inputs), inputs - whole)):
            if not (part := exact[:, columns]).numel():
                continue
            of_groups = slice(columns.start // GROUP, -(-columns.stop // GROUP))
            found, scales, zeros = _rounded(part.reshape(-1, size))
            codes[rows, columns] = found.view(part.shape)
            scale[rows, of_groups], zero[rows, of_groups] = scales.view(len(part), -1), zeros.view(len(part), -1)
    return QuantisedWeight(codes, BITS, scale, groups.to(device), zero=zero)


def _rounded(exact: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Groups [N, n] → codes [N, n] uint8, and scales and zeros [N, 1]."""
    low, high = exact.amin(1, keepdim=True).clamp_(max=0), exact.amax(1, keepdim=True).clamp_(min=0)
    best = torch.full_like(low, torch.inf)
    scale, zero = torch.empty_like(low), torch.empty_like(low)
    scaled, error = torch.empty_like(exact), torch.empty_like(exact)
    for shrink in SHRINKS:
        tried = ((high - low) * (shrink / MOST)).clamp_(min=TINY)
        shift = (-low * shrink / tried).round_()
        torch.mul(exact, 1 / tried, out=scaled).add_(shift)
        torch.round(scaled, out=error).clamp_(0, MOST).sub_(scaled)
        size = torch.linalg.vector_norm(error, dim=1, keepdim=True).mul_(tried)
        is_better = size < best
        best = torch.where(is_better, size, best)
        scale, zero = torch.where(is_better, tried, scale), torch.where(is_better, shift, zero)
    torch.mul(exact, 1 / scale, out=scaled).add_(zero).round_().clamp_(0, MOST)
    codes = scaled.to(torch.uint8)
    scaled.sub_(zero)
    fitted = torch.sum(exact * scaled, 1, keepdim=True) / scaled.square().sum(1, keepdim=True)
    fitted = torch.where(fitted.isnan(), 1.0, fitted)  # of zeros alone, for which any scale would do
    return codes, _in_16_bits(torch.where(fitted > TINY, fitted, scale)), zero


def _in_16_bits(scale: Tensor) -> Tensor:
    """The nearest numbers of float16, but for those that it has fewer digits for."""
    return torch.where(scale >= torch.finfo(torch.float16).tiny, scale.half().float(), scale)
