"""Token embedding and output head, both split by vocabulary.

The vocabulary is padded to a multiple of the world size, so that every rank holds equally many rows; the padding is
zero in the embedding and cut off from the logits.

Shapes: T tokens, D model width, V vocabulary, Vl local vocabulary (padded).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from server.distributed import Shard
from server.layers.linear import DenseFormat, LinearFormat, MakeFormat
from server.model.spec import ArchSpec
from server.weights import Weights


class Embedding:
    """This rank's rows of the embedding table; the ranks' partial results are summed."""

    def __init__(self, table: Tensor, shard: Shard):
        self.table = table  # [Vl, D]
        self._start = shard.rank * len(table)
        self.shard = shard

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] → [T, D]."""
        if self.shard.world_size == 1:
            return F.embedding(token_ids, self.table)
        local = token_ids - self._start
        elsewhere = (local < 0) | (local >= len(self.table))
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.table)
        return self.shard.all_reduce(rows.masked_fill(elsewhere.unsqueeze(-1), 0))


class Head:
    """Logits of the whole vocabulary, gathered from the ranks."""

    def __init__(self, weight: LinearFormat, vocab_size: int, shard: Shard):
        self.weight = weight
        self._vocab_size = vocab_size
        self.shard = shard

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [T, D] → [T, V] float32: sampling must not depend on the model's dtype more than it has to."""
        local = self.weight(hidden, None)
        return self.shard.all_gather(local)[:, : self._vocab_size].float()


def load_embedding(weights: Weights, spec: ArchSpec) -> Embedding:
    """This rank's rows of the embedding."""
    return Embedding(_vocab_rows(weights, "embed", spec), weights.shard)


def load_head(weights: Weights, spec: ArchSpec, embedding: Embedding, make_format: MakeFormat) -> Head:
    """The output head: the embedding's own rows when tied."""
    weight = DenseFormat(embedding.table) if spec.tied_head else make_format(_vocab_rows(weights, "head", spec))
    return Head(weight, spec.vocab_size, weights.shard)


def _vocab_rows(weights: Weights, role: str, spec: ArchSpec) -> Tensor:
    """This rank's rows [Vl, D], zeros where the padded vocabulary exceeds the real one."""
    share = -(-spec.vocab_size // weights.shard.world_size)
    start = min(weights.shard.rank * share, spec.vocab_size)
    stop = min(start + share, spec.vocab_size)
    rows = weights.read(role, "weight", (spec.vocab_size, spec.hidden_size), part=(start, stop))
    padding = share - len(rows)
    return torch.cat([rows, rows.new_zeros(padding, spec.hidden_size)]) if padding else rows
