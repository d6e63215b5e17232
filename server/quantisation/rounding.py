"""Rounds dense weights, while they are loaded, and the inputs of products: to 8 bits, to 4 in groups, to 16 levels.

int8 is symmetric round-to-nearest with one scale for each row (Jacob et al. 2017, arXiv 1712.05877; for inputs as
LLM.int8(), Dettmers et al. 2022, arXiv 2208.07339, without its outlier path). float8 is E4M3 (Micikevicius et al. 2022,
arXiv 2209.05433), whose largest number is 448.

int4 has equally spaced codes, a scale and a zero for each group of inputs. A group's range is clipped where that makes
the squared error least: shrunk ranges are tried one after the other (as OCTAV, Sakr et al. 2022, arXiv 2206.06501,
looks for the same optimum with other means), and the scale of the best one is then fitted to its codes by least
squares. Scales are numbers of 16 bits, so that kernels may keep them so. Left out: what inputs do to the error, which
takes texts to know. On CPUs `backends/cpu/rounding.cpp` does the same, and what is changed here is to be changed there.

NF4 and FP4 take the nearest of 16 levels in blocks of 64, as bitsandbytes does. NF4 (QLoRA, Dettmers et al. 2023, arXiv
2305.14314) has levels at equally likely values of a normal number; FP4 has a sign, two bits of exponent and one of
fraction. A block's largest magnitude stands for 1. Left out: rounding those magnitudes to 8 bits too (double
quantisation), which would save 0.37 bits a weight of a checkpoint, but not of memory, where scales are float32.

Groups and blocks end with their row, so a row's codes are the same whichever other rows are here, and rows can be
divided among ranks.

Shapes: F output features, D input features, T tokens, G groups of inputs, N groups of all rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from server.quantisation.stored import QuantisedWeight, RoundedInputs, contiguous_groups

MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
TINY = 1e-12  # for a row of zeros
PIECE = 1 << 18  # weights that are looked at together: a head in float32 would be gigabytes
BITS = 4
INT4_GROUP = 128  # inputs that share a scale of 16 bits and a zero of 8: a fifth of a bit for each weight
MOST_CODE = (1 << BITS) - 1
# Of a group's range: 128 normal numbers want 0.85, and heavier tails less. Steps half as wide gain 0.5 % of the error.
SHRINKS = tuple(1 - 0.05 * step for step in range(9))
LEVEL_BLOCK = 64  # inputs that share a scale


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


def int4_groups(weight: Tensor, piece: int = PIECE) -> QuantisedWeight:
    """A dense weight [F, D] in 4 bits, groups of 128 inputs, the last of a row being what is left.

    piece: weights that are looked at together.
    """
    outputs, inputs = weight.shape
    groups = contiguous_groups(INT4_GROUP, inputs)
    num_groups = int(groups[-1]) + 1
    device = weight.device
    codes = torch.empty(outputs, inputs, dtype=torch.uint8, device=device)
    scale, zero = torch.empty(2, outputs, num_groups, device=device)
    whole = inputs // INT4_GROUP * INT4_GROUP
    step = max(1, piece // inputs)
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        exact = weight[rows].float()
        for columns, size in ((slice(0, whole), INT4_GROUP), (slice(whole, inputs), inputs - whole)):
            if not (part := exact[:, columns]).numel():
                continue
            of_groups = slice(columns.start // INT4_GROUP, -(-columns.stop // INT4_GROUP))
            found, scales, zeros = _rounded(part.reshape(-1, size))
            codes[rows, columns] = found.view(part.shape)
            scale[rows, of_groups], zero[rows, of_groups] = scales.view(len(part), -1), zeros.view(len(part), -1)
    return QuantisedWeight(codes, BITS, scale, groups.to(device), zero=zero)


def _rounded(exact: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Groups [N, n] → codes [N, n] uint8, and scales and zeros [N, 1]."""
    low, high = exact.amin(1, keepdim=True).clamp_(max=0), exact.amax(1, keepdim=True).clamp_(min=0)
    best = torch.full_like(low, torch.inf)
    scale, zero = torch.full_like(low, torch.nan), torch.zeros_like(low)  # of what is no number
    scaled, error = torch.empty_like(exact), torch.empty_like(exact)
    for shrink in SHRINKS:
        tried = ((high - low) * (shrink / MOST_CODE)).clamp_(min=TINY)
        shift = (-low * shrink / tried).round_()
        torch.mul(exact, 1 / tried, out=scaled).add_(shift)
        torch.round(scaled, out=error).clamp_(0, MOST_CODE).sub_(scaled)
        size = torch.linalg.vector_norm(error, dim=1, keepdim=True).mul_(tried)
        is_better = size < best
        best = torch.where(is_better, size, best)
        scale, zero = torch.where(is_better, tried, scale), torch.where(is_better, shift, zero)
    torch.mul(exact, 1 / scale, out=scaled).add_(zero).round_().clamp_(0, MOST_CODE)
    codes = scaled.to(torch.uint8)
    scaled.sub_(zero)
    squares = scaled.square().sum(1, keepdim=True)
    fitted = torch.sum(exact * scaled, 1, keepdim=True) / squares
    fitted = torch.where(squares == 0, 1.0, fitted)  # of zeros alone, for which any scale would do
    return codes, in_16_bits(torch.where(fitted > TINY, fitted, scale)), zero


