"""Token embedding and output head, both split by vocabulary.

The vocabulary is padded to a multiple of the world size, so that every rank holds equally many rows; the padding is
zero in the embedding and minus infinity in the logits. Where the head is stored in fewer bits, a table that is tied to
it is too, and gives back the rows that a step needs; scales are those of whole rows, which no rank divides.

Shapes: T tokens, E embedding width, V vocabulary, Vl local vocabulary (padded).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from server.arch.spec import ArchSpec
from server.backends.protocol import LinearFormat, MakeLinear
from server.backends.reference.linear import DenseFormat
from server.blocks import ceil_divide
from server.checkpoint.random_weights import RandomCheckpoint
from server.checkpoint.weights import Adapting, Piece, Weights
from server.quantisation.stored import Stored, padded, with_unit_rows
from server.ranks.collectives import Shard


class Embedding:
    """This rank's rows of the embedding table; the ranks' partial results are summed.

    dtype: of the rows that come out of it.
    """

    def __init__(self, table: Stored, shard: Shard, dtype: torch.dtype):
        self.table = table  # [Vl, E], empty where the head keeps the rows
        self.shard = shard
        self._num_rows, self._width = table.shape
        self._start = shard.rank * self._num_rows
        self._dtype = dtype
        self._rows: Callable[[Tensor], Tensor] = partial(_rows_of, table)
        self._changed: Callable[[Tensor, Tensor], Tensor] | None = None

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] → [T, E]."""
        if self.shard.world_size == 1:
            return self._adapted(token_ids, self._rows(token_ids).to(self._dtype))
        local = token_ids - self._start
        elsewhere = (local < 0) | (local >= self._num_rows)
        local = local.masked_fill(elsewhere, 0)
        rows = self._adapted(local, self._rows(local).to(self._dtype))
        return self.shard.all_reduce(rows.masked_fill(elsewhere.unsqueeze(-1), 0))

    def _adapted(self, token_ids: Tensor, rows: Tensor) -> Tensor:
        return rows if self._changed is None else self._changed(token_ids, rows)

    def change_by(self, changed: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Have something change the rows [T, E] of tokens [T], counted from this rank's first."""
        self._changed = changed

    def leave_to(self, head: RowFormat) -> None:
        """Read rows from a tied head's weight, and keep none."""
        self._rows = head.rows
        self.table = torch.empty(0, self._width, dtype=self._dtype)


def _rows_of(table: Stored, ids: Tensor) -> Tensor:
    return F.embedding(ids, table) if isinstance(table, Tensor) else table.rows(ids)


@runtime_checkable
class RowFormat(Protocol):
    """A format that can give back rows of its weight."""

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ids [T] of the weight [F, D]: [T, D]."""


class Head:
    """Logits of this rank's part of the vocabulary."""

    def __init__(self, weight: LinearFormat, bias: Tensor | None, spec: ArchSpec, shard: Shard, nbytes: int):
        self.weight = weight
        self.nbytes = nbytes  # memory that it takes beside the embedding
        self.bias = bias
        (self.start, stop), padding = vocab_share(shard, spec.vocab_size)
        self.width = stop - self.start + padding
        self._num_real = stop - self.start
        self._scale = spec.head_scale
        self._cap = spec.logit_cap

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [T, E] → [T, Vl], as exact as the format knows them: what reads them computes in float32."""
        if self._scale != 1.0:
            hidden = hidden * self._scale
        logits = self.weight.finest(hidden, self.bias)
        if self._cap:
            logits = self._cap * torch.tanh(logits.float() / self._cap)
        if self._num_real < self.width:
            logits[:, self._num_real :].fill_(float("-inf"))
        return logits


def with_own_head(weights: Weights, spec: ArchSpec) -> ArchSpec:
    """The same with a head of its own, where config.json says that it is the embedding, and the checkpoint has another.

    transformers does so. Where both are the same numbers, they are read once more for that.
    """
    if isinstance(weights.checkpoint, RandomCheckpoint) or not (spec.tied_head and weights.has("head")):
        return spec
    head, table = (f"{weights.name_of(role)}.weight" for role in ("head", "embed"))
    return replace(spec, tied_head=False) if weights.checkpoint.differ(head, table) else spec


def load_embedding(weights: Weights, spec: ArchSpec) -> Embedding:
    """This rank's rows of the embedding, stored as the head is where that is tied to it."""
    rows = vocab_rows(weights, "embed", spec.vocab_size, spec.embed_dim or spec.hidden_size)
    table = Embedding(_stored_head(weights, rows) if _shares_rows(spec) else rows, weights.shard, weights.dtype)
    if weights.adapting is not None:
        table.change_by(weights.adapting.table(_table_piece(weights, spec)))
    return table


def _table_piece(weights: Weights, spec: ArchSpec) -> Piece:
    part, _ = vocab_share(weights.shard, spec.vocab_size)
    return weights.table_piece("embed", (spec.vocab_size, spec.embed_dim or spec.hidden_size), part)


def load_head(weights: Weights, spec: ArchSpec, embedding: Embedding | None, make_format: MakeLinear) -> Head:
    """The output head: the embedding's own rows when tied; a format that rearranges them then holds a copy.

    embedding: None where the head is not tied and an earlier stage has it.
    """
    rows = embedding.table if embedding is not None and spec.tied_head else _head_rows(weights, spec)
    if spec.unit_head:
        rows = with_unit_rows(rows)
    if not _shares_rows(spec):
        rows = _stored_head(weights, rows)
    bias = _vocab_bias(weights, spec) if spec.head_bias else None
    weight = make_format(rows)
    if embedding is not None and _shares_rows(spec) and isinstance(weight, RowFormat):
        embedding.leave_to(weight)
    table = None if embedding is None else embedding.table
    is_embedding = (
        isinstance(weight, DenseFormat) and isinstance(table, Tensor) and weight.weight.data_ptr() == table.data_ptr()
    )
    nbytes = 0 if is_embedding else weight.nbytes
    if weights.adapting is not None and not spec.unit_head:
        weight = _adapted_head(weights, weights.adapting, spec, weight)
    return Head(weight, bias, spec, weights.shard, nbytes)


def _adapted_head(weights: Weights, adapting: Adapting, spec: ArchSpec, weight: LinearFormat) -> LinearFormat:
    part, padding = vocab_share(weights.shard, spec.vocab_size)
    piece = weights.piece("head", (spec.vocab_size, spec.embed_dim or spec.hidden_size), rows=[part])
    piece = replace(piece, takes_bias=spec.head_scale == 1.0)
    table = _table_piece(weights, spec) if spec.tied_head else None
    if table is not None:
        piece = replace(piece, read=table.read)  # the checkpoint need not have it twice
    num_outputs = piece.num_outputs + padding
    return adapting.linear(weight, [piece], is_gated=False, num_outputs=num_outputs, tied_to=table)


def _shares_rows(spec: ArchSpec) -> bool:
    """Whether the head's rows are the embedding's, number for number."""
    return spec.tied_head and not spec.unit_head


def _stored_head(weights: Weights, rows: Stored) -> Stored:
    """The head's rows as they are to be stored: a checkpoint's own format stays."""
    if weights.quantise_head is None or not isinstance(rows, Tensor):
        return rows
    return weights.quantise_head(rows)


def vocab_rows(weights: Weights, role: str, vocab_size: int, width: int) -> Stored:
    """This rank's rows [Vl, width] of a table, zeros where the padded vocabulary exceeds the real one."""
    part, padding = vocab_share(weights.shard, vocab_size)
    return padded(weights.stored_table(role, (vocab_size, width), part), padding)


def _head_rows(weights: Weights, spec: ArchSpec) -> Stored:
    """This rank's rows [Vl, E] of a head of its own, as the checkpoint stores them; those of padding are zeros."""
    part, padding = vocab_share(weights.shard, spec.vocab_size)
    return padded(weights.kept("head", (spec.vocab_size, spec.embed_dim or spec.hidden_size), [part]), padding)


def _vocab_bias(weights: Weights, spec: ArchSpec) -> Tensor:
    part, padding = vocab_share(weights.shard, spec.vocab_size)
    return F.pad(weights.bias("head", spec.vocab_size, ranges=[part]), (0, padding))


def vocab_share(shard: Shard, vocab_size: int) -> tuple[tuple[int, int], int]:
    """This rank's half-open rows of the real vocabulary, and how many rows of padding follow them."""
    share = ceil_divide(vocab_size, shard.world_size)
    start = min(shard.rank * share, vocab_size)
    stop = min(start + share, vocab_size)
    return (start, stop), share - (stop - start)
