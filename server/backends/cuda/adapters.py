"""Linear layers for tokens that have adapters, by two launches more than the layer's own product.

Around the product of any format, one kernel shrinks the inputs by each token's adapter, and one does all that follows
(`kernels/adapters.py`); why it is not the product's own kernel, decision 34 says. A step in which no token has an
adapter, or none that changes the layer as far as the host knows, is computed by the layer alone.

What an adapter changes is laid out and pinned on the host by whoever reads it, one copy brings it to the device, and
then its address goes into the layer's table; all of that is in the order of the device's work, by the thread that
computes. So steps that were launched before read what was in the row before, whose memory is given to others only
behind them: by the same stream, for which torch's allocator keeps it.

Importing this module imports Triton. Not yet run on a GPU.

Shapes: T tokens, D input features, F output features, r rank, n outputs of a part, R ranks of all parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from server.arch.spec import Activation
from server.backends.cuda.kernels.adapters import HEADER, Groups, finish, group, padded, shrink
from server.backends.cuda.kernels.linear import Epilogue
from server.backends.device import Device
from server.backends.protocol import LinearChange, LinearFormat, LowRank, TokenAdapters

# Ranks of all parts of a change that a captured step has room for, since it is not known beforehand what will be there.
CAPTURED_RANKS = 1024
ALIGNMENT = 128  # bytes, of everything in a change's memory


@dataclass(frozen=True)
class StagedChange(LinearChange):
    """A change, in one piece of memory as the kernels read it; its own tensors are not needed any more."""

    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))  # [N] uint8
    ranks: int = 0  # R

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes


class CudaAdapted:
    """An `AdaptedLinear` over any format. dtype: the changes'."""

    def __init__(
        self,
        layer: LinearFormat,
        num_rows: int,
        tokens: TokenAdapters,
        device: Device,
        dtype: torch.dtype,
        *,
        is_gated: bool,
    ):
        self._layer = layer
        self._tokens = tokens
        self._device = device
        self._dtype = dtype
        self._is_gated = is_gated
        self._table = torch.zeros(num_rows + 1, dtype=torch.int64, device=device.torch_device)
        self._kept: dict[int, StagedChange] = {}  # what the rows of the table point to, on the device

    @property
    def nbytes(self) -> int:
        """Memory of the layer, without adapters."""
        return self._layer.nbytes

    @property
    def memory(self) -> Sequence[Tensor]:
        return self._layer.memory

    def moved(self) -> None:
        self._layer.moved()

    @property
    def is_capturable(self) -> bool:
        return all(change.ranks <= CAPTURED_RANKS for change in self._kept.values())

    def stage(self, change: LinearChange) -> StagedChange:
        staged = laid_out(change, self._dtype)
        return StagedChange(memory=self._device.stage(staged.memory), ranks=staged.ranks)

    def put(self, row: int, change: LinearChange | None) -> None:
        """See `AdaptedLinear`. Called by the thread that computes, on the stream on which it computes."""
        assert 0 < row < len(self._table), f"row {row} of {len(self._table) - 1}"
        if change is None:
            if row in self._kept:
                self._point(row, 0)
                del self._kept[row]
            return
        staged = change if isinstance(change, StagedChange) else self.stage(change)
        brought = StagedChange(memory=self._device.bring(staged.memory), ranks=staged.ranks)
        self._point(row, brought.memory.data_ptr())
        self._kept[row] = brought

    def _point(self, row: int, address: int) -> None:
        self._table[row : row + 1].fill_(address)  # an argument of a kernel: nothing is copied

    def __call__(
        self, x: Tensor, bias: Tensor | None, activation: Activation | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x [T, D] → activation(changed(x @ weightᵀ + bias)) + residual, [T, F], in x's dtype."""
        if not self._is_concerned or len(x) == 0:
            return self._layer(x, bias, activation, residual)
        return self._changed(x, Epilogue(bias, activation, residual), is_gated=self._is_gated)

    def finest(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, D] → changed(x @ weightᵀ + bias). See `LinearFormat`."""
        if not self._is_concerned or len(x) == 0:
            return self._layer.finest(x, bias)
        return self._changed(x, Epilogue(bias), is_gated=False, is_finest=True)

    @property
    def _is_concerned(self) -> bool:
        """Whether an adapter of the pass changes the layer; in a captured step that is not known."""
        rows, present = self._tokens.rows, self._tokens.present
        return rows is not None and (not present or any(row in self._kept for row in present))

    def _changed(self, x: Tensor, epilogue: Epilogue, *, is_gated: bool, is_finest: bool = False) -> Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        groups, table = self._groups(), self._table
        shrunk = shrink(x, table, groups, self._dtype, self._most_ranks())
        product = self._layer.finest(x, None).contiguous()
        out_dtype = product.dtype if is_finest else x.dtype
        return finish(product, x, shrunk, table, groups, epilogue, self._dtype, is_gated=is_gated, out_dtype=out_dtype)

    def _groups(self) -> Groups:
        """The tokens by their rows, found once in a pass."""
        rows, made = self._tokens.rows, self._tokens.made
        assert rows is not None
        if Groups not in made:
            made[Groups] = group(rows, len(self._table) - 1)
        groups: Groups = made[Groups]
        return groups

    def _most_ranks(self) -> int:
        """Ranks of the changes that there may be."""
        if not self._tokens.present:
            return CAPTURED_RANKS
        return max(self._kept[row].ranks for row in self._tokens.present if row in self._kept)


def laid_out(change: LinearChange, dtype: torch.dtype) -> StagedChange:
    """A change as the kernels read it. dtype: of its matrices."""
    ranks = [0 if part.down is None else padded(len(part.down)) for part in change.parts]
    downs = [_filled(part.down, dtype) for part in change.parts if part.down is not None]
    down = torch.cat(downs) if downs else None
    ups = [_filled(part.up, dtype, is_rows=False) for part in change.parts]
    gain, bias = (None if numbers is None else numbers.float() for numbers in (change.gain, change.bias))
    pieces = [down, gain, bias, *ups]
    words = HEADER.value * (1 + len(change.parts))
    sizes = [0 if piece is None else -(-piece.nbytes // ALIGNMENT) * ALIGNMENT for piece in pieces]
    starts = list(accumulate(sizes, initial=-(-8 * words // ALIGNMENT) * ALIGNMENT))
    memory = torch.zeros(starts[-1], dtype=torch.uint8)
    for piece, start in zip(pieces, starts, strict=False):
        if piece is not None:
            memory[start : start + piece.nbytes].view(piece.dtype).copy_(piece.flatten())
    places = [0 if piece is None else start for piece, start in zip(pieces, starts, strict=False)]
    header = [sum(ranks), len(change.parts), *places[:3], 0, 0, 0]
    firsts = accumulate(ranks, initial=0)
    for part, first, up, place in zip(change.parts, firsts, ups, places[3:], strict=False):
        header += [part.first, len(up), up.shape[1], -1 if part.down is None else first, place, _bits(part), 0, 0]
    memory[: 8 * words].view(torch.int64).copy_(torch.tensor(header))
    return StagedChange(memory=memory, ranks=sum(ranks))


def _filled(matrix: Tensor, dtype: torch.dtype, *, is_rows: bool = True) -> Tensor:
    """A matrix whose rows are filled up with zeros, and where `is_rows`, to as many more."""
    rows, numbers = matrix.shape
    filled = torch.zeros(padded(rows) if is_rows else rows, padded(numbers), dtype=dtype)
    filled[:rows, :numbers] = matrix
    return filled


def _bits(part: LowRank) -> int:
    """The scale as float32."""
    return int(np.float32(part.scale).view(np.int32))
