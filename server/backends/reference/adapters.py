"""Layers that adapters change, in stock operators: linear layers of any format, experts, tables of
tokens, norms.

Nothing here waits for the device, but each adapter of a pass is computed for all of its tokens. No captured step can
hold that, since which adapters there are is the host's business.

Shapes: T tokens, D input features, F output features, E features of a table's row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from server.arch.spec import Activation
from server.backends.device import Device
from server.backends.protocol import (
    AdaptedLinear,
    EmbeddingChange,
    ExpertsChange,
    GroupedLinear,
    LinearChange,
    LinearFormat,
    LowRank,
    Norm,
    NormChange,
    Summand,
    TokenAdapters,
)
from server.backends.reference.linear import Gate, GroupedDense, activated

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


@dataclass(frozen=True)
class StackedChange:
    """What an adapter makes of a layer of all experts, whose parts stand as one: x → up(down(x))."""

    down: GroupedDense | None  # [E, R, D]; None: there are no parts
    up: GroupedDense | None  # [E, F, R], zeros where a part has none, times its scale
    bias: Tensor | None  # [E, F]
    gain: Tensor | None  # [E, F]

    @classmethod
    def of(cls, change: ExpertsChange, outputs: int, like: Tensor) -> StackedChange:
        """outputs: F. like: of the dtype and the device of the inputs [T, D]."""
        parts = [() if one is None else one.parts for one in change.experts]
        most = max(sum(map(_rank, own)) if own else 0 for own in parts)
        down, up = None, None
        if most:
            inputs = like.shape[1]
            both = [_stacked(own, most, outputs, inputs, like) for own in parts]
            down, up = (GroupedDense(iter([pair[i] for pair in both]), len(both)) for i in range(2))
        biases, gains = (
            [None if one is None else getattr(one, name) for one in change.experts] for name in ("bias", "gain")
        )
        return cls(down, up, _rows_of(biases, 0.0, outputs, like), _rows_of(gains, 1.0, outputs, like))


def _rank(part: LowRank) -> int:
    return part.up.shape[1]


def _stacked(parts: Sequence[LowRank], most: int, outputs: int, inputs: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """[R, D] and [F, R] of one expert, filled up with zeros."""
    down, up, rank = like.new_zeros(most, inputs), like.new_zeros(outputs, most), 0
    for part in parts:
        own = slice(rank, rank + _rank(part))
        down[own] = torch.eye(inputs) if part.down is None else part.down
        up[part.first : part.first + len(part.up), own] = part.scale * part.up
        rank = own.stop
    return down, up


def _rows_of(values: Sequence[Tensor | None], otherwise: float, width: int, like: Tensor) -> Tensor | None:
    if all(value is None for value in values):
        return None
    rows = [torch.full((width,), otherwise) if value is None else value.float() for value in values]
    return torch.stack(rows).to(like.device)


class StockAdaptedExperts(Rows[ExpertsChange]):
    """An `AdaptedExperts` over any format of torch's operators."""

    def __init__(self, layer: GroupedLinear, tokens: TokenAdapters, device: Device, gate: Gate | None):
        super().__init__(tokens, device)
        self._layer = layer
        self._gate = gate
        self._stacked: dict[int, StackedChange] = {}

    def put(self, row: int, change: ExpertsChange | None) -> None:
        super().put(row, change)
        self._stacked.pop(row, None)

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
        self, x: Tensor, ends: Tensor, activation: Activation | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """x [T, D] → activation(changed(x @ weightᵀ + bias)) [T, F]. See `GroupedLinear`."""
        if not self._is_concerned:
            return self._layer(x, ends, activation, bias)
        plain = self._layer(x, ends).float()
        experts = torch.searchsorted(ends, torch.arange(len(x), device=ends.device), right=True)
        y = plain if bias is None else plain + bias[experts]
        rows = self._tokens.rows
        assert rows is not None
        for row in self._tokens.present:
            if row in self._changes:
                own = self._own(row, x, plain, ends, experts)
                own = own if bias is None else own + bias[experts]
                y = torch.where((rows == row).unsqueeze(1), own, y)
        return activated(y.to(x.dtype), activation, self._gate)

    def _own(self, row: int, x: Tensor, product: Tensor, ends: Tensor, experts: Tensor) -> Tensor:
        """What the adapter in a row makes of the product [T, F] of all tokens, in float32."""
        if row not in self._stacked:
            self._stacked[row] = StackedChange.of(self._changes[row], product.shape[1], x)
        change = self._stacked[row]
        y = product if change.gain is None else product * change.gain[experts]
        if change.down is not None and change.up is not None:
            y = y + change.up(change.down(x, ends), ends)
        return y if change.bias is None else y + change.bias[experts]


class Experts(GroupedLinear, Protocol):
    """All experts in one call, and each by itself."""

    @property
    def experts(self) -> Sequence[LinearFormat]: ...


class OneByOne:
    """An `AdaptedExperts` of experts that each are a layer: where adapters change any, one expert after the other.

    It waits for the device once, to know where each expert's tokens end. adapt: makes one expert's layer one that
    adapters change, for the tokens that it is told of.
    """

    is_capturable = False

    def __init__(
        self, layer: Experts, tokens: TokenAdapters, adapt: Callable[[LinearFormat, TokenAdapters], AdaptedLinear]
    ):
        self._layer = layer
        self._tokens = tokens
        self._adapt = adapt
        self._of_expert = TokenAdapters()  # of the one that is computed
        self._adapted: dict[int, AdaptedLinear] = {}  # experts that any adapter has changed
        self._rows: dict[int, set[int]] = {}  # of each row, the experts that its adapter changes

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
        staged = (None if own is None else self._of(e).stage(own) for e, own in enumerate(change.experts))
        return ExpertsChange(tuple(staged))

    def put(self, row: int, change: ExpertsChange | None) -> None:
        """See `AdaptedLinear`. change: as `stage` gave it."""
        for expert in self._rows.pop(row, ()):
            self._adapted[expert].put(row, None)
        if change is None:
            return
        own: dict[int, LinearChange] = {e: one for e, one in enumerate(change.experts) if one is not None}
        for expert, one in own.items():
            self._of(expert).put(row, one)
        self._rows[row] = set(own)

    def _of(self, expert: int) -> AdaptedLinear:
        if expert not in self._adapted:
            self._adapted[expert] = self._adapt(self._layer.experts[expert], self._of_expert)
        return self._adapted[expert]

    def __call__(
        self, x: Tensor, ends: Tensor, activation: Activation | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """x [T, D] → activation(changed(x @ weightᵀ + bias)) [T, F]. See `GroupedLinear`."""
        if self._tokens.rows is None or not any(row in self._rows for row in self._tokens.present):
            return self._layer(x, ends, activation, bias)
        parts = []
        for expert, (start, stop) in enumerate(pairwise([0, *ends.tolist()])):
            if stop > start:
                part, own = slice(start, stop), None if bias is None else bias[expert]
                layer = self._adapted.get(expert, self._layer.experts[expert])
                with self._of_expert.of(self._tokens.at(part)):
                    parts.append(layer(x[part], own, activation))
        return torch.cat(parts)


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
        if isinstance(summand.norm, AdaptedNorm):
            if summand.norm._is_concerned:
                total = summand.onto(x)
                return total, self(total)
            summand = replace(summand, norm=summand.norm._norm)  # which a kernel for both may want to know
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
