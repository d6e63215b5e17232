"""A checkpoint that is being quantised: what is changed or quantised already hides what the files hold.

The model's own loader reads it, so that fused and transposed tensors are taken apart in the one place that knows how.
Of changed and quantised tensors there are only those of the layer at hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from server.checkpoint.formats.protocol import NOWHERE_ELSE, Format, Part, Ranges, Tensors
from server.checkpoint.weights import STORED_FLOATS, Checkpoint
from server.quantisation.stored import QuantisedWeight


class EditedCheckpoint(Checkpoint):
    """A checkpoint some of whose dense tensors are others, of the same shapes.

    changed: those, by name.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self.changed: dict[str, Tensor] = {}

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
        changed = self.changed.get(name)
        if changed is None:
            return super().read(
                name, shape, dim=dim, part=part, within=within, dtypes=dtypes, dtype=dtype, mapped=mapped
            )
        for d, (start, stop) in {**within, **({} if part is None else {dim: part})}.items():
            changed = changed.narrow(d, start, stop - start)
        return changed.to(dtype)

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
