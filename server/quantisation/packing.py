"""Codes of a few bits in 32-bit words, as checkpoints pack them: one after the other from the lowest bit on.

Codes of 3 bits run on from one word to the next; others fill a word, and may stay in it until a backend stores them
(`PackedCodes`).

Shapes: F output features, D input features, n codes in a word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WORD_BITS = 32
# Codes that fill words become bytes by moving halves apart, then halves of these: by how many bits, and what stays.
SPREADS = {
    2: (torch.int16, ((24, 0x000000FF000000FF), (12, 0x000F000F000F000F), (6, 0x0303030303030303))),
    4: (torch.int32, ((16, 0x0000FFFF0000FFFF), (8, 0x00FF00FF00FF00FF), (4, 0x0F0F0F0F0F0F0F0F))),
}
CACHED = 1 << 17  # elements that are worked on at a time, so that what lies between steps stays in the cache


@dataclass(frozen=True)
class PackedCodes:
    """The codes [F, D] of a weight in words that they fill, as they come from a checkpoint.

    parts: the words of outputs, some behind the others: each int32 [D, F' / n], of n neighbouring outputs, or
    [D / n, F'], of n inputs, in any strides. They may lie in a mapped file: what keeps codes for long unpacks them or
    stores them otherwise. bits: 2, 4 or 8. places [n]: where in a word of outputs each of them lies; None: words are of
    inputs, in their order.
    """

    parts: tuple[Tensor, ...]
    bits: int
    places: tuple[int, ...] | None = None

    dtype = torch.uint8  # of the codes

    @property
    def shape(self) -> tuple[int, int]:
        """(F, D)."""
        per_word = WORD_BITS // self.bits
        rows, columns = len(self.parts[0]), sum(part.shape[1] for part in self.parts)
        return (columns, rows * per_word) if self.places is None else (columns * per_word, rows)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.parts[0].device

    @property
    def nbytes(self) -> int:
        """Memory that they take."""
        return sum(part.nbytes for part in self.parts)

    def unpacked(self) -> Tensor:
        """[F, D] uint8, contiguous and no part of the words."""
        if self.places is None:
            return torch.cat([unpack(part.t(), self.bits, dim=1) for part in self.parts])
        return torch.cat([unpack_rows(part.t().contiguous(), self.bits, self.places) for part in self.parts])

    def is_alike(self, other: PackedCodes) -> bool:
        """Whether both are packed in the same way, so that their outputs can be joined."""
        return (self.bits, self.places, len(self.parts[0])) == (other.bits, other.places, len(other.parts[0]))


# Codes [F, D] of a weight: uint8, int8 or float8_e4m3fn, or still packed.
Codes = Tensor | PackedCodes


def unpacked(codes: Codes) -> Tensor:
    """Codes [F, D], one in each element."""
    return codes.unpacked() if isinstance(codes, PackedCodes) else codes


def joined_outputs(parts: Sequence[Codes]) -> Codes:
    """The outputs of all parts, one behind the other; packed if all are, and alike."""
    first, *others = parts
    if not others:
        return first
    if isinstance(first, PackedCodes):
        alike = [part for part in parts if isinstance(part, PackedCodes) and part.is_alike(first)]
        if len(alike) == len(parts):
            return PackedCodes(tuple(words for part in alike for words in part.parts), first.bits, first.places)
    return torch.cat([unpacked(part) for part in parts])


def packed_inputs(words: Tensor, bits: int, inside: slice) -> Codes:
    """Codes `inside` of words [W, F] of inputs: still packed where they fill words and none is cut."""
    is_cut = inside != slice(0, len(words) * WORD_BITS // bits)
    if is_cut or WORD_BITS % bits:
        return unpack(words.t(), bits, dim=1)[:, inside].contiguous()
    return PackedCodes((words,), bits)


def words_of(count: int, bits: int) -> int:
    """How many words hold so many codes."""
    return -(-count * bits // WORD_BITS)


def unit_of(bits: int) -> int:
    """How many codes begin and end with whole words: 32 codes of 3 bits have 3 words."""
    return math.lcm(WORD_BITS, bits) // bits


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """int32 words → the codes in them, uint8, along `dim`, which becomes 32 / bits times as long."""
    words = words.movedim(dim, -1)
    if words.dtype == torch.int32 and bits in (*SPREADS, 8):
        return _bytes_of(words, bits).movedim(-1, dim).contiguous()
    unit = unit_of(bits)
    num_words = unit * bits // WORD_BITS
    pad = -words.shape[-1] % num_words
    words = torch.nn.functional.pad(words, (0, pad)).to(torch.int64) & 0xFFFFFFFF
    words = words.unflatten(-1, (-1, num_words))
    codes = []
    for index in range(unit):
        word, shift = divmod(index * bits, WORD_BITS)
        code = words[..., word] >> shift
        if shift + bits > WORD_BITS:
            code = code | (words[..., word + 1] << (WORD_BITS - shift))
        codes.append((code & ((1 << bits) - 1)).to(torch.uint8))
    unpacked = torch.stack(codes, dim=-1).flatten(-2)
    if pad:
        unpacked = unpacked[..., : -pad * WORD_BITS // bits]
    return unpacked.movedim(-1, dim).contiguous()


def _bytes_of(words: Tensor, bits: int) -> Tensor:
    """Words [..., W] → codes [..., W * 32 / bits], where codes fill words. What comes first has the lowest bits."""
    flat = words.flatten()
    if flat.stride(0) != 1:  # of one word, which is contiguous whatever its stride says
        flat = flat.clone(memory_format=torch.contiguous_format)
    if bits == 8:
        return flat.view(torch.uint8).view(*words.shape[:-1], -1)
    kind, steps = SPREADS[bits]
    parts = flat.view(kind)
    codes = torch.empty(len(parts), 8, dtype=torch.uint8, device=words.device)
    beside = torch.empty(min(len(parts), CACHED), dtype=torch.int64, device=words.device)
    for some, out in zip(parts.split(CACHED), codes.view(torch.int64).split(CACHED), strict=True):
        wide, moved = out.view(-1), beside[: len(some)]
        wide.copy_(some).bitwise_and_((1 << torch.iinfo(kind).bits) - 1)
        for shift, mask in steps:
            torch.bitwise_left_shift(wide, shift, out=moved)
            wide.bitwise_or_(moved).bitwise_and_(mask)
    return codes.view(*words.shape[:-1], -1)


def unpack_rows(words: Tensor, bits: int, places: Sequence[int]) -> Tensor:
    """int32 words [W, D] → codes [W * n, D] uint8: row n w + i has the codes at place `places[i]` of each word of w."""
    rows, width = words.shape
    codes = torch.empty(rows, len(places), width, dtype=torch.uint8, device=words.device)
    step = max(1, CACHED // max(width, 1))
    beside = torch.empty_like(words[:step])
    for some, out in zip(words.split(step), codes.split(step), strict=True):
        for index, place in enumerate(places):
            moved = beside[: len(some)]
            torch.bitwise_right_shift(some, place * bits, out=moved)
            out[:, index] = moved.bitwise_and_((1 << bits) - 1)
    return codes.flatten(0, 1)


def pack(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Codes of `bits` bits, in whatever integers → int32 words along `dim`, the last one filled up with zeros."""
    codes = codes.movedim(dim, -1)
    unit = unit_of(bits)
    num_words = unit * bits // WORD_BITS
    wanted = words_of(codes.shape[-1], bits)
    codes = torch.nn.functional.pad(codes.to(torch.int64), (0, -codes.shape[-1] % unit)).unflatten(-1, (-1, unit))
    words = codes.new_zeros(*codes.shape[:-1], num_words)
    for index in range(unit):
        word, shift = divmod(index * bits, WORD_BITS)
        words[..., word] |= codes[..., index] << shift
        if shift + bits > WORD_BITS:
            words[..., word + 1] |= codes[..., index] >> (WORD_BITS - shift)
    words = (words & 0xFFFFFFFF).flatten(-2)[..., :wanted]
    signed = torch.where(words >= 1 << (WORD_BITS - 1), words - (1 << WORD_BITS), words)
    return signed.to(torch.int32).movedim(-1, dim).contiguous()
