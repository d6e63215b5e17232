"""A weight in fewer bits, as plain data: what checkpoint formats read, quantisers make and backends store.

All formats are one thing here: codes, what each code stands for, and a scale for each row of each group of inputs.
Left out: how codes are packed, which is a checkpoint's affair on one side (`packing.py`) and a backend's on the other.

Shapes: F output features, D input features, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from server.quantisation.packing import Codes, PackedCodes, joined_outputs, unpacked


@dataclass(frozen=True)
class RoundedInputs:
    """How a product rounds its inputs, so that it is computed in the codes' own arithmetic.

    dtype: int8 or float8_e4m3fn. scale: [] float32, the same for all inputs; None: for each token its largest magnitude
    decides. zero: [] float32, the code of 0 beside a fixed scale. group: so many neighbouring inputs share a scale; 0:
    all of a token do. most: [] float32, what a scale that a token decides is at most.
    """

    dtype: torch.dtype
    scale: Tensor | None = None
    zero: Tensor | None = None
    group: int = 0
    most: Tensor | None = None


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight [F, D]: row f and input d stand for (code - zero[f, g]) * scale[f, g], where g is the group of d."""

    held: Codes  # [F, D] uint8, int8 or float8_e4m3fn, or packed in words until somebody asks for `codes`
    bits: int  # of a code
    scale: Tensor  # [F, G] float32
    groups: Tensor  # [D] int64: the group of each input
    zero: Tensor | None = None  # [F, G] float32; None: 0
    levels: Tensor | None = None  # [2^bits] float32: what a code stands for; None: its own value
    inputs: RoundedInputs | None = None  # None: inputs are taken as they are
    first_input: int = 0  # of the whole layer, where this is a part of its inputs
    num_inputs: int = 0  # of the whole layer; 0: it is the whole

    @cached_property
    def codes(self) -> Tensor:
        """[F, D] uint8, int8 or float8_e4m3fn, unpacked the first time."""
        return unpacked(self.held)

    @property
    def shape(self) -> tuple[int, int]:
        """(F, D)."""
        return self.held.shape[0], self.held.shape[1]

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.held.device

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        tensors = (self.held, self.scale, self.groups, self.zero, self.levels)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def to(self, device: torch.device) -> QuantisedWeight:
        """The same on a device; codes are unpacked to go to another one."""
        inputs = self.inputs
        if inputs is not None:
            inputs = replace(
                inputs,
                scale=_moved(inputs.scale, device),
                zero=_moved(inputs.zero, device),
                most=_moved(inputs.most, device),
            )
        return replace(
            self,
            held=self.held if self.device == device else self.codes.to(device),
            scale=self.scale.to(device),
            groups=self.groups.to(device),
            zero=_moved(self.zero, device),
            levels=_moved(self.levels, device),
            inputs=inputs,
        )

    def dequantised(self) -> Tensor:
        """What it stands for, [F, D] float32."""
        values = (
            self.codes.float() if self.levels is None else F.embedding(self.codes.long(), self.levels[:, None])[..., 0]
        )
        if self.zero is not None:
            values = values - self.zero.index_select(1, self.groups)
        return values * self.scale.index_select(1, self.groups)

    def rows(self, ids: Tensor) -> Tensor:
        """What rows ids [T] int64 stand for, [T, D] float32."""
        zero = None if self.zero is None else self.zero.index_select(0, ids)
        chosen = replace(self, held=self.codes[ids], scale=self.scale.index_select(0, ids), zero=zero)
        return chosen.dequantised()

    def columns(self, start: int, stop: int) -> QuantisedWeight:
        """The part that belongs to inputs start … stop - 1, and the groups that these are in."""
        groups = self.groups[start:stop]
        kept, of_input = torch.unique(groups, return_inverse=True)
        return replace(
            self,
            held=self.codes[:, start:stop].contiguous(),
            scale=self.scale[:, kept].contiguous(),
            groups=of_input,
            zero=None if self.zero is None else self.zero[:, kept].contiguous(),
            first_input=self.first_input + start,
            num_inputs=self.num_inputs or self.shape[1],
        )


