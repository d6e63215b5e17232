"""Linear layers for tokens that have adapters, by compiled kernels.

A layer's changes lie in a table by the rows in which adapters are, at an address that never changes, and kernels are
told the row of each token: a captured step (`graph.py`) computes with whatever the table holds when it is replayed. How
it is computed is said in `adapters.h`.

Left out: layers that the kernels do not compute, which are left to stock operators.

Shapes: T tokens, D input features, F output features, R ranks of all parts of a change.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from server.arch.spec import Activation
from server.backends.cpu.kernels import Kernels
from server.backends.cpu.layers import LINE, PANEL_ROWS, Changes, ExpertChanges, KernelExperts, PanelFormat, address_of
from server.backends.cpu.memory import Pool
from server.backends.protocol import AdaptedLinear, ExpertsChange, LinearChange, LowRank, TokenAdapters
from server.backends.reference.linear import StackedLinear

GROUP = 8  # of adapters.h
LANES = PANEL_ROWS // 2  # outputs that have ranks of their own


class _Change(ctypes.Structure):
    """`Change` of adapters.h."""

    _fields_ = (
        ("down", ctypes.c_void_p),
        ("ranks", ctypes.c_long),
        ("copies", ctypes.c_long),
        ("scales", ctypes.c_void_p),
        ("spans", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("gain", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class _Part(ctypes.Structure):
    """`Part` of adapters.cpp."""

    _fields_ = (
        ("down", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("first", ctypes.c_long),
        ("outputs", ctypes.c_long),
        ("first_rank", ctypes.c_long),
        ("ranks", ctypes.c_long),
    )


@dataclass(frozen=True)
class _Ranks:
    """Where the ranks of a change's parts are: first those that have a `down`, then copies of the inputs."""

    ranks: int  # of the former, with what fills them up
    copies: int
    firsts: Sequence[int]  # of each part
    scales: Tensor  # [ranks + copies] float32

    @staticmethod
    def of(parts: Sequence[LowRank], inputs: int) -> _Ranks:
        """Parts of the same scale share a copy."""
        of_down = [0 if part.down is None else len(part.down) for part in parts]
        ranks = _filled_up(sum(of_down))
        scales = [part.scale for part, count in zip(parts, of_down, strict=True) for _ in range(count)]
        scales += [0.0] * (ranks - len(scales))
        copies = {part.scale: None for part in parts if part.down is None}
        place = {scale: ranks + number * _filled_up(inputs) for number, scale in enumerate(copies)}
        firsts = [place[p.scale] if p.down is None else sum(of_down[:i]) for i, p in enumerate(parts)]
        return _Ranks(ranks, len(copies), firsts, torch.tensor([*scales, *copies], dtype=torch.float32))


@dataclass(frozen=True)
class StagedChange(LinearChange):
    """A change as the kernels read it; its own tensors are not needed any more."""

    fields: _Change = field(default_factory=_Change)
    kept: Sequence[Tensor | None] = ()  # what the fields point to

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.kept if tensor is not None)


