"""Building a model from a spec: this rank's slices of the checkpoint, in the layers of `layer.py`.

Shapes: D model width, N heads, K kv heads, H head dim.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from server.arch.spec import ArchSpec, KvHeads, LayerNormSpec, LayerSpec, Learned, RmsNormSpec, Rope
from server.arch.stages import Stage
from server.backends.protocol import Attention, Backend, LinearFormat, Norm, Scores, TokenAdapters
from server.checkpoint.formats.protocol import Ranges
from server.checkpoint.weights import Weights, head_ranges, merged
from server.layers.embedding import Embedding, load_embedding, load_head
from server.layers.linear import ColumnLinear, RowLinear, load_column, load_dense, load_linear, load_row
from server.layers.mlp import load_mlp
from server.layers.per_layer import PerLayerBlock, PerLayerEmbedding, load_per_layer_table
from server.layers.position import Rotary, alibi_slopes, bucket_bias
from server.layers.qk_norm import DividedRowNorm, HeadNorm, QkNorm, RowNorm
from server.model.latent import load_latent
from server.model.layer import (
    WIRINGS,
    AttentionBlock,
    BesideBlock,
    CrossBlock,
    JointProjection,
    Layer,
    Mixer,
    QueryBlock,
)
from server.model.recurrent import load_recurrence
from server.model.streamed import OnDevice, Placement
from server.model.transformer import Stack, Transformer, local_kv_heads
from server.quantisation.kv import AS_COMPUTED, Float8, KvFormat
from server.stepping.cache import KvOnDevice, KvPlacement

ON_DEVICE = OnDevice()


def load(
    weights: Weights,
    spec: ArchSpec,
    backend: Backend,
    cache: KvFormat = AS_COMPUTED,
    placement: Placement = ON_DEVICE,
    kv_placement: KvPlacement | None = None,
    report: Callable[[], None] = lambda: None,
    stage: Stage | None = None,
    adapters: TokenAdapters | None = None,
) -> Transformer:
    """Pull this rank's slices out of the checkpoint. Raises CheckpointError when config and weights disagree.

    cache: how keys and values are stored, but for scales that the checkpoint has. placement: where the layers' weights
    are kept. kv_placement: where KV blocks are; None: on the device. report: told of each layer that has been loaded.
    stage: the part of the model that is loaded; None: all of it. adapters: what the layers read that `weights.adapt`
    makes.
    """
    kv_placement = kv_placement or KvOnDevice()
    stage = stage or Stage.whole(spec.num_layers)
    weights = replace(weights, takes_biases=not spec.is_scaled)
    has_table = stage.is_first or (stage.is_last and spec.tied_head)
    embedding = load_embedding(weights, spec) if has_table else None
    # Before the layers: a tied table is then held twice.
    head = load_head(weights, spec, embedding, backend.linear) if stage.is_last else None
    if head is not None and not stage.is_first:
        head.nbytes = head.weight.nbytes  # a tied table is there for the head alone
    loader = StackLoader(weights, spec, backend, cache, placement, kv_placement, report)
    encoder = None
    if spec.encoder and stage.is_first:
        whole = Stage.whole(spec.encoder.num_layers)
        encoder = replace(loader, weights=weights.of_encoder(), spec=spec.encoder).stack(embedding, whole)
    model = Transformer(
        spec=spec,
        shard=weights.shard,
        stage=stage,
        encoder=encoder,
        decoder=loader.stack(embedding, stage),
        head=head,
        cache=cache,
        kv_placement=kv_placement,
        adapters=adapters or TokenAdapters(),
    )
    left_out = weights.names_of_predictors(spec.num_layers, spec.num_predictors) + _of_shared_keys(weights, spec)
    weights.refuse_leftovers(of_other_stages(weights, stage, spec.num_layers) + left_out)
    placement.finish()
    return model


def _of_shared_keys(weights: Weights, spec: ArchSpec) -> tuple[str, ...]:
    """Patterns of what checkpoints may have for keys and values of layers that use those of earlier ones."""
    layers = [weights.of_layer(i) for i, layer in enumerate(spec.layers) if layer.kv_from]
    roles = [role for role in ("k", "v", "k_norm") if weights.has(role)]
    return tuple(rf"^{re.escape(layer.name_of(role))}\." for layer in layers for role in roles)


def of_other_stages(weights: Weights, stage: Stage, num_layers: int) -> tuple[str, ...]:
    """Patterns of the tensors that other stages load."""
    if stage.count == 1:
        return ()
    others = [layer for layer in range(num_layers) if layer not in stage.layers]
    return weights.names_outside_layers() + weights.names_of_layers(others)


def changed_elsewhere(weights: Weights, stage: Stage, num_layers: int) -> tuple[str, ...]:
    """What stands before the names of the tensors by which adapters change other stages.

    What no stage has in this way, such as learned positions, the one that has it refuses.
    """
    others = [layer for layer in range(num_layers) if layer not in stage.layers]
    outside = weights.modules_outside_layers(before=not stage.is_first, after=not stage.is_last)
    return weights.modules_of_layers(others) + outside


@dataclass(frozen=True)
class StackLoader:
    """Builds one stack of layers, each from `weights` of its own: all of them, or one after the other."""

    weights: Weights
    spec: ArchSpec
    backend: Backend
    cache: KvFormat = AS_COMPUTED
    placement: Placement = ON_DEVICE
    kv_placement: KvPlacement = field(default_factory=KvOnDevice)
    report: Callable[[], None] = lambda: None

    def stack(self, embedding: Embedding | None, stage: Stage) -> Stack:
        """The stage's layers, with what stands before and after them."""
        layers = self.placement.stack(len(stage.layers), lambda index: self.layer(stage.layers[index]))
        frame = self.frame(embedding, begins=stage.is_first, ends=stage.is_last)
        return replace(frame, layers=layers, layers_behind=self.spec.num_layers - stage.layers.stop)

    def layer(self, index: int) -> Layer:
        """One layer of the stack."""
        own = replace(self, weights=self.weights.of_layer(index))
        layer = own._layer(index, self._attention_of(index))
        self.report()
        return layer

    def frame(self, embedding: Embedding | None, *, begins: bool = True, ends: bool = True) -> Stack:
        """What stands before and after the layers, without these. begins, ends: whether this stage has either."""
        weights, spec, hidden, embed_dim = self.weights, self.spec, self.spec.hidden_size, self.spec.embed_dim
        ropes = {layer.position for layer in spec.layers if isinstance(layer.position, Rope)}
        return Stack(
            spec=spec,
            embedding=embedding if begins else None,
            project_in=self._whole("project_in", hidden, embed_dim) if embed_dim and begins else None,
            positions=self._positions() if begins else None,
            rotaries={rope: Rotary(rope, weights.device) for rope in ropes},
            embed_norm=self.norm("embed_norm", hidden) if spec.embed_norm and begins else None,
            layers=(),
            final_norm=self.norm("final_norm", hidden) if spec.final_norm and ends else None,
            project_out=self._whole("project_out", embed_dim, hidden) if embed_dim and ends else None,
            per_layer=self._per_layer_embedding() if begins else None,
        )

    def _whole(self, role: str, outputs: int, inputs: int) -> LinearFormat:
        """A small linear layer that every rank has whole."""
        return load_dense(self.weights, [self.weights.piece(role, (outputs, inputs))], self.backend.linear)

    def _attention_of(self, layer: int) -> Attention | None:
        """All layers share theirs, but for those that have sinks, chunks, or scales of keys and values.

        None: the layer does not attend.
        """
        if not self.spec.layers[layer].attends:
            return None
        weights, scores, cache = self.weights.of_layer(layer), self._scores, self.cache
        is_compressed = self.spec.layers[layer].latent is not None
        if isinstance(cache, Float8) and not is_compressed and (scales := weights.kv_scales()) is not None:
            cache = replace(cache, scales=scales)
        if self.spec.layers[layer].sinks:
            heads = self.spec.num_heads
            scores = replace(scores, sinks=weights.bare("sinks", heads, weights.shard.range(heads)))
        if (chunk := self.spec.layers[layer].chunk) > 0:
            scores = replace(scores, chunk=chunk)
        if scores is self._scores and cache is self.cache:
            return self._shared_attention
        return self._attending(scores, cache)

    @cached_property
    def _shared_attention(self) -> Attention:
        return self._attending(self._scores, self.cache)

    def _attending(self, scores: Scores, cache: KvFormat) -> Attention:
        return self.kv_placement.attention(self.backend.attention(scores, cache))

    def norm(self, role: str, size: int) -> Norm:
        """The norm called `role`, over `size` features, replicated on every rank."""
        kind, weight, bias, offset = self.spec.norm, self.weights.vector(role, size), None, 0.0
        if isinstance(kind, LayerNormSpec):
            bias = self.weights.bias(role, size) if kind.bias else None
        elif kind.unit_offset:  # in float32: near 1 the checkpoint's dtype has no room for a distance from 1
            weight, offset = weight.float() + 1, 1.0
        norm = self.backend.norm(weight, bias, kind.eps, is_centred=isinstance(kind, LayerNormSpec))
        if self.weights.adapting is None:
            return norm
        return self.weights.adapting.norm(norm, self.weights.all_names(role), weight, bias, offset)

    def _plain_norm(self, size: int) -> Norm:
        """The root mean square norm without weights."""
        return self.backend.norm(
            torch.ones(size, device=self.weights.device), None, self.spec.norm.eps, is_centred=False
        )

    @cached_property
    def _scores(self) -> Scores:
        """How this rank's heads score; slopes and biases are those of the local heads."""
        spec = self.spec
        first, last = self.weights.shard.range(spec.num_heads)
        slopes = tuple(alibi_slopes(spec.num_heads, spec.alibi)[first:last]) if spec.alibi else ()
        bias = None
        if spec.buckets:
            table = self.weights.columns("relative_bias", (spec.buckets.num_buckets, spec.num_heads), (first, last))
            bias = bucket_bias(table, spec.buckets)
        latent = spec.layers[0].latent
        return Scores(spec.attention_scale, slopes, spec.score_cap, bias, rank=latent.rank if latent else 0)

    def _positions(self) -> Tensor | None:
        position = self.spec.layers[0].position
        if not isinstance(position, Learned):
            return None
        rows = position.offset + position.size
        return self.weights.table("positions", (rows, self.spec.hidden_size), (position.offset, rows))

    def _layer(self, index: int, attention: Attention | None) -> Layer:
        layer, (wiring, norms) = self.spec.layers[index], WIRINGS[self.spec.residual]
        return Layer(
            attention=self._mixer(layer, attention),
            cross=self._cross() if self.spec.encoder else None,
            mlp=None if layer.mlp is None else load_mlp(self.weights, self.spec, layer.mlp, self.backend),
            norms={role: self.norm(role, self.spec.hidden_size) for role in norms},
            shard=self.weights.shard,
            wiring=wiring,
            per_layer=self._per_layer_block(index - self.spec.num_layers),
            scale=self._layer_scale(),
        )

    def _layer_scale(self) -> Tensor | None:
        weights = self.weights
        return weights.bare("layer_scale", 1).view(()).to(weights.dtype) if self.spec.layer_scale else None

    def _per_layer_block(self, place: int) -> PerLayerBlock | None:
        kind, hidden = self.spec.per_layer_inputs, self.spec.hidden_size
        if kind is None:
            return None
        gate, out = self._whole("per_layer_gate", kind.dim, hidden), self._whole("per_layer_out", hidden, kind.dim)
        return PerLayerBlock(gate, out, self.norm("per_layer_post_norm", hidden), kind, place)

    def _per_layer_embedding(self) -> PerLayerEmbedding | None:
        spec, kind = self.spec, self.spec.per_layer_inputs
        if kind is None:
            return None
        return PerLayerEmbedding(
            load_per_layer_table(self.weights, spec, kind),
            self._whole("per_layer_in", spec.num_layers * kind.dim, spec.hidden_size),
            self.norm("per_layer_in_norm", kind.dim),
            spec,
        )

    def _mixer(self, layer: LayerSpec, attention: Attention | None) -> Mixer | None:
        if attention is not None and layer.latent is not None:
            return load_latent(self.weights, self.spec, layer, self.backend, attention)
        if attention is not None and layer.kv_from:
            return self._queries(layer, attention)
        attends = None if attention is None else self._attention(layer, attention)
        if layer.recurrence is None:
            return attends
        recurrence = load_recurrence(self.weights, self.spec, layer.recurrence, self.backend)
        if attends is None:
            return recurrence
        assert isinstance(recurrence.out, RowLinear) and attends.out.bias is None and recurrence.out.bias is None
        inner = self.spec.num_heads * self.spec.head_dim // self.weights.shard.world_size
        widths = (inner, layer.recurrence.part(self.weights.shard.world_size).inner)
        return BesideBlock(attends, recurrence, JointProjection((attends.out, recurrence.out), widths))

    def _queries(self, layer: LayerSpec, attention: Attention) -> QueryBlock:
        spec, weights, dim = self.spec, self.weights, self.spec.kv_heads(layer).dim
        size, make = (spec.num_heads * dim, spec.hidden_size), self.backend.linear
        return QueryBlock(
            q=load_column(weights, "q", size, make, bias=spec.qkv_bias),
            out=load_row(weights, "attention_out", size[::-1], make, bias=spec.attention_out_bias),
            q_norm=self.norm("q_norm", dim) if spec.qk_norm else None,
            attention=attention,
            spec=spec,
            layer=layer,
        )

    def _attention(self, layer: LayerSpec, attention: Attention) -> AttentionBlock:
        spec, heads = self.spec, self.spec.kv_heads(layer)
        size = (spec.hidden_size, spec.num_heads * heads.dim)
        return AttentionBlock(
            qkv=self._qkv(layer),
            gate=self._gate(heads.dim) if spec.attention_gate else None,
            out=load_row(self.weights, "attention_out", size, self.backend.linear, bias=spec.attention_out_bias),
            qk_norm=self._qk_norm(layer, heads),
            v_norm=self._plain_norm(heads.dim) if spec.v_norm else None,
            attention=attention,
            spec=spec,
            layer=layer,
        )

    def _qk_norm(self, layer: LayerSpec, kv: KvHeads) -> QkNorm | None:
        spec, shard = self.spec, self.weights.shard
        if spec.late_qk_norm and not isinstance(layer.position, Rope):
            return None
        if spec.plain_qk_norm:
            plain = self._plain_norm(kv.dim)
            return HeadNorm(plain, plain)
        if spec.qk_norm or spec.late_qk_norm:
            return HeadNorm(self.norm("q_norm", kv.dim), self.norm("k_norm", kv.dim))
        if not spec.qk_row_norm:
            return None
        widths = {"q_norm": spec.num_heads * kv.dim, "k_norm": kv.count * kv.dim}
        if shard.world_size == 1:
            return RowNorm(*(self.norm(role, width) for role, width in widths.items()))
        assert isinstance(spec.norm, RmsNormSpec), "the ranks add up squares"
        local = (range(*shard.range(spec.num_heads)), local_kv_heads(kv.count, shard))
        parts = [
            self.weights.vector(role, width, ranges=[(heads.start * kv.dim, heads.stop * kv.dim)])
            for (role, width), heads in zip(widths.items(), local, strict=True)
        ]
        sizes = [len(part) * shard.world_size for part in parts]
        weights = torch.cat(parts).float().view(-1, kv.dim) + spec.norm.unit_offset
        return DividedRowNorm(weights, weights.new_tensor(sizes), spec.norm.eps, shard)

    def _cross(self) -> CrossBlock:
        spec, weights, make_linear = self.spec, self.weights, self.backend.linear
        inner, hidden = spec.num_heads * spec.head_dim, spec.hidden_size
        part = [weights.shard.range(inner)]
        kv = [weights.piece(role, (inner, hidden), rows=part) for role in ("cross_k", "cross_v")]
        return CrossBlock(
            q=load_column(weights, "cross_q", (inner, hidden), make_linear, bias=False),
            kv=ColumnLinear(load_linear(weights, kv, make_linear), None),
            out=load_row(weights, "cross_out", (hidden, inner), make_linear, bias=False),
            attention=self._attending(Scores(spec.attention_scale), self.cache),
            spec=spec,
        )

    def _gate(self, dim: int) -> ColumnLinear:
        """The gates of this rank's heads, from a tensor of their own or from behind the queries of each."""
        spec, width = self.spec, self.spec.num_heads * dim
        if not self._has_gates_in_q:
            own = (width, spec.hidden_size)
            return load_column(self.weights, "attention_gate", own, self.backend.linear, bias=False)
        gates = self._in_q(range(*self.weights.shard.range(spec.num_heads)), dim, place=1)
        both = (2 * width, spec.hidden_size)
        return load_column(self.weights, "q", both, self.backend.linear, bias=spec.qkv_bias, ranges=gates)

    @property
    def _has_gates_in_q(self) -> bool:
        return self.spec.attention_gate and not self.weights.has("attention_gate")

    def _in_q(self, heads: range, dim: int, place: int = 0) -> Ranges:
        """Where rows of these heads are in q's matrix: queries (`place` 0), or gates (1) where it has them too."""
        step = 2 if self._has_gates_in_q else 1
        return merged([((head * step + place) * dim, (head * step + place + 1) * dim) for head in heads])

    def _qkv(self, layer: LayerSpec) -> ColumnLinear:
        """[q | k | v] of this rank's heads, from one tensor or from three; without v where values are keys."""
        spec, weights, kv = self.spec, self.weights, self.spec.kv_heads(layer)
        inputs = layer.num_inputs * spec.hidden_size
        heads, kv_heads = range(*weights.shard.range(spec.num_heads)), local_kv_heads(kv.count, weights.shard)
        if weights.has("qkv"):
            layout = weights.names.qkv_layout
            ranges = head_ranges(layout, spec.num_heads, kv.count, kv.dim, heads, kv_heads)
            size = ((spec.num_heads + 2 * kv.count) * kv.dim, inputs)
            return load_column(weights, "qkv", size, self.backend.linear, bias=spec.qkv_bias, ranges=ranges)
        kv_part = [(kv_heads.start * kv.dim, kv_heads.stop * kv.dim)]
        queries = spec.num_heads * (2 if self._has_gates_in_q else 1)
        parts = {"q": (queries, self._in_q(heads, kv.dim)), "k": (kv.count, kv_part)}
        if not layer.keys_are_values:
            parts["v"] = (kv.count, kv_part)
        pieces, biases = [], []
        for role, (count, part) in parts.items():
            pieces.append(weights.piece(role, (count * kv.dim, inputs), rows=part))
            if spec.qkv_bias:
                biases.append(weights.bias(role, count * kv.dim, ranges=part))
        matrix = load_linear(weights, pieces, self.backend.linear)
        return ColumnLinear(matrix, torch.cat(biases) if biases else None)