# A weight [F, D] as it is stored: dense, or in fewer bits.
Stored = Tensor | QuantisedWeight
Quantise = Callable[[Tensor], QuantisedWeight]  # of a dense weight, whole rows of it


def joined(parts: Sequence[Stored]) -> Stored | None:
    """The rows of all parts as one weight; None where they are not stored alike."""
    first, *others = parts
    if not others:
        return first
    if isinstance(first, Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)]) if _all_dense(parts) else None
    alike = [part for part in parts if isinstance(part, QuantisedWeight) and _is_alike(first, part)]
    if len(alike) < len(parts):
        return None
    return replace(
        first,
        held=joined_outputs([part.held for part in alike]),
        scale=torch.cat([part.scale for part in alike]),
        zero=None if first.zero is None else torch.cat([part.zero for part in alike if part.zero is not None]),
    )


def rows_taken_apart(weight: Stored) -> Stored:
    """The even rows, and below them the odd ones."""
    if isinstance(weight, Tensor):
        return _taken_apart(weight)
    zero = None if weight.zero is None else _taken_apart(weight.zero)
    return replace(weight, held=_codes_taken_apart(weight.held), scale=_taken_apart(weight.scale), zero=zero)


def _codes_taken_apart(held: Codes) -> Codes:
    """Words of inputs stay packed."""
    if isinstance(held, PackedCodes) and held.places is None and len(held.parts) == 1:
        (words,) = held.parts
        return replace(held, parts=(words[:, ::2], words[:, 1::2]))
    return _taken_apart(unpacked(held))


def _taken_apart(rows: Tensor) -> Tensor:
    return torch.cat([rows[::2], rows[1::2]])


def padded(weight: Stored, count: int) -> Stored:
    """The same with so many rows of zeros more."""
    if not count:
        return weight
    rows = (0, 0, 0, count)
    if isinstance(weight, Tensor):
        return F.pad(weight, rows)
    return replace(
        weight,
        held=F.pad(weight.codes.view(torch.uint8), rows).view(weight.codes.dtype),
        scale=F.pad(weight.scale, rows),
        zero=None if weight.zero is None else F.pad(weight.zero, rows),
    )


def with_unit_rows(weight: Stored) -> Stored:
    """The same with each row divided by its length; rows of zeros stay."""
    if isinstance(weight, Tensor):
        return F.normalize(weight.float(), dim=1).to(weight.dtype)
    length = weight.dequantised().norm(dim=1, keepdim=True).clamp(min=1e-12)
    return replace(weight, scale=weight.scale / length)


def contiguous_groups(size: int, num_inputs: int) -> Tensor:
    """[num_inputs] int64: groups of `size` neighbouring inputs; 0 and -1: all are one."""
    return torch.arange(num_inputs) // (size if size > 0 else num_inputs)


def _moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def _all_dense(parts: Sequence[Stored]) -> bool:
    return all(isinstance(part, Tensor) for part in parts)


def _is_alike(one: QuantisedWeight, other: QuantisedWeight) -> bool:
    """Whether both have the same groups, codes that mean the same, and inputs that are rounded in the same way."""
    return (
        one.held.dtype == other.held.dtype
        and one.bits == other.bits
        and (one.zero is None) == (other.zero is None)
        and _is_equal(one.levels, other.levels)
        and _is_equal(one.groups, other.groups)
        and _has_same_inputs(one.inputs, other.inputs)
    )


def _has_same_inputs(one: RoundedInputs | None, other: RoundedInputs | None) -> bool:
    if one is None or other is None:
        return one is other
    same_tensors = all(_is_equal(getattr(one, name), getattr(other, name)) for name in ("scale", "zero", "most"))
    return same_tensors and (one.dtype, one.group) == (other.dtype, other.group)


def _is_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
