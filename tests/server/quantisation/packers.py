"""Packs quantised weights as published formats define it, number by number: what our readers are held against.

Written from the formats' definitions and from nothing of ours. Each returns the tensors of one linear layer by suffix.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
# The 16 numbers that NF4's codes stand for (QLoRA, appendix E), and those of FP4 with 2 bits of exponent and 1 of
# mantissa, in the order of bitsandbytes' codes: 1 bit of sign above 3 that count from 0.
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
FP4_HALF = [0.0, 0.0625 / 12, 8 / 12, 12 / 12, 4 / 12, 6 / 12, 2 / 12, 3 / 12]
FP4 = [*FP4_HALF, *(-level for level in FP4_HALF)]


def bits_of(codes: Sequence[int], bits: int) -> list[int]:
    """A stream of codes, the lowest bit of each first."""
    return [code >> bit & 1 for code in codes for bit in range(bits)]


def words_of(stream: Sequence[int]) -> list[int]:
    """Signed 32-bit words of a stream of bits, the lowest first; what is missing of the last is 0."""
    words = []
    for start in range(0, len(stream), 32):
        word = sum(bit << place for place, bit in enumerate(stream[start : start + 32]))
        words.append(word - (1 << 32) if word >= 1 << 31 else word)
    return words


def packed_rows(codes: Tensor, bits: int) -> Tensor:
    """codes [R, n] → int32 [R, n bits / 32]: each row is a stream of its own."""
    return torch.tensor([words_of(bits_of(row, bits)) for row in codes.int().tolist()], dtype=torch.int32)


def gptq(
    codes: Tensor, scale: Tensor, zero: Tensor, groups: Tensor, bits: int, *, version: int = 1
) -> dict[str, Tensor]:
    """codes [F, D], scale and zero [F, G], groups [D]."""
    if bits == 3 and version == 1:
        zeros = packed_rows(((zero.int() - 1) & 7).t(), bits)
    else:
        # As GPTQModel does: whole words less one for each code in them, so that a zero borrows from its neighbour.
        less = sum(1 << shift for shift in range(0, 32, bits)) if version == 1 else 0
        zeros = (packed_rows(zero.int().t(), bits).long() - less).int()
    return {
        "qweight": packed_rows(codes, bits).t().contiguous(),
        "qzeros": zeros,
        "scales": scale.t().contiguous().half(),
        "g_idx": groups.int(),
    }


def awq(codes: Tensor, scale: Tensor, zero: Tensor) -> dict[str, Tensor]:
    """codes [F, D] of 4 bits, scale and zero [F, G], groups in order."""

    def shuffled(rows: Tensor) -> Tensor:
        """rows [R, F]: in each word the outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight."""
        return rows.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1)

    return {
        "qweight": packed_rows(shuffled(codes.t()), 4),
        "qzeros": packed_rows(shuffled(zero.int().t()), 4),
        "scales": scale.t().contiguous().half(),
    }


def compressed_packed(
    codes: Tensor, scale: Tensor, bits: int, *, zero: Tensor | None = None, groups: Tensor | None = None
) -> dict[str, Tensor]:
    """pack-quantized: signed codes [F, D], scale and zero [F, G]; both kinds of codes are raised to be no less than 0.

    groups [D]: those of a layer whose inputs were put in an order of their own.
    """
    raised = 1 << (bits - 1)
    tensors = {
        "weight_packed": packed_rows(codes.int() + raised, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor(codes.shape),
    }
    if zero is not None:
        tensors["weight_zero_point"] = packed_rows((zero.int() + raised).t(), bits).t().contiguous()
    if groups is not None:
        tensors["weight_g_idx"] = groups.int()
    return tensors


def quark_words(codes: Tensor, order: str) -> Tensor:
    """codes [R, n] of 4 bits → int32 [R, n / 8]: eight neighbours in AWQ's order (reorder), or in theirs (order)."""
    places = [0, 2, 4, 6, 1, 3, 5, 7] if order == "reorder" else [*range(8)]
    return packed_rows(codes.int().unflatten(1, (-1, 8))[..., places].flatten(1), 4)


def quark(codes: Tensor, scale: Tensor, zero: Tensor, dtype: str, order: str, *, in_groups: bool) -> dict[str, Tensor]:
    """Integers [F, D], scale and zero [F, G] or, where a row has one, [F, 1]; in groups all are turned."""
    number = getattr(torch, dtype, torch.int32)
    if dtype in ("int4", "uint4"):
        turned = codes.t() if in_groups else codes
        packed, zeros = quark_words(turned, order), quark_words(zero.t(), order)
    else:
        packed, zeros = (codes.t() if in_groups else codes).to(number).contiguous(), zero.t().to(number)
    kept = (lambda tensor: tensor.contiguous()) if in_groups else (lambda tensor: tensor[0].contiguous())
    return {"weight": packed, "weight_scale": kept(scale.t()), "weight_zero_point": kept(zeros)}


