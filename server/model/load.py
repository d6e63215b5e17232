"""Building a model from a spec: this rank's slices of the checkpoint, in the layers of `layer.py`.

Shapes: D model width, N heads, K kv heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from server.arch.spec import ArchSpec, LayerSpec, Learned, Rope
from server.backends.protocol import Attention, Backend, MakeLinear, Norm, Scores
from server.checkpoint.weights import Weights, head_ranges
from server.layers.embedding import Embedding, load_embedding, load_head
from server.layers.linear import ColumnLinear, load_column, load_row
from server.layers.mlp import load_mlp
from server.layers.norm import load_norm
from server.layers.position import Rotary, alibi_slopes, bucket_bias
from server.model.layer import WIRINGS, AttentionBlock, CrossBlock, Layer
from server.model.transformer import Stack, Transformer, local_kv_heads


def load(weights: Weights, spec: ArchSpec, backend: Backend, format: str = "dense") -> Transformer:
    """Pull this rank's slices out of the checkpoint. Raises CheckpointError when config and weights disagree.

    format: how the matrices of layers are stored, one of the backend's; embedding and head stay as they are.
    """
    embedding = load_embedding(weights, spec)
    loader = _StackLoader(weights, spec, backend, format)
    model = Transformer(
        spec=spec,
        encoder=replace(loader, weights=weights.of_encoder(), spec=spec.encoder).stack(embedding)
        if spec.encoder
        else None,
        decoder=loader.stack(embedding),
        head=load_head(weights, spec, embedding, backend.formats["dense"]),
    )
    weights.refuse_leftovers()
    return model


@dataclass(frozen=True)
class _StackLoader:
    """Builds one stack of layers, each from `weights` of its own."""

    weights: Weights
    spec: ArchSpec
    backend: Backend
    format: str

    @property
    def make_linear(self) -> MakeLinear:
        return self.backend.formats[self.format]

    def stack(self, embedding: Embedding) -> Stack:
        """All layers, with what stands before and after them."""
        weights, spec, hidden, embed_dim = self.weights, self.spec, self.spec.hidden_size, self.spec.embed_dim
        attention = self.backend.attention(self._scores())
        ropes = {layer.position for layer in spec.layers if isinstance(layer.position, Rope)}
        dense = self.backend.formats["dense"]
        return Stack(
            spec=spec,
            embedding=embedding,
            project_in=dense(weights.rows("project_in", (hidden, embed_dim))) if embed_dim else None,
            positions=self._positions(),
            rotaries={rope: Rotary(rope, weights.device) for rope in ropes},
            embed_norm=self._norm("embed_norm", hidden) if spec.embed_norm else None,
            layers=[
                replace(self, weights=weights.of_layer(i))._layer(layer, attention)
                for i, layer in enumerate(spec.layers)
            ],
            final_norm=self._norm("final_norm", hidden) if spec.final_norm else None,
            project_out=dense(weights.rows("project_out", (embed_dim, hidden))) if embed_dim else None,
        )

    def _norm(self, role: str, size: int) -> Norm:
        return load_norm(self.weights, role, size, self.spec.norm, self.backend)

    def _scores(self) -> Scores:
        """How this rank's heads score; slopes and biases are those of the local heads."""
        spec = self.spec
        first, last = self.weights.shard.range(spec.num_heads)
        slopes = tuple(alibi_slopes(spec.num_heads, spec.alibi)[first:last]) if spec.alibi else ()
        bias = None
        if spec.buckets:
            table = self.weights.columns("relative_bias", (spec.buckets.num_buckets, spec.num_heads), (first, last))
            bias = bucket_bias(table, spec.buckets)
        return Scores(spec.attention_scale, slopes, spec.score_cap, bias)

    def _positions(self) -> Tensor | None:
        position = self.spec.layers[0].position
        if not isinstance(position, Learned):
            return None
        rows = position.offset + position.size
        return self.weights.table("positions", (rows, self.spec.hidden_size), (position.offset, rows))

    def _layer(self, layer: LayerSpec, attention: Attention) -> Layer:
        wiring, norms = WIRINGS[self.spec.residual]
        return Layer(
            attention=self._attention(layer, attention),
            cross=self._cross() if self.spec.encoder else None,
            mlp=load_mlp(self.weights, self.spec, layer.mlp, self.backend, self.format),
            norms={role: self._norm(role, self.spec.hidden_size) for role in norms},
            shard=self.weights.shard,
            wiring=wiring,
        )

    def _attention(self, layer: LayerSpec, attention: Attention) -> AttentionBlock:
        spec = self.spec
        size = (spec.hidden_size, spec.num_heads * spec.head_dim)
        return AttentionBlock(
            qkv=self._qkv(),
            out=load_row(self.weights, "attention_out", size, self.make_linear, bias=spec.attention_out_bias),
            q_norm=self._norm("q_norm", spec.head_dim) if spec.qk_norm else None,
            k_norm=self._norm("k_norm", spec.head_dim) if spec.qk_norm else None,
            attention=attention,
            spec=spec,
            layer=layer,
        )

    def _cross(self) -> CrossBlock:
        spec, weights, make_linear = self.spec, self.weights, self.make_linear
        inner, hidden = spec.num_heads * spec.head_dim, spec.hidden_size
        part = [weights.shard.range(inner)]
        kv = torch.cat([weights.rows(role, (inner, hidden), part) for role in ("cross_k", "cross_v")])
        return CrossBlock(
            q=load_column(weights, "cross_q", (inner, hidden), make_linear, bias=False),
            kv=ColumnLinear(make_linear(kv), None),
            out=load_row(weights, "cross_out", (hidden, inner), make_linear, bias=False),
            attention=self.backend.attention(Scores(spec.attention_scale)),
            spec=spec,
        )

    def _qkv(self) -> ColumnLinear:
        """[q | k | v] of this rank's heads, from one tensor or from three."""
        spec, weights, head_dim = self.spec, self.weights, self.spec.head_dim
        heads, kv_heads = range(*weights.shard.range(spec.num_heads)), local_kv_heads(spec, weights.shard)
        if weights.has("qkv"):
            layout = weights.names.qkv_layout
            ranges = head_ranges(layout, spec.num_heads, spec.num_kv_heads, head_dim, heads, kv_heads)
            size = ((spec.num_heads + 2 * spec.num_kv_heads) * head_dim, spec.hidden_size)
            return load_column(weights, "qkv", size, self.make_linear, bias=spec.qkv_bias, ranges=ranges)
        parts = {"q": (spec.num_heads, heads), "k": (spec.num_kv_heads, kv_heads), "v": (spec.num_kv_heads, kv_heads)}
        matrices, biases = [], []
        for role, (count, local) in parts.items():
            part = [(local.start * head_dim, local.stop * head_dim)]
            matrices.append(weights.rows(role, (count * head_dim, spec.hidden_size), part))
            if spec.qkv_bias:
                biases.append(weights.bias(role, count * head_dim, ranges=part))
        return ColumnLinear(self.make_linear(torch.cat(matrices)), torch.cat(biases) if biases else None)
