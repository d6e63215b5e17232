"""What adapters can change of a model, on one rank: its layers, noted while they are loaded.

Left out: norms over the whole width of queries or keys; what an adapter has for these is refused by its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from server.adapters.adapters import Change
from server.adapters.changes import Changes
from server.adapters.files import AdapterFiles
from server.adapters.names import plain_name
from server.backends.protocol import (
    AdaptedExperts,
    AdaptedLinear,
    Backend,
    EmbeddingChange,
    ExpertsChange,
    GroupedLinear,
    LinearChange,
    LinearFormat,
    Norm,
    NormChange,
    TokenAdapters,
)
from server.backends.reference.adapters import AdaptedNorm, AdaptedTable
from server.checkpoint.weights import Piece, placed

AnyChange = LinearChange | ExpertsChange | EmbeddingChange | NormChange


class Changeable(Protocol):
    """A layer that adapters change."""

    @property
    def is_capturable(self) -> bool:
        """Whether captured steps compute that."""

    def stage(self, change: Any) -> Any:
        """The same, as `put` takes it without waiting."""

    def put(self, row: int, change: Any) -> None:
        """From now on the adapter in `row` changes it so; None: not at all."""


class Site(Protocol):
    """A layer, and how to find what an adapter makes of it."""

    @property
    def layer(self) -> Changeable: ...

    def find(self, changes: Changes) -> AnyChange | None:
        """None: nothing. Raises AdapterError."""


@dataclass(frozen=True)
class LinearSite:
    """A linear layer as it is stored here, of one piece or of several. See `weights.Adapting`."""

    layer: AdaptedLinear
    pieces: Sequence[Piece]
    num_outputs: int | None
    tied_to: Piece | None

    def find(self, changes: Changes) -> LinearChange | None:
        """See `Site`."""
        is_vocabulary = self.num_outputs is not None
        return changes.linear(self.pieces, self.num_outputs, is_vocabulary=is_vocabulary, tied_to=self.tied_to)


@dataclass(frozen=True)
class ExpertsSite:
    """A linear layer of each expert."""

    layer: AdaptedExperts
    pieces: Sequence[Sequence[Piece]]

    def find(self, changes: Changes) -> ExpertsChange | None:
        """See `Site`."""
        found = tuple(changes.linear(placed(pieces)) for pieces in self.pieces)
        return None if all(change is None for change in found) else ExpertsChange(found)


@dataclass(frozen=True)
class TableSite:
    """A table of tokens."""

    layer: AdaptedTable
    piece: Piece

    def find(self, changes: Changes) -> EmbeddingChange | None:
        """See `Site`."""
        return changes.embedding(self.piece)


@dataclass(frozen=True)
class NormSite:
    """A norm with its own numbers [D]."""

    layer: AdaptedNorm
    names: Sequence[str]
    weight: Tensor
    bias: Tensor | None
    offset: float

    def find(self, changes: Changes) -> NormChange | None:
        """See `Site`."""
        return changes.norm(self.names, self.weight, self.bias, self.offset)


@dataclass(frozen=True)
class Placed:
    """See `adapters.Change`."""

    layer: Changeable
    change: AnyChange

    @property
    def nbytes(self) -> int:
        return self.change.nbytes

    @property
    def is_capturable(self) -> bool:
        return self.layer.is_capturable

    def put(self, row: int) -> None:
        self.layer.put(row, self.change)

    def take_out(self, row: int) -> None:
        self.layer.put(row, None)


@dataclass
class Sites:
    """Of one model.

    num_rows: adapters at once; elsewhere: what stands before the names of tensors that other ranks change layers by;
    budget: bytes of all rows together.
    """

    backend: Backend
    num_rows: int
    dtype: torch.dtype
    elsewhere: Sequence[str] = ()
    budget: float = math.inf
    tokens: TokenAdapters = field(default_factory=TokenAdapters)
    of_pairs: TokenAdapters = field(default_factory=TokenAdapters)  # of tokens sorted by expert
    all: list[Site] = field(default_factory=list)

    def linear(
        self,
        layer: LinearFormat,
        pieces: Sequence[Piece],
        *,
        is_gated: bool,
        num_outputs: int | None = None,
        tied_to: Piece | None = None,
    ) -> LinearFormat:
        """See `weights.Adapting`."""
        adapted = self.backend.adapted(layer, self.num_rows, self.tokens, is_gated=is_gated)
        self.all.append(LinearSite(adapted, pieces, num_outputs, tied_to))
        return adapted

    def experts(self, layer: GroupedLinear, pieces: Sequence[Sequence[Piece]], *, is_gated: bool) -> GroupedLinear:
        """See `weights.Adapting`."""
        adapted = self.backend.adapted_experts(layer, self.num_rows, self.of_pairs, is_gated=is_gated)
        self.all.append(ExpertsSite(adapted, pieces))
        return adapted

    @contextmanager
    def pairs(self, spread: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """See `weights.Adapting`."""
        rows = self.tokens.rows
        if rows is None:
            yield
            return
        # As numbers that hold every row, and that what spreads tokens can spread.
        own = spread(rows.float().unsqueeze(1)).squeeze(1).long()
        with self.of_pairs.of(TokenAdapters(own, self.tokens.present)):
            yield

    def table(self, piece: Piece) -> Callable[[Tensor, Tensor], Tensor]:
        """See `weights.Adapting`."""
        adapted = AdaptedTable(self.tokens, self.backend.device)
        self.all.append(TableSite(adapted, piece))
        return adapted

    def norm(self, norm: Norm, names: Sequence[str], weight: Tensor, bias: Tensor | None, offset: float) -> Norm:
        """See `weights.Adapting`."""
        adapted = AdaptedNorm(norm, self.tokens, self.backend.device)
        self.all.append(NormSite(adapted, names, weight, bias, offset))
        return adapted

    def read(self, key: bytes, folder: Path) -> list[Change]:
        """What an adapter makes of these layers. Raises AdapterError."""
        with closing(AdapterFiles(folder, key, torch.finfo(self.dtype).max)) as files:
            changes, found = Changes(files, self.dtype, self.budget), []
            for site in self.all:
                if (change := site.find(changes)) is not None:
                    changes.spend(change.nbytes)  # before more of it is read
                    found.append((site.layer, change))
            changes.refuse_leftovers([plain_name(name) for name in self.elsewhere])
            files.refuse_changed()
        return [Placed(layer, layer.stage(change)) for layer, change in found]

    def nothing(self) -> list[Change]:
        """Changes of all linear layers that change nothing, and yet are computed as others."""
        layers = [site.layer for site in self.all if isinstance(site, LinearSite)]
        return [Placed(layer, layer.stage(LinearChange())) for layer in layers]
