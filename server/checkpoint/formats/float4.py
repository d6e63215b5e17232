"""Weights in float4 (E2M1: a sign, two bits of exponent, one of fraction), two in a byte, the first in the low half.

OCP Microscaling Formats 1.0 (2023) has a scale for each 32 inputs, a power of 2 whose exponent is a byte (MXFP4);
NVIDIA's NVFP4 has one for each 16, in float8, times a number of all. Left out: inputs in float4, which are taken as
they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from server.checkpoint.formats.protocol import Part, Tensors, covering

BITS = 4
BIAS = 127  # of exponents in a byte
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def float4_levels() -> Tensor:
    """[16] float32 by code."""
    return torch.tensor([*NUMBERS, *(-number for number in NUMBERS)])


def float4_codes(tensors: Tensors, suffix: str, part: Part) -> Tensor:
    """Codes [rows, columns] uint8 of a tensor [F, D / 2] of bytes. Raises CheckpointError."""
    outputs, inputs = part.size
    (first, last), inside = covering(part.columns, 2, inputs)
    shape = (outputs, -(-inputs // 2))
    pairs = tensors.read_box(suffix, shape, (torch.uint8,), part.rows, [(first // 2, -(-last // 2))])
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1)[:, inside].contiguous()


def of_exponents(exponents: Tensor) -> Tensor:
    """Powers of 2 float32 by their bytes; 255 stands for no number."""
    if exponents.dtype != torch.uint8:
        return exponents.float()
    powers = torch.exp2(exponents.float() - BIAS)
    return torch.where(exponents == 255, torch.nan, powers)
