"""The decoder: every family served is this one, described by an `ArchSpec`.

A step is flat: the T tokens of all its sequences stand in one row after the other, prompt chunks and decodes alike, and
only attention knows where a sequence ends. There is no padding, no batch dimension, and no state but the KV cache that
the caller passes in.

Shapes: T tokens in the step, D model width, N local heads, K local kv heads, H head dim, R rows whose logits are
wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from server.attention import Attention, StepMeta
from server.distributed import divide
from server.layers.embedding import Embedding, Head, load_embedding, load_head
from server.layers.linear import ColumnLinear, MakeFormat, RowLinear, load_qkv, load_row
from server.layers.mlp import DenseMlp, load_mlp
from server.layers.norm import Norm, load_norm
from server.model.spec import ArchSpec, Residual
from server.weights import Weights


@dataclass(frozen=True)
class Layer:
    """One decoder layer: attention, then the mlp, each around a residual connection."""

    attention_norm: Norm
    qkv: ColumnLinear
    attention_out: RowLinear
    mlp_norm: Norm
    mlp: DenseMlp
    residual: Residual
    head_dim: int

    def __call__(self, x: Tensor, kv: Tensor, attention: Attention, meta: StepMeta) -> Tensor:
        """x [T, D] → [T, D]; writes this layer's keys and values into kv."""
        normed = self.attention_norm(x)
        x = self._base(x, normed) + self._attend(normed, kv, attention, meta)
        normed = self.mlp_norm(x)
        return self._base(x, normed) + self.mlp(normed)

    def _base(self, x: Tensor, normed: Tensor) -> Tensor:
        return normed if self.residual is Residual.PRE_NORMED else x

    def _attend(self, x: Tensor, kv: Tensor, attention: Attention, meta: StepMeta) -> Tensor:
        q, k, v = self._split(self.qkv(x), kv_heads=kv.shape[3])
        attention.write(kv, k, v, meta)
        return self.attention_out(attention.attend(q, kv, meta).flatten(1))

    def _split(self, qkv: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """[T, (N + 2K) * H] → q [T, N, H], k [T, K, H], v [T, K, H]."""
        heads = qkv.view(len(qkv), -1, self.head_dim)
        return heads[:, : -2 * kv_heads], heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:]


@dataclass(frozen=True)
class Transformer:
    """One rank's share of a decoder."""

    spec: ArchSpec
    embedding: Embedding
    embed_norm: Norm | None
    layers: Sequence[Layer]
    final_norm: Norm
    head: Head
    attention: Attention

    def __call__(self, token_ids: Tensor, kv_caches: Sequence[Tensor], meta: StepMeta) -> Tensor:
        """token_ids [T] → final hidden states [T, D]. kv_caches: one [2, B, P, K, H] per layer, written in place."""
        x = self.embedding(token_ids)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        for layer, kv in zip(self.layers, kv_caches, strict=True):
            x = layer(x, kv, self.attention, meta)
        return self.final_norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, D] → [R, V] float32."""
        return self.head(hidden)

    @property
    def nbytes(self) -> int:
        """Memory of this rank's matrices; norms and biases are too small to matter."""
        matrices = [m for y in self.layers for m in (y.qkv, y.attention_out, y.mlp.up, y.mlp.down)]
        head = 0 if self.spec.tied_head else self.head.weight.nbytes
        return self.embedding.table.nbytes + head + sum(m.weight.nbytes for m in matrices)

    @property
    def num_local_kv_heads(self) -> int:
        """Key-value heads whose cache this rank keeps."""
        return divide(self.spec.num_kv_heads, self.embedding.shard.world_size)


def load(weights: Weights, spec: ArchSpec, attention: Attention, make_format: MakeFormat) -> Transformer:
    """Pull this rank's slices out of the checkpoint. Raises CheckpointError when config and weights disagree."""
    embedding = load_embedding(weights, spec)
    model = Transformer(
        spec=spec,
        embedding=embedding,
        embed_norm=load_norm(weights, "embed_norm", spec.hidden_size, spec.norm) if spec.embed_norm else None,
        layers=[_load_layer(weights.of_layer(i), spec, make_format) for i in range(spec.num_layers)],
        final_norm=load_norm(weights, "final_norm", spec.hidden_size, spec.norm),
        head=load_head(weights, spec, embedding, make_format),
        attention=attention,
    )
    weights.refuse_leftovers()
    return model


def _load_layer(weights: Weights, spec: ArchSpec, make_format: MakeFormat) -> Layer:
    hidden = spec.hidden_size
    return Layer(
        attention_norm=load_norm(weights, "attention_norm", hidden, spec.norm),
        qkv=load_qkv(weights, spec, make_format),
        attention_out=load_row(
            weights, "attention_out", (hidden, spec.num_heads * spec.head_dim), make_format, bias=spec.linear_bias
        ),
        mlp_norm=load_norm(weights, "mlp_norm", hidden, spec.norm),
        mlp=load_mlp(weights, spec, make_format),
        residual=spec.residual,
        head_dim=spec.head_dim,
    )
