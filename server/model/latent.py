"""Attention over compressed keys and values: the projections around it, and this rank's part of them.

Keys and values are never expanded. A head's query is multiplied by what would make its keys, so that it can be scored
against a token's row as it is stored, and the rows that it attends to are multiplied by what would make its values. All
heads share the row: every rank computes and keeps it whole, and has some of the heads
([why](../../docs/decisions/0028-compressed-keys-and-values-stay-so.md)).

Shapes: T tokens in the step, D model width, N local heads, R numbers of a token's row, W with what is rotated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from server.arch.spec import ArchSpec, Latent, LayerSpec, Rope
from server.backends.protocol import Attention, Backend, GroupedLinear, LinearFormat, Norm
from server.checkpoint.weights import Weights
from server.layers.linear import ColumnLinear, Matrix, RowLinear, load_column, load_linear, load_row
from server.model.layer import LayerStep


@dataclass(frozen=True)
class HeadLinear:
    """A linear layer of each head's own."""

    weights: GroupedLinear

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, N, inputs] → [T, N, outputs]."""
        tokens, heads, _ = x.shape
        ends = torch.arange(tokens, tokens * heads + 1, tokens, dtype=torch.int32, device=x.device)
        return self.weights(x.transpose(0, 1).flatten(0, 1), ends).view(heads, tokens, -1).transpose(0, 1)


@dataclass(frozen=True)
class LatentBlock:
    """Projections around attention over compressed keys and values. See `layer.Mixer`."""

    down: LinearFormat  # rows [queries, compressed or of this rank's heads | row | its rotated part]
    query_norm: Norm | None
    up: ColumnLinear | None  # from compressed queries to those of this rank's heads
    row_norm: Norm
    into: HeadLinear  # from a head's query to one in the space of rows
    back: HeadLinear  # from what it attends to there to its value
    out: RowLinear
    attention: Attention
    layer: LayerSpec
    latent: Latent

    @property
    def matrices(self) -> list[Matrix]:
        up = [] if self.up is None else [self.up.weight]
        return [self.down, *up, self.into.weights, self.back.weights, self.out.weight]

    def __call__(self, x: Tensor, kv: Tensor, step: LayerStep) -> Tensor:
        """x [T, D] → attended values [T, N * value_dim], not yet projected; writes rows into kv [1, B, 1, P, W]."""
        rank, rope_dim, key_dim = self.latent.rank, self.latent.rope_dim, self.latent.key_dim
        queries, row, key = self.down(x, None).tensor_split([-rank - rope_dim, -rope_dim], dim=1)
        if self.up is not None and self.query_norm is not None:
            queries = self.up(self.query_norm(queries.contiguous()))
        queries = queries.unflatten(1, (-1, self.latent.query_dim))
        if (scale := self.layer.query_scale) is not None:
            queries = queries * step.query_scales[scale].to(queries.dtype)
        heads = x.new_empty(len(x), queries.shape[1] + 1, self.latent.width)
        heads[:, :-1, :rank] = self.into(queries[..., :key_dim])
        heads[:, :-1, rank:] = queries[..., key_dim:]
        heads[:, -1, :rank] = self.row_norm(row.contiguous())
        heads[:, -1, rank:] = key
        position = self.layer.position
        rotation = step.rotations[position] if isinstance(position, Rope) else None
        attended = self.attention.self_attend(heads, kv, rotation, step.meta, self.layer.window)
        return self.back(attended).flatten(1)


def load_latent(
    weights: Weights, spec: ArchSpec, layer: LayerSpec, backend: Backend, attention: Attention
) -> LatentBlock:
    """This rank's part of one layer."""
    latent, heads = layer.latent, spec.num_heads
    assert latent is not None
    hidden, query_rank, make_linear = spec.hidden_size, latent.query_rank, backend.linear
    first, last = weights.shard.range(heads)
    own = [(first * latent.query_dim, last * latent.query_dim)]
    size = (heads * latent.query_dim, query_rank or hidden)
    queries = weights.piece("q_a", (query_rank, hidden)) if query_rank else weights.piece("q", size, rows=own)
    to_keys, to_values = _of_heads(weights, latent, heads)
    return LatentBlock(
        down=load_linear(weights, [queries, weights.piece("kv_a", (latent.width, hidden))], make_linear),
        query_norm=_norm(weights, "q_a_norm", query_rank, latent, backend) if query_rank else None,
        up=load_column(weights, "q_b", size, make_linear, bias=False, ranges=own) if query_rank else None,
        row_norm=_norm(weights, "kv_a_norm", latent.rank, latent, backend),
        into=HeadLinear(backend.grouped(to_keys, last - first)),
        back=HeadLinear(backend.grouped(to_values, last - first)),
        out=load_row(weights, "attention_out", (hidden, heads * latent.value_dim), make_linear, bias=False),
        attention=attention,
        layer=layer,
        latent=latent,
    )


def _of_heads(weights: Weights, latent: Latent, heads: int) -> tuple[Iterator[Tensor], Iterator[Tensor]]:
    """For each local head the matrices [R, key_dim], from a query to the space of rows, and [value_dim, R], from there
    to a value. They are dense: the checkpoint's has the first one's outputs as inputs, and so its groups."""
    each, (first, last) = latent.key_dim + latent.value_dim, weights.shard.range(heads)
    whole = weights.rows("kv_b", (heads * each, latent.rank), [(first * each, last * each)])
    of_heads = whole.view(-1, each, latent.rank)
    return (head[: latent.key_dim].t() for head in of_heads), (head[latent.key_dim :] for head in of_heads)


def _norm(weights: Weights, role: str, size: int, latent: Latent, backend: Backend) -> Norm:
    return backend.norm(weights.vector(role, size), None, latent.eps, is_centred=False)