# The 16 numbers of float4 (E2M1), by code: a sign, two bits of exponent, one of fraction.
FLOAT4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def float4_bytes(codes: Tensor) -> Tensor:
    """codes [F, D] → uint8 [F, D / 2]: of two neighbours, the first is the low half."""
    rows = [[low | high << 4 for low, high in zip(r[::2], r[1::2], strict=True)] for r in codes.tolist()]
    return torch.tensor(rows, dtype=torch.uint8)


def nvfp4(codes: Tensor, scale: Tensor, of_all: float) -> dict[str, Tensor]:
    """As llm-compressor: scales of groups [F, G] in float8, which are divided by one of all."""
    return {
        "weight_packed": float4_bytes(codes),
        "weight_scale": scale.to(FLOAT8),
        "weight_global_scale": torch.tensor([of_all]),
        "input_global_scale": torch.tensor([7.0]),
    }


def nvfp4_of_modelopt(codes: Tensor, scale: Tensor, of_all: float) -> dict[str, Tensor]:
    """As ModelOpt: under other names, and the scale of all is multiplied with."""
    return {
        "weight": float4_bytes(codes),
        "weight_scale": scale.to(FLOAT8),
        "weight_scale_2": torch.tensor(1 / of_all),
        "input_scale": torch.tensor(7.0),
    }


def exponents(scale: Tensor) -> Tensor:
    """The bytes of powers of 2: exponents above -127."""
    return (scale.log2() + 127).to(torch.uint8)


def bitsandbytes(
    codes: Tensor,
    largest: Tensor,
    kind: str,
    *,
    block: int = 64,
    nested: tuple[Tensor, Tensor, float] | None = None,
) -> dict[str, Tensor]:
    """4-bit codes [F, D] of `kind` nf4 or fp4, and the largest magnitude of each block of neighbours [F D / block].

    nested: `largest` is uint8 codes of these levels [256], times a magnitude for 256 of them, plus an offset.
    """
    flat = codes.flatten().tolist()
    state = {"quant_type": kind, "blocksize": block, "dtype": "float16", "shape": list(codes.shape)}
    tensors = {
        "weight": torch.tensor(
            [[high << 4 | low] for high, low in zip(flat[::2], flat[1::2], strict=True)], dtype=torch.uint8
        ),
        "weight.absmax": largest,
        "weight.quant_map": torch.tensor(NF4 if kind == "nf4" else FP4),
    }
    if nested is not None:
        levels, magnitudes, offset = nested
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors |= {"weight.nested_absmax": magnitudes, "weight.nested_quant_map": levels}
    text = json.dumps(state).encode()
    return tensors | {f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(list(text), dtype=torch.uint8)}


def torchao(
    kind: str, codes: Tensor, scale: Tensor, zero: Tensor | None = None, raised_by: Tensor | None = None
) -> dict[str, Tensor]:
    """Codes [F, D] of torchao's class `kind`, scale and zero [F, G], or what weights are raised by [F, G]."""
    if kind == "Int4PlainInt32Tensor":
        assert zero is not None
        tensors = {"qdata": packed_rows(codes, 4), "scale": scale.t(), "zero_point": zero.t().to(torch.int8)}
    elif kind == "Int4Tensor":
        assert raised_by is not None
        bytes_ = [
            [low & 15 | (high & 15) << 4 for low, high in zip(r[::2], r[1::2], strict=True)] for r in codes.tolist()
        ]
        packed = torch.tensor(bytes_, dtype=torch.uint8).view(torch.int8)
        tensors = {"qdata": packed, "scale": scale.t(), "zero_point": raised_by.t()}
    else:
        kept = codes if kind == "Float8Tensor" else codes.to(torch.int8)
        zeros = {} if zero is None else {"zero_point": zero.to(torch.int8)}
        tensors = {"qdata": kept, "scale": scale, **zeros}
    return {f"_weight_{name}": tensor.contiguous() for name, tensor in tensors.items()}


def torchao_note(kind: str) -> str:
    """What the metadata of a file says of a weight of this class."""
    return json.dumps({"_type": kind, "_data": {"block_size": [1, 32], "act_quant_kwargs": None}})


def bitsandbytes_int8(codes: Tensor, largest: Tensor) -> dict[str, Tensor]:
    """int8 codes [F, D], of which 127 stands for a row's largest magnitude [F]."""
    return {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
