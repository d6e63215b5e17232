"""A checkpoint that is being quantised: what is changed or quantised already hides what the files hold.

The model's own loader reads it, so that fused and transposed tensors are taken apart in the one place that knows how.
Of changed and quantised tensors there are only those of the layer at hand. Experts that lie in one tensor are seen as
if each had tensors of its own, which is how they are written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from server.checkpoint.formats.protocol import NOWHERE_ELSE, Format, Part, Ranges, Tensors
from server.checkpoint.weights import STORED_FLOATS, Checkpoint, CheckpointError
from server.quantisation.stored import QuantisedWeight


@dataclass(frozen=True)
class Piece:
    """One expert's matrix in a tensor of all experts: the `place`-th of `of` equal parts of its rows."""

    name: str
    expert: int
    place: int
    of: int


class EditedCheckpoint(Checkpoint):
    """A checkpoint some of whose dense tensors are others, of the same shapes.

    changed: those, by name.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self.changed: dict[str, Tensor] = {}
        self._pieces: dict[str, Piece] = {}
        self._taken_apart: set[str] = set()

    def split(self, pieces: Mapping[str, Piece]) -> None:
        """Have these, by name, in place of the tensors that they are parts of."""
        self._pieces.update(pieces)
        self._taken_apart.update(piece.name for piece in pieces.values())

    def __contains__(self, name: str) -> bool:
        return name in self._pieces or (name not in self._taken_apart and super().__contains__(name))

    def names(self) -> Iterator[str]:
        """See `Checkpoint.names`."""
        yield from (name for name in super().names() if name not in self._taken_apart)
        yield from self._pieces

    def dtype_of(self, name: str) -> torch.dtype:
        """See `Checkpoint.dtype_of`."""
        piece = self._pieces.get(name)
        return super().dtype_of(name if piece is None else piece.name)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """See `Checkpoint.shape_of`."""
        piece = self._pieces.get(name)
        if piece is None:
            return super().shape_of(name)
        _, rows, columns = super().shape_of(piece.name)
        return rows // piece.of, columns

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dim: int = 0,
        part: tuple[int, int] | None = None,
        within: Mapping[int, tuple[int, int]] = NOWHERE_ELSE,
        dtypes: Sequence[torch.dtype] = STORED_FLOATS,
        dtype: torch.dtype | None = None,
        mapped: bool = False,
    ) -> Tensor:
        """See `Checkpoint.read`. A changed tensor is not copied unless it is converted."""
        changed, piece = self.changed.get(name), self._pieces.get(name)
        bounds = {**within, **({} if part is None else {dim: part})}
        if changed is not None:
            for d, (start, stop) in bounds.items():
                changed = changed.narrow(d, start, stop - start)
            return changed.to(dtype)
        if piece is not None:
            return self._of_expert(piece, shape, bounds, dtypes, dtype)
        return super().read(name, shape, dim=dim, part=part, within=within, dtypes=dtypes, dtype=dtype, mapped=mapped)

    def _of_expert(
        self,
        piece: Piece,
        shape: tuple[int, ...],
        bounds: Mapping[int, tuple[int, int]],
        dtypes: Sequence[torch.dtype],
        dtype: torch.dtype | None,
    ) -> Tensor:
        whole, rows = super().shape_of(piece.name), shape[0]
        if whole[1:] != (piece.of * rows, *shape[1:]):
            raise CheckpointError(
                f"tensor {piece.name} has shape {list(whole)}, but config.json says {list(shape)} of an expert: they "
                "do not belong together, download both again"
            )
        start, stop = bounds.get(0, (0, rows))
        first = piece.place * rows
        own = {0: (piece.expert, piece.expert + 1), 2: bounds.get(1, (0, shape[1]))}
        part = (first + start, first + stop)
        return super().read(piece.name, whole, dim=1, part=part, within=own, dtypes=dtypes, dtype=dtype)[0]

    def whole(self, name: str) -> Tensor:
        """A tensor as it is stored, or as it was changed."""
        return self.read(name, self.shape_of(name), dtypes=(self.dtype_of(name),))

    def bytes_of(self, name: str) -> int:
        """Of a tensor as it is stored, without reading it."""
        return math.prod(self.shape_of(name)) * self.dtype_of(name).itemsize

    def whole_float(self, name: str) -> Tensor:
        """The same in float32."""
        return self.read(name, self.shape_of(name)).float()


class FinishedFormat(Format):
    """The quantised weights that have been made: `weights` by the name of the layer.

    scale_dtype: what their scales are stored in.
    """

    name = "finished"

    def __init__(self, scale_dtype: torch.dtype) -> None:
        self.scale_dtype = scale_dtype
        self.weights: dict[str, QuantisedWeight] = {}

    def has(self, tensors: Tensors) -> bool:
        return tensors.name in self.weights

    def read(self, tensors: Tensors, part: Part) -> QuantisedWeight:
        whole = _rows(self.weights[tensors.name], part.rows)
        return whole if part.columns == (0, part.size[1]) else whole.columns(*part.columns)

    def forget(self, names: Iterable[str]) -> None:
        """Those of a layer that is written."""
        for name in names:
            self.weights.pop(name, None)


def _rows(weight: QuantisedWeight, ranges: Ranges) -> QuantisedWeight:
    """The outputs in `ranges`, one range after the other."""
    if list(ranges) == [(0, weight.shape[0])]:
        return weight

    def cut(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[start:stop] for start, stop in ranges])

    zero = None if weight.zero is None else cut(weight.zero)
    return replace(weight, held=cut(weight.codes), scale=cut(weight.scale), zero=zero)
