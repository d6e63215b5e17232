"""What a checkpoint's format of quantised weights answers for, and what it reads from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from server.quantisation.configs import FormatError as FormatError
from server.quantisation.exclusions import HEADS_AND_ROUTERS, Exclusions, Names
from server.quantisation.packing import Codes, unit_of, words_of
from server.quantisation.stored import QuantisedWeight, RoundedInputs, contiguous_groups

Ranges = Sequence[tuple[int, int]]
NOWHERE_ELSE: Mapping[int, tuple[int, int]] = MappingProxyType({})  # where a part is one along one dimension
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
MOST_CODES = {torch.float8_e4m3fn: 448.0}  # the largest that a code stands for
SCALES = (*FLOATS, torch.float8_e8m0fnu)  # the last: powers of 2, of which a byte has the exponent
# Scales of keys and values, which the KV cache's format needs and linear layers do not.
SCALES_OF_KV = (r"\.(k|v|q|kv)_(scale|zero_point)$", r"\.(k|v)_proj\.output_(scale|zero_point)$")


class Source(Protocol):
    """A checkpoint."""

    def __contains__(self, name: str) -> bool: ...

    def shape_of(self, name: str) -> tuple[int, ...]: ...

    def note_of(self, name: str) -> str | None: ...

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dim: int = 0,
        part: tuple[int, int] | None = None,
        dtypes: Sequence[torch.dtype] = (),
        mapped: bool = False,
    ) -> Tensor: ...


@dataclass(frozen=True)
class Part:
    """Which part of a weight [F, D] is wanted."""

    size: tuple[int, int]  # of the whole
    rows: Ranges  # half-open, one after the other
    columns: tuple[int, int]  # half-open

    def groups_of(self, size: int | Tensor) -> tuple[Tensor, Tensor]:
        """The groups [G'] that the part's inputs are in, ascending, and which of these each input [columns] is in.

        size: of groups of neighbours, 0 and -1: all are one; or the group of each input of the whole.
        """
        groups = size if isinstance(size, Tensor) else contiguous_groups(size, self.size[1])
        return torch.unique(groups[slice(*self.columns)], return_inverse=True)

    def weight(
        self,
        held: Codes,
        bits: int,
        scale: Tensor,
        groups: Tensor,
        *,
        zero: Tensor | None = None,
        levels: Tensor | None = None,
        inputs: RoundedInputs | None = None,
    ) -> QuantisedWeight:
        """This part, of which the fields are given as `QuantisedWeight` says."""
        place = {"first_input": self.columns[0], "num_inputs": self.size[1]}
        return QuantisedWeight(held, bits, scale.contiguous(), groups, zero, levels, inputs, **place)


@dataclass(frozen=True)
class Tensors:
    """The tensors of one linear layer: `name` is without what follows the last dot.

    mapped: whether what is read may be the file itself, in any strides, to be read once and let go.
    """

    source: Source
    name: str
    mapped: bool = False

    def has(self, suffix: str) -> bool:
        """Whether there is such a tensor."""
        return f"{self.name}.{suffix}" in self.source

    def shape(self, suffix: str) -> tuple[int, ...]:
        """Of the tensor, which there must be. Raises CheckpointError."""
        return self.source.shape_of(f"{self.name}.{suffix}")

    def note(self, suffix: str) -> str | None:
        """What the metadata of the files says under this name; None: nothing; empty: that all is as usual."""
        return self.source.note_of(f"{self.name}.{suffix}")

    def read(
        self,
        suffix: str,
        shape: tuple[int, ...],
        dtypes: Sequence[torch.dtype],
        *,
        dim: int = 0,
        part: tuple[int, int] | None = None,
    ) -> Tensor:
        """The tensor, or its half-open part along `dim`. Raises CheckpointError."""
        return self.source.read(f"{self.name}.{suffix}", shape, dim=dim, part=part, dtypes=dtypes, mapped=self.mapped)

    def read_ranges(
        self, suffix: str, shape: tuple[int, ...], dtypes: Sequence[torch.dtype], dim: int, ranges: Ranges
    ) -> Tensor:
        """Several parts along `dim`, one after the other."""
        return _joined([self.read(suffix, shape, dtypes, dim=dim, part=one) for one in ranges], dim)

    def read_box(
        self, suffix: str, shape: tuple[int, ...], dtypes: Sequence[torch.dtype], rows: Ranges, columns: Ranges
    ) -> Tensor:
        """Rows and columns of a tensor of two dimensions. Where both are cut, whole rows are read."""
        if list(rows) == [(0, shape[0])]:
            return self.read_ranges(suffix, shape, dtypes, 1, columns)
        whole = self.read_ranges(suffix, shape, dtypes, 0, rows)
        return whole if list(columns) == [(0, shape[1])] else _joined([whole[:, slice(*one)] for one in columns], 1)


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


class Format(ABC):
    """How a checkpoint stores the weights of those linear layers that it has in fewer bits.

    name: as `--quantize` and people know it; ignored: patterns of tensors that may be there and are not needed; zeros:
    patterns of those that are not needed because they are zeros; exclusions: layers that are dense, as the config says:
    only where weights are random is it asked, otherwise the tensors tell.
    """

    name: str
    ignored: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    exclusions: Exclusions = Exclusions(Names(HEADS_AND_ROUTERS))

    @abstractmethod
    def has(self, tensors: Tensors) -> bool:
        """Whether this layer is stored so; otherwise it has a dense weight."""

    @abstractmethod
    def read(self, tensors: Tensors, part: Part) -> QuantisedWeight:
        """A part of the layer's weight. Raises CheckpointError or FormatError."""

    def leaves_out(self, name: str) -> bool:
        """Whether the config says that this layer is dense."""
        return self.exclusions.hold(name)


def finite(tensors: Tensors, suffix: str, numbers: Tensor) -> Tensor:
    """Numbers of a tensor as float32. Raises FormatError unless all of them are finite."""
    numbers = numbers.float()
    if not numbers.is_meta and not (is_finite := numbers.isfinite()).all():
        raise FormatError(
            f"{tensors.name}.{suffix} has {float(numbers[~is_finite][0])} among its numbers, and all must be finite: "
            "the checkpoint is damaged, download it again"
        )
    return numbers


def refuse_overflow(name: str, weight: QuantisedWeight) -> None:
    """Raise FormatError where a scale is so large that weights would be infinite: its factors alone may be finite."""
    if weight.scale.is_meta or not weight.scale.numel():
        return
    levels = weight.levels
    most = float(levels.abs().max()) if levels is not None else MOST_CODES.get(weight.held.dtype, 256.0)
    if not (largest := float(weight.scale.abs().max()) * most) <= torch.finfo(torch.float32).max:
        raise FormatError(
            f"the scales of {name} make weights as large as {largest:.3g}, and all must be finite numbers of float32: "
            "the checkpoint is damaged, download it again"
        )


def numbers_of_float8(tensors: Tensors, suffix: str, codes: Tensor) -> Tensor:
    """The same codes of float8_e4m3fn. Raises FormatError if one of them stands for no number.

    Those are 0x7f and 0xff, the largest of bytes with a sign and without: two passes at the speed of memory.
    """
    if not codes.is_meta and codes.numel():
        if int(codes.view(torch.int8).amax()) == 0x7F or int(codes.view(torch.uint8).amax()) == 0xFF:
            raise FormatError(
                f"{tensors.name}.{suffix} has nan among its numbers, and all must be finite: the checkpoint is "
                "damaged, download it again"
            )
    return codes


def checked_groups(tensors: Tensors, suffix: str, groups: Tensor, count: int) -> Tensor:
    """The group of each input. Raises FormatError unless all are from 0 to below `count`."""
    if not groups.is_meta:
        least, most = int(groups.min()), int(groups.max())
        if least < 0 or most >= count:
            raise FormatError(
                f"{tensors.name}.{suffix} names group {least if least < 0 else most} of {count}: the checkpoint is "
                "damaged, download it again"
            )
    return groups


def rows_of_all(number: Tensor, part: Part) -> Tensor:
    """A number of all rows [] → [rows of the part, 1]."""
    return number.reshape(1, 1).expand(sum(stop - start for start, stop in part.rows), 1).contiguous()


def covering(bounds: tuple[int, int], unit: int, most: int) -> tuple[tuple[int, int], slice]:
    """The least half-open range that begins and ends with whole units of `unit`, and where `bounds` lie in it."""
    start, stop = bounds
    first, last = start // unit * unit, min(-(-stop // unit) * unit, most)
    return (first, last), slice(start - first, stop - first)


def covering_words(bounds: tuple[int, int], bits: int, most: int) -> tuple[tuple[int, int], slice]:
    """Likewise the least range of words that hold codes of so many bits, and where they lie in what is unpacked."""
    (first, last), inside = covering(bounds, unit_of(bits), most)
    return (words_of(first, bits), words_of(last, bits)), inside


def refuse_undivided(tensors: Tensors, inputs: int, size: int, remedy: str) -> None:
    """Raise FormatError where groups of `size`, which is above 0, do not divide the inputs."""
    if size > 0 and inputs % size:
        raise FormatError(f"{tensors.name} has {inputs} inputs, which groups of {size} do not divide: {remedy}")