class _Staging:
    """Brings changes of one weight into the order in which the kernels read them.

    On the calling thread alone, which may be another one than that which computes, and unseen by what is captured.
    """

    def __init__(self, kernels: Kernels, pool: Pool, layer: PanelFormat):
        self._pool = pool
        self._layer = layer
        self._lay_out = kernels.lay_out_change[layer.dtype]
        self._fill = kernels.fill_change[layer.dtype]

    def __call__(self, change: LinearChange) -> StagedChange:
        """The same, unless it was staged before."""
        if isinstance(change, StagedChange):
            return change
        layer, dtype = self._layer, self._layer.dtype
        ranks = _Ranks.of(change.parts, layer.inputs)
        read, parts = _described(change.parts, ranks.firsts, dtype)
        parts_at, count = ctypes.addressof(parts), len(parts)
        spans, words = torch.empty(2 * layer.num_panels, 2, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
        self._lay_out(layer.address, parts_at, count, spans.data_ptr(), words.data_ptr())
        lines = -(-layer.inputs * dtype.itemsize // LINE)
        down, up = self._zeros(ranks.ranks * lines * LINE), self._zeros(int(words) * LANES * 4)
        kept = (down, ranks.scales, spans, up, self._by_panel(change.gain), self._by_panel(change.bias))
        at_down, *addresses = map(address_of, kept)
        fields = _Change(at_down, ranks.ranks, ranks.copies, *addresses)
        self._fill(layer.address, layer.inputs, parts_at, count, ctypes.addressof(fields))
        del read
        return StagedChange(fields=fields, kept=kept)

    def _zeros(self, num_bytes: int) -> Tensor:
        found = self._pool.empty(torch.Size([num_bytes]), torch.uint8)
        ctypes.memset(found.data_ptr(), 0, num_bytes)  # on this thread, as torch would not
        return found

    def _by_panel(self, values: Tensor | None) -> Tensor | None:
        """[rows of the weight] → [panel][32] float32, as the panels have them."""
        if values is None:
            return None
        halves, panels = (2 if self._layer.is_gated else 1), self._layer.num_panels
        by_half = values.float().view(halves, -1)
        filled_up = F.pad(by_half, (0, panels * PANEL_ROWS // halves - by_half.shape[1]))
        return filled_up.view(halves, panels, -1).transpose(0, 1).contiguous()


class PanelAdapted:
    """An `AdaptedLinear` around a layer that the kernels compute."""

    is_capturable = True

    def __init__(self, kernels: Kernels, pool: Pool, layer: PanelFormat, num_rows: int, tokens: TokenAdapters):
        self._layer = layer
        self._tokens = tokens
        self._table = (_Change * (num_rows + 1))()
        self._address = ctypes.addressof(self._table)
        self._kept: dict[int, StagedChange] = {}  # what the rows of the table point to
        self.stage = _Staging(kernels, pool, layer)

    @property
    def nbytes(self) -> int:
        """Memory of the layer, without adapters."""
        return self._layer.nbytes

    @property
    def memory(self) -> Sequence[Tensor]:
        return self._layer.memory

    def moved(self) -> None:
        self._layer.moved()

    def rows(self, ids: Tensor) -> Tensor:
        """See `PanelFormat.rows`; no adapter changes them."""
        return self._layer.rows(ids)

    def put(self, row: int, change: LinearChange | None) -> None:
        """See `AdaptedLinear`. What was in the row before is freed, and captured steps compute with what is now."""
        assert 0 < row < len(self._table), f"row {row} of {len(self._table) - 1}"
        self._table[row] = _Change()
        self._kept.pop(row, None)
        if change is not None:
            self._kept[row] = self.stage(change)
            self._table[row] = self._kept[row].fields

    def __call__(
        self, x: Tensor, bias: Tensor | None, activation: Activation | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x [T, D] → activation(changed(x @ weightᵀ + bias)) + residual, [T, F], in x's dtype."""
        return self._layer(x, bias, activation, residual, self._changes)

    def finest(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, D] → changed(x @ weightᵀ + bias), [T, F] float32."""
        return self._layer.finest(x, bias, self._changes)

    @property
    def _changes(self) -> Changes | None:
        rows = self._tokens.rows
        return None if rows is None else Changes(self._address, rows)


@dataclass(frozen=True)
class StagedStack(LinearChange):
    """What has been staged for each part of a stack; None: the part stays as it is."""

    changes: tuple[LinearChange | None, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(change.nbytes for change in self.changes if change is not None)


class StackedAdapted:
    """An `AdaptedLinear` of several, one below the other. heights: the outputs of each."""

    def __init__(self, parts: Sequence[AdaptedLinear], heights: Sequence[int], *, is_gated: bool):
        self._parts = parts
        self._ends = [*accumulate(heights)]
        self._layer = StackedLinear(parts, is_gated=is_gated)

    @property
    def is_capturable(self) -> bool:
        return all(part.is_capturable for part in self._parts)

    @property
    def nbytes(self) -> int:
        """Memory of the layer, without adapters."""
        return self._layer.nbytes

    @property
    def memory(self) -> Sequence[Tensor]:
        return self._layer.memory

    def moved(self) -> None:
        self._layer.moved()

    def stage(self, change: LinearChange) -> StagedStack:
        """See `AdaptedLinear`."""
        if isinstance(change, StagedStack):
            return change
        cuts = [_cut(change, start, stop) for start, stop in pairwise([0, *self._ends])]
        pairs = zip(self._parts, cuts, strict=True)
        return StagedStack(changes=tuple(None if own is None else part.stage(own) for part, own in pairs))

    def put(self, row: int, change: LinearChange | None) -> None:
        """See `AdaptedLinear`."""
        changes = [None] * len(self._parts) if change is None else self.stage(change).changes
        for part, own in zip(self._parts, changes, strict=True):
            part.put(row, own)

    def __call__(
        self, x: Tensor, bias: Tensor | None, activation: Activation | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x [T, D] → activation(changed(x @ weightᵀ + bias)) + residual, [T, F], in x's dtype."""
        return self._layer(x, bias, activation, residual)

    def finest(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, D] → changed(x @ weightᵀ + bias), [T, F]."""
        return self._layer.finest(x, bias)


def _cut(change: LinearChange, start: int, stop: int) -> LinearChange | None:
    """What of it changes the outputs `start` … `stop` - 1; None: nothing."""
    parts = tuple(
        replace(part, first=max(part.first - start, 0), up=part.up[max(start - part.first, 0) : stop - part.first])
        for part in change.parts
        if part.first < stop and part.first + len(part.up) > start
    )
    bias, gain = (None if values is None else values[start:stop] for values in (change.bias, change.gain))
    return LinearChange(parts, bias, gain) if parts or bias is not None or gain is not None else None


class PanelAdaptedExperts:
    """An `AdaptedExperts` around experts that the kernels compute in one call."""

    is_capturable = True

    def __init__(self, kernels: Kernels, pool: Pool, layer: KernelExperts, num_rows: int, tokens: TokenAdapters):
        self._layer = layer
        self._tokens = tokens
        self._num_rows = num_rows
        self._table = (_Change * (len(layer.experts) * (num_rows + 1)))()
        self._address = ctypes.addressof(self._table)
        self._kept: dict[int, ExpertsChange] = {}
        self._staging = [_Staging(kernels, pool, expert) for expert in layer.experts]

    @property
    def nbytes(self) -> int:
        """Memory of the layer, without adapters."""
        return self._layer.nbytes

    @property
    def memory(self) -> Sequence[Tensor]:
        return self._layer.memory

    def moved(self) -> None:
        self._layer.moved()

    def stage(self, change: ExpertsChange) -> ExpertsChange:
        """See `AdaptedLinear`."""
        pairs = zip(self._staging, change.experts, strict=True)
        return ExpertsChange(tuple(None if own is None else stage(own) for stage, own in pairs))

    def put(self, row: int, change: ExpertsChange | None) -> None:
        """See `AdaptedLinear`."""
        assert 0 < row <= self._num_rows, f"row {row} of {self._num_rows}"
        staged = None if change is None else self.stage(change)
        if (before := self._kept.pop(row, None)) is not None:
            self._write(row, ExpertsChange(tuple(None if own is None else StagedChange() for own in before.experts)))
        if staged is not None:
            self._write(row, staged)
            self._kept[row] = staged

    def _write(self, row: int, change: ExpertsChange) -> None:
        for expert, own in enumerate(change.experts):
            if isinstance(own, StagedChange):
                self._table[expert * (self._num_rows + 1) + row] = own.fields

    def __call__(
        self, x: Tensor, ends: Tensor, activation: Activation | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """x [T, D] → activation(changed(x @ weightᵀ + bias)) [T, F]. See `GroupedLinear`."""
        rows = self._tokens.rows
        changes = None if rows is None else ExpertChanges(self._address, self._num_rows + 1, rows)
        return self._layer(x, ends, activation, bias, changes)


def _described(
    parts: Sequence[LowRank], firsts: Sequence[int], dtype: torch.dtype
) -> tuple[list[Tensor | None], ctypes.Array[_Part]]:
    """The parts as the kernels are told of them, and before them the tensors that these descriptions point to."""
    read: list[Tensor | None] = []

    def described() -> Iterator[_Part]:
        for part, first_rank in zip(parts, firsts, strict=True):
            assert part.up.dtype == dtype, f"a part is in {part.up.dtype}, the layer in {dtype}"
            down, up = None if part.down is None else part.down.contiguous(), part.up.contiguous()
            read.extend((down, up))
            yield _Part(address_of(down), up.data_ptr(), part.first, len(up), first_rank, up.shape[1])

    return read, (_Part * len(parts))(*described())


def _filled_up(ranks: int) -> int:
    return -(-ranks // GROUP) * GROUP