def in_16_bits(scale: Tensor) -> Tensor:
    """The nearest numbers of float16, but for those that it has fewer digits for."""
    return torch.where(scale >= torch.finfo(torch.float16).tiny, scale.half().float(), scale)


def nf4_blocks(weight: Tensor) -> QuantisedWeight:
    """A dense weight [F, D] in NF4."""
    return _nearest(weight, nf4_levels())


def fp4_blocks(weight: Tensor) -> QuantisedWeight:
    """A dense weight [F, D] in bitsandbytes' FP4."""
    return _nearest(weight, fp4_levels())


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


def float4_levels() -> Tensor:
    """Of float4 (E2M1, Open Compute Project 2023, Microscaling Formats 1.0), [16] float32 by code."""
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return torch.cat([numbers, -numbers])


def fp4_levels() -> Tensor:
    """[16] float32 by code: a sign, two bits of exponent, one of fraction. Higher exponents are smaller, but for 0."""
    positive = [0.0, 0.0625]  # exponent 0
    positive += [2.0 ** (4 - exponent) * (1 + fraction / 2) for exponent in (1, 2, 3) for fraction in (0, 1)]
    levels = torch.tensor(positive, dtype=torch.float64) / max(positive)
    return torch.cat([levels, -levels]).float()


def _nearest(weight: Tensor, levels: Tensor) -> QuantisedWeight:
    (outputs, inputs), device = weight.shape, weight.device
    groups = contiguous_groups(LEVEL_BLOCK, inputs)
    num_blocks = int(groups[-1]) + 1
    ascending = levels.unique()  # FP4 has two zeros
    between = ((ascending[1:] + ascending[:-1]) / 2).to(device)
    code_of = (ascending[:, None] == levels).int().argmax(1).to(device, torch.uint8)
    codes = torch.empty(outputs, inputs, dtype=torch.uint8, device=device)
    scale = torch.empty(outputs, num_blocks, device=device)
    step = max(1, PIECE // inputs)
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        exact = F.pad(weight[rows].float(), (0, num_blocks * LEVEL_BLOCK - inputs)).unflatten(
            1, (num_blocks, LEVEL_BLOCK)
        )
        largest = exact.abs().amax(2)
        scaled = (exact / largest.clamp(min=TINY)[..., None]).flatten(1)[:, :inputs]
        places = torch.bucketize(scaled.contiguous(), between, out_int32=True)
        codes[rows], scale[rows] = code_of.index_select(0, places.flatten()).view(places.shape), largest
    return QuantisedWeight(codes, BITS, scale, groups.to(device), levels=levels.to(device))
