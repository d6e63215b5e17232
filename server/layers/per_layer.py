"""What layers are given of each token beside the residual stream (`spec.PerLayerInputs`), and what they make of it.

The table is split by vocabulary, as the embedding is. The rest is small, and every rank has all of it.

Shapes: T tokens, D model width, L layers, d numbers of a token for one layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from server.arch.spec import ArchSpec, PerLayerInputs
from server.backends.protocol import LinearFormat, Norm
from server.checkpoint.weights import Weights
from server.layers.embedding import Embedding, vocab_rows
from server.layers.linear import Matrix


@dataclass(frozen=True)
class PerLayerEmbedding:
    """Makes the inputs of all layers."""

    table: Embedding  # [vocabulary, L * d]
    projection: LinearFormat  # [L * d, D]
    norm: Norm  # over d
    spec: ArchSpec

    @property
    def nbytes(self) -> int:
        """Memory of its matrices."""
        return self.table.table.nbytes + self.projection.nbytes

    def __call__(self, token_ids: Tensor, x: Tensor) -> Tensor:
        """token_ids [T] and their embeddings x [T, D] → [T, L, d]."""
        kind = self.spec.per_layer_inputs
        assert kind is not None
        scale = torch.tensor(kind.dim**0.5, dtype=x.dtype)
        rows = self.table(token_ids) * scale
        projected = self.projection(x, None) * self.spec.hidden_size**-0.5
        normed = self.norm(projected.unflatten(1, (-1, kind.dim)))
        return (normed + rows.view(normed.shape)) * 2**-0.5


@dataclass(frozen=True)
class PerLayerBlock:
    """Adds to the residual stream what one layer makes of its inputs."""

    gate: LinearFormat  # [d, D]
    out: LinearFormat  # [D, d]
    norm: Norm
    kind: PerLayerInputs
    place: int  # of the layer among all, counted from the last, which is -1: a stage has no inputs of those before it

    @property
    def matrices(self) -> list[Matrix]:
        """Its weights but for the norm."""
        return [self.gate, self.out]

    def __call__(self, x: Tensor, inputs: Tensor) -> Tensor:
        """x [T, D] and inputs [T, layers, d], of this layer and of others → what is added, [T, D]."""
        gated = self.gate(x, None, self.kind.activation) * inputs[:, self.place]
        return self.norm(self.out(gated, None))


def load_per_layer_table(weights: Weights, spec: ArchSpec, kind: PerLayerInputs) -> Embedding:
    """This rank's rows of the table of all layers' inputs."""
    width = spec.num_layers * kind.dim
    rows = vocab_rows(weights, "per_layer_embed", kind.vocab_size, width)
    return Embedding(rows, weights.shard, weights.dtype)
