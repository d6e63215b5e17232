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
from server.backends.reference.linear import Gate, activated, padded

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
class StackedChange(ExpertsChange):
    """What an adapter makes of a layer of all experts, whose parts stand as one: x → up(down(x))."""

    experts: tuple[LinearChange | None, ...] = ()
    down: Tensor | None = None  # [E, R, D], both of these in whole units of memory; None: there are no parts
    up: Tensor | None = None  # [E, F, R], zeros where a part has none, times its scale
    bias: Tensor | None = None  # [E, F]
    gain: Tensor | None = None  # [E, F]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.down, self.up, self.bias, self.gain) if tensor is not None)

    @classmethod
    def of(cls, change: ExpertsChange) -> StackedChange:
        """The same, unless it was stacked before."""
        if isinstance(change, StackedChange):
            return change
        experts = [LinearChange() if one is None else one for one in change.experts]
        every = [part for one in experts for part in one.parts]
        down, up = None, None
        if every:
            inputs = max(part.up.shape[1] if part.down is None else part.down.shape[1] for part in every)
            outputs = max(part.first + len(part.up) for part in every)
            ranks = max(sum(map(_rank, one.parts)) for one in experts)
            like = every[0].up
            down = like.new_zeros(len(experts), padded(ranks, like), padded(inputs, like))
            up = like.new_zeros(len(experts), outputs, padded(ranks, like))
            for one, *both in zip(experts, down, up, strict=True):
                _stack(one.parts, *both)
        biases, gains = ([getattr(one, name) for one in experts] for name in ("bias", "gain"))
        return cls((), down, up, _rows_of(biases, 0.0), _rows_of(gains, 1.0))


def _rank(part: LowRank) -> int:
    return part.up.shape[1]


def _stack(parts: Sequence[LowRank], down: Tensor, up: Tensor) -> None:
    """Into zeros [R, D] and [F, R] of one expert."""
    rank = 0
    for part in parts:
        own = slice(rank, rank + _rank(part))
        inputs = _rank(part) if part.down is None else part.down.shape[1]
        down[own, :inputs] = torch.eye(inputs, dtype=down.dtype) if part.down is None else part.down
        up[part.first : part.first + len(part.up), own] = part.scale * part.up
        rank = own.stop


def _rows_of(values: Sequence[Tensor | None], otherwise: float) -> Tensor | None:
    width = next((len(value) for value in values if value is not None), 0)
    if not width:
        return None
    return torch.stack([torch.full((width,), otherwise) if value is None else value.float() for value in values])


class StockAdaptedExperts(Rows[StackedChange]):
    """An `AdaptedExperts` over any format of torch's operators."""

    def __init__(self, layer: GroupedLinear, tokens: TokenAdapters, device: Device, gate: Gate | None):
        super().__init__(tokens, device)
        self._layer = layer
        self._gate = gate

    def stage(self, change: ExpertsChange) -> StackedChange:
        """See `AdaptedExperts`."""
        return super().stage(StackedChange.of(change))

    def put(self, row: int, change: ExpertsChange | None) -> None:
        """See `AdaptedExperts`."""
        super().put(row, None if change is None else StackedChange.of(change))

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
        y = plain if bias is None else plain + bias.index_select(0, experts)
        rows = self._tokens.rows
        assert rows is not None
        for row in self._tokens.present:
            if row in self._changes:
                own = _changed_experts(self._changes[row], x, plain, ends, experts)
                own = own if bias is None else own + bias.index_select(0, experts)
                y = torch.where((rows == row).unsqueeze(1), own, y)
        return activated(y.to(x.dtype), activation, self._gate)


def _changed_experts(change: StackedChange, x: Tensor, product: Tensor, ends: Tensor, experts: Tensor) -> Tensor:
    """What an adapter makes of the product [T, F] of x [T, D], sorted by expert, in float32."""
    y = product.clone() if change.gain is None else product * change.gain.index_select(0, experts)
    if change.down is not None and change.up is not None:
        shrunk = F.grouped_mm(F.pad(x, (0, change.down.shape[2] - x.shape[1])), change.down.transpose(1, 2), offs=ends)
        y[:, : change.up.shape[1]] += F.grouped_mm(shrunk, change.up.transpose(1, 2), offs=ends)
    return y if change.bias is None else y + change.bias.index_select(0, experts)


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
