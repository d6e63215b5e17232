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
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from server.arch.spec import Activation
from server.backends.cpu.graph import Pool
from server.backends.cpu.kernels import Kernels
from server.backends.cpu.layers import LINE, PANEL_ROWS, Changes, PanelFormat, address_of
from server.backends.protocol import LinearChange, LowRank, TokenAdapters

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


class PanelAdapted:
    """An `AdaptedLinear` around a layer that the kernels compute."""

    is_capturable = True

    def __init__(self, kernels: Kernels, pool: Pool, layer: PanelFormat, num_rows: int, tokens: TokenAdapters):
        self._pool = pool
        self._layer = layer
        self._tokens = tokens
        self._table = (_Change * (num_rows + 1))()
        self._address = ctypes.addressof(self._table)
        self._kept: dict[int, Sequence[Tensor | None]] = {}  # what the rows of the table point to
        self._lay_out = kernels.lay_out_change[layer.dtype]
        self._fill = kernels.fill_change[layer.dtype]

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

    def stage(self, change: LinearChange) -> LinearChange:
        return change

    def put(self, row: int, change: LinearChange | None) -> None:
        """See `AdaptedLinear`. What was in the row before is freed, and captured steps compute with what is now."""
        assert 0 < row < len(self._table), f"row {row} of {len(self._table) - 1}"
        self._table[row] = _Change()
        self._kept.pop(row, None)
        if change is not None:
            self._table[row], self._kept[row] = self._stored(change)

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

    def _stored(self, change: LinearChange) -> tuple[_Change, Sequence[Tensor | None]]:
        """A row of the table, and the tensors that it points to."""
        inputs, dtype, threads = self._layer.inputs, self._layer.dtype, torch.get_num_threads()
        ranks = _Ranks.of(change.parts, inputs)
        read, parts = _described(change.parts, ranks.firsts)
        halves = 2 * self._layer.num_panels
        spans, words = torch.empty(halves, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        parts_at = ctypes.addressof(parts)
        self._lay_out(self._layer.address, parts_at, len(parts), spans.data_ptr(), words.data_ptr())
        lines = -(-inputs * dtype.itemsize // LINE)
        down = self._zeros(ranks.ranks * lines * LINE)
        up = self._zeros(int(words) * LANES * 4)
        gain, bias = self._by_panel(change.gain), self._by_panel(change.bias)
        kept = (down, ranks.scales, spans, up, gain, bias)
        at_down, at_scales, at_spans, at_up, at_gain, at_bias = map(address_of, kept)
        row = _Change(at_down, ranks.ranks, ranks.copies, at_scales, at_spans, at_up, at_gain, at_bias)
        self._fill(self._layer.address, inputs, parts_at, len(parts), ctypes.addressof(row), threads)
        del read
        return row, kept

    def _zeros(self, num_bytes: int) -> Tensor:
        return self._pool.empty(torch.Size([num_bytes]), torch.uint8).zero_()

    def _by_panel(self, values: Tensor | None) -> Tensor | None:
        """[rows of the weight] → [panel][32] float32, as the panels have them."""
        if values is None:
            return None
        halves = 2 if self._layer.is_gated else 1
        width = self._layer.num_panels * PANEL_ROWS // halves
        by_half = F.pad(values.float().view(halves, -1), (0, width - self._layer.outputs))
        return by_half.view(halves, self._layer.num_panels, -1).transpose(0, 1).contiguous()


def _described(parts: Sequence[LowRank], firsts: Sequence[int]) -> tuple[list[Tensor | None], ctypes.Array[_Part]]:
    """The parts as the kernels are told of them, and the tensors that these descriptions point to."""
    read: list[Tensor | None] = []

    def described() -> Iterator[_Part]:
        for part, first_rank in zip(parts, firsts, strict=True):
            down, up = None if part.down is None else part.down.contiguous(), part.up.contiguous()
            read.extend((down, up))
            yield _Part(address_of(down), up.data_ptr(), part.first, len(up), first_rank, up.shape[1])

    return read, (_Part * len(parts))(*described())


def _filled_up(ranks: int) -> int:
    return -(-ranks // GROUP) * GROUP
