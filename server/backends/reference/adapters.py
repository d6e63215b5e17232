"""Layers that adapters change, in stock operators: linear layers of any format, tables of tokens, norms.

Nothing here waits for the device, but each adapter of a pass is computed for all of its tokens. No captured step can
hold that, since which adapters there are is the host's business.

Shapes: T tokens, D input features, F output features, E features of a table's row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from server.arch.spec import Activation
from server.backends.device import Device
from server.backends.protocol import (
    EmbeddingChange,
    LinearChange,
    LinearFormat,
    Norm,
    NormChange,
    Summand,
    TokenAdapters,
)
from server.backends.reference.linear import Gate, activated

C = TypeVar("C")


class Rows(Generic[C]):
    """What is in the rows of one layer, and which tokens of a pass have which."""

    is_capturable = False

    def __init__(self, tokens: TokenAdapters, device: Device):
        self._tokens = tokens
        self._device = device
        self._changes: dict[int, C] = {}

    def stage(self, change: C) -> C:
        """See `AdaptedLinear`."""
        staged: C = with_each(self._device.stage, change)
        return staged

    def put(self, row: int, change: C | None) -> None:
        """See `AdaptedLinear`. change: as `stage` gave it."""
        self._changes.pop(row, None)
        if change is not None:
            self._changes[row] = with_each(self._device.bring, change)

    @property
    def _is_concerned(self) -> bool:
        """Whether any adapter of the pass changes the layer."""
        return self._tokens.rows is not None and any(row in self._changes for row in self._tokens.present)

    def _present(self) -> Iterator[tuple[C, Tensor]]:
        """What changes the layer, and whether that is of each token, [T]."""
        if self._tokens.rows is None:
            return
        for row in self._tokens.present:
            if (change := self._changes.get(row)) is not None:
                yield change, self._tokens.rows == row


def with_each(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A tensor changed, or all of a tuple's or a dataclass's."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(with_each(change, each) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: with_each(change, getattr(value, f.name)) for f in fields(value)})
    return value


class StockAdapted(Rows[LinearChange]):
    """An `AdaptedLinear` over any format of torch's operators."""

    def __init__(self, layer: LinearFormat, tokens: TokenAdapters, device: Device, gate: Gate | None):
        super().__init__(tokens, device)
        self._layer = layer
        self._gate = gate

    @property
    def nbytes(self) -> int:
        """Memory of the layer, without adapters."""
        return self._layer.nbytes

    @property
    def memory(self) -> Sequence[Tensor]:
        return self._layer.memory

    def moved(self) -> None:
        self._layer.moved()

    def __call__(
        self, x: Tensor, bias: Tensor | None, activation: Activation | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x [T, D] → activation(changed(x @ weightᵀ + bias)) + residual, [T, F], in x's dtype."""
        if not self._is_concerned:
            return self._layer(x, bias, activation, residual)
        y = activated(self._changed(x, bias).to(x.dtype), activation, self._gate)
        return y if residual is None else y + residual

    def finest(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, D] → changed(x @ weightᵀ + bias), [T, F]."""
        return self._changed(x, bias) if self._is_concerned else self._layer.finest(x, bias)

    def _changed(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product [T, F], or [T, 2 F] of a gated layer, in float32."""
        plain = self._layer.finest(x, None).float()
        y = plain if bias is None else plain + bias
        for change, is_its in self._present():
            y = torch.where(is_its.unsqueeze(1), changed(change, x, plain, bias), y)
        return y


def changed(change: LinearChange, x: Tensor, product: Tensor, bias: Tensor | None) -> Tensor:
    """What an adapter makes of the product [T, F] of x [T, D], in float32."""
    y = product.clone() if change.gain is None else product * change.gain
    for part in change.parts:
        shrunk = x.float() if part.down is None else F.linear(x.float(), part.down.float())
        y[:, part.first : part.first + len(part.up)] += part.scale * F.linear(shrunk, part.up.float())
    for added in (bias, change.bias):
        y = y if added is None else y + added
    return y


class AdaptedTable(Rows[EmbeddingChange]):
    """Changes the rows of a table of tokens."""

    def __call__(self, token_ids: Tensor, rows: Tensor) -> Tensor:
        """token_ids [T], counted from the table's first, and their rows [T, E] → rows as their adapters have them."""
        found = rows
        for change, is_its in self._present():
            found = torch.where(is_its.unsqueeze(1), changed_rows(change, token_ids, rows).to(rows.dtype), found)
        return found


def changed_rows(change: EmbeddingChange, token_ids: Tensor, rows: Tensor) -> Tensor:
    """What an adapter makes of the rows [T, E] of tokens [T], in float32."""
    own = rows.float()
    if change.gain is not None:
        own = own * change.gain
    if change.ids is not None and change.rows is not None:
        places = torch.searchsorted(change.ids, token_ids).clamp(max=len(change.ids) - 1)
        is_other = (change.ids[places] == token_ids).unsqueeze(1)
        own = torch.where(is_other, change.rows[places].float(), own)
    if change.down is not None and change.up is not None:
        own = own + change.scale * (change.down[token_ids].float() @ change.up.float())
    return own


class AdaptedNorm(Norm, Rows[NormChange]):
    """Changes what a norm gives."""

    def __init__(self, norm: Norm, tokens: TokenAdapters, device: Device):
        Rows.__init__(self, tokens, device)
        self._norm = norm
        self.absorbs_addition = norm.absorbs_addition

    def __call__(self, x: Tensor) -> Tensor:
        return self._changed(self._norm(x))

    def add(self, x: Tensor, summand: Summand) -> tuple[Tensor, Tensor]:
        total, normed = self._norm.add(x, summand)
        return total, self._changed(normed)

    def normalise_heads(self, key_norm: Norm, heads: Tensor, kv_heads: int) -> Tensor:
        both = (self, key_norm)
        if not any(isinstance(norm, AdaptedNorm) and norm._is_concerned for norm in both):
            keys = key_norm._norm if isinstance(key_norm, AdaptedNorm) else key_norm
            return self._norm.normalise_heads(keys, heads, kv_heads)
        return super().normalise_heads(key_norm, heads, kv_heads)

    def _changed(self, normed: Tensor) -> Tensor:
        found = normed
        for change, is_its in self._present():
            own = normed.float() if change.gain is None else normed.float() * change.gain
            own = own if change.bias is None else own + change.bias
            found = torch.where(is_its.view(-1, *[1] * (normed.dim() - 1)), own.to(normed.dtype), found)
        return found
