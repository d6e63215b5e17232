"""The model: every family served is this one, described by an `ArchSpec`.

A step is flat: the T tokens of all its sequences stand in one row after the other, prompt chunks and decodes alike, and
only attention knows where a sequence ends. There is no padding, no batch dimension, and no state but the KV cache that
the caller passes in.

An encoder-decoder keeps what its decoder needs of a prompt, keys and values of every decoder layer, in the same cache
under blocks of their own; until they are written, those blocks of the first layer serve the encoder's own attention.

Shapes: T tokens in the step, D model width, N local heads, K local kv heads, H head dim, R rows whose logits are
wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from server.attention import Attention, MakeAttention, Scores, StepMeta, split_heads
from server.batch import Encoding, Forward
from server.cache import KVShape
from server.distributed import Shard
from server.layers.embedding import Embedding, Head, load_embedding, load_head
from server.layers.linear import ColumnLinear, DenseFormat, LinearFormat, MakeFormat, RowLinear, load_column, load_row
from server.layers.mlp import DenseMlp, MoeMlp, load_mlp
from server.layers.norm import MakeNorm, Norm, load_norm, stock_norm
from server.layers.position import Rotary, Rotation, alibi_slopes, bucket_bias
from server.model.spec import ArchSpec, DynamicScaling, LayerSpec, Learned, LongScaling, Residual, Rope
from server.weights import Weights, head_ranges


@dataclass(frozen=True)
class Step:
    """What every layer is told about the step it is in."""

    meta: StepMeta
    rotations: Mapping[Rope, Rotation]
    cross: StepMeta | None = None  # the same tokens, attending to the encoder's output


@dataclass(frozen=True)
class AttentionBlock:
    """Projections around attention."""

    qkv: ColumnLinear  # rows [q | k | v] of this rank's heads
    out: RowLinear
    q_norm: Norm | None
    k_norm: Norm | None
    attention: Attention
    spec: ArchSpec
    layer: LayerSpec

    @property
    def nbytes(self) -> int:
        return self.qkv.weight.nbytes + self.out.weight.nbytes

    def __call__(self, x: Tensor, kv: Tensor, step: Step) -> Tensor:
        """x [T, D] → attended values [T, N * H], not yet projected; writes keys and values into kv [2, B, K, P, H]."""
        heads = self._heads(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = split_heads(heads, kv_heads=kv.shape[2])
            heads = torch.cat([self.q_norm(q), self.k_norm(k), v], dim=1)
        position = self.layer.position
        rotation = step.rotations[position] if isinstance(position, Rope) else None
        q = self.attention.place(heads, kv, rotation, step.meta)
        return self.attention.attend(q, kv, step.meta, self.layer.window).flatten(1)

    def _heads(self, x: Tensor) -> Tensor:
        """x [T, D] → its queries, keys and values [T, N + 2K, H]."""
        qkv = self.qkv(x)
        if self.spec.qkv_clip:
            qkv = qkv.clamp(-self.spec.qkv_clip, self.spec.qkv_clip)
        return qkv.view(len(qkv), -1, self.spec.head_dim)


@dataclass(frozen=True)
class CrossBlock:
    """Projections around attention to an encoder's output."""

    q: ColumnLinear
    kv: ColumnLinear  # rows [k | v] of this rank's heads
    out: RowLinear
    attention: Attention
    spec: ArchSpec

    @property
    def nbytes(self) -> int:
        return self.q.weight.nbytes + self.kv.weight.nbytes + self.out.weight.nbytes

    def remember(self, encoded: Tensor, kv: Tensor, meta: StepMeta) -> None:
        """Write the keys and values of an encoder's output [T, D] into kv [2, B, K, P, H]."""
        k, v = self.kv(encoded).view(len(encoded), -1, self.spec.head_dim).chunk(2, dim=1)
        self.attention.write(kv, k, v, meta)

    def __call__(self, x: Tensor, kv: Tensor, step: Step) -> Tensor:
        """x [T, D] → attended values [T, N * H], not yet projected."""
        assert step.cross is not None, "every sequence of an encoder-decoder has an encoder's output"
        q = self.q(x).view(len(x), -1, self.spec.head_dim)
        return self.attention.attend(q, kv, step.cross, window=0).flatten(1)


@dataclass(frozen=True)
class Layer:
    """One layer. Which norms there are and how all is wired is the spec's `residual`."""

    attention: AttentionBlock
    cross: CrossBlock | None  # of an encoder-decoder's decoder
    mlp: DenseMlp | MoeMlp
    norms: Mapping[str, Norm]
    shard: Shard
    wiring: Callable[[Layer, Tensor, Tensor, Step], Tensor]

    @property
    def nbytes(self) -> int:
        return self.attention.nbytes + self.mlp.nbytes + (self.cross.nbytes if self.cross else 0)

    def __call__(self, x: Tensor, kv: Tensor, step: Step) -> Tensor:
        """x [T, D] → [T, D]."""
        return self.wiring(self, x, kv, step)

    def attended(self, x: Tensor, kv: Tensor, step: Step) -> Summand:
        """What attention adds for input x."""
        return partial(self.attention.out, self.attention(x, kv, step)), self.attention.out.bias

    def crossed(self, x: Tensor, kv: Tensor, step: Step) -> Summand:
        """What attention to the encoder's output adds for input x."""
        assert self.cross is not None
        return partial(self.cross.out, self.cross(x, kv, step)), self.cross.out.bias

    def fed(self, x: Tensor) -> Summand:
        """What the mlp adds for input x."""
        return partial(self.mlp, x), self.mlp.bias

    def joined(self, base: Tensor | None, *summands: Summand) -> Tensor:
        """base + the summands over all ranks, for the price of one reduction."""
        is_alone = self.shard.world_size == 1
        total = base if is_alone else None
        for summand, _ in summands:
            total = summand(total, with_bias=is_alone)
        assert total is not None
        if is_alone:
            return total
        total = self.shard.all_reduce(total)
        # What belongs to the whole joins after the reduction: before it, every rank would add it once.
        for whole in (base, *(bias for _, bias in summands)):
            if whole is not None:
                total = total + whole
        return total

    def joined_and_normed(self, norm: Norm, base: Tensor, summand: Summand) -> tuple[Tensor, Tensor]:
        """base + the summand over all ranks, and that normalised."""
        if self.shard.world_size == 1 and not norm.absorbs_addition:
            total = self.joined(base, summand)
            return total, norm(total)
        part, bias = summand
        return norm.add(base, self.shard.all_reduce(part(None, with_bias=False)), bias)


# base, with_bias -> base + this rank's summand; and the bias of the whole.
Summand = tuple[Callable[..., Tensor], Tensor | None]


def _pre(layer: Layer, x: Tensor, kv: Tensor, step: Step) -> Tensor:
    norms = layer.norms
    x, normed = layer.joined_and_normed(norms["mlp_norm"], x, layer.attended(norms["attention_norm"](x), kv, step))
    return layer.joined(x, layer.fed(normed))


def _pre_cross(layer: Layer, x: Tensor, kv: Tensor, step: Step) -> Tensor:
    norms = layer.norms
    x, normed = layer.joined_and_normed(norms["cross_norm"], x, layer.attended(norms["attention_norm"](x), kv, step))
    x, normed = layer.joined_and_normed(norms["mlp_norm"], x, layer.crossed(normed, kv, step))
    return layer.joined(x, layer.fed(normed))


def _pre_normed(layer: Layer, x: Tensor, kv: Tensor, step: Step) -> Tensor:
    normed = layer.norms["attention_norm"](x)
    normed = layer.norms["mlp_norm"](layer.joined(normed, layer.attended(normed, kv, step)))
    return layer.joined(normed, layer.fed(normed))


def _post(layer: Layer, x: Tensor, kv: Tensor, step: Step) -> Tensor:
    x = layer.norms["attention_norm"](layer.joined(x, layer.attended(x, kv, step)))
    return layer.norms["mlp_norm"](layer.joined(x, layer.fed(x)))


def _sandwich(layer: Layer, x: Tensor, kv: Tensor, step: Step) -> Tensor:
    norms = layer.norms
    x = x + norms["attention_post_norm"](layer.joined(None, layer.attended(norms["attention_norm"](x), kv, step)))
    return x + norms["mlp_post_norm"](layer.joined(None, layer.fed(norms["mlp_norm"](x))))


def _parallel_one_norm(layer: Layer, x: Tensor, kv: Tensor, step: Step) -> Tensor:
    normed = layer.norms["attention_norm"](x)
    return layer.joined(x, layer.attended(normed, kv, step), layer.fed(normed))


def _parallel_two_norms(layer: Layer, x: Tensor, kv: Tensor, step: Step) -> Tensor:
    attended = layer.attended(layer.norms["attention_norm"](x), kv, step)
    return layer.joined(x, attended, layer.fed(layer.norms["mlp_norm"](x)))


# How a layer is wired, and which norms that takes.
WIRINGS = {
    Residual.PRE: (_pre, ("attention_norm", "mlp_norm")),
    Residual.PRE_CROSS: (_pre_cross, ("attention_norm", "cross_norm", "mlp_norm")),
    Residual.PRE_NORMED: (_pre_normed, ("attention_norm", "mlp_norm")),
    Residual.POST: (_post, ("attention_norm", "mlp_norm")),
    Residual.SANDWICH: (_sandwich, ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")),
    Residual.PARALLEL_ONE_NORM: (_parallel_one_norm, ("attention_norm",)),
    Residual.PARALLEL_TWO_NORMS: (_parallel_two_norms, ("attention_norm", "mlp_norm")),
}


@dataclass(frozen=True)
class Stack:
    """Layers with what stands before and after them: a decoder without its head, or an encoder."""

    spec: ArchSpec
    embedding: Embedding
    project_in: LinearFormat | None  # from the embedding's width to the model's
    positions: Tensor | None  # [positions, D] learned position vectors
    rotaries: Mapping[Rope, Rotary]
    embed_norm: Norm | None
    layers: Sequence[Layer]
    final_norm: Norm | None
    project_out: LinearFormat | None  # back to the embedding's width

    def __call__(
        self, token_ids: Tensor, kv_caches: Sequence[Tensor], meta: StepMeta, cross: StepMeta | None = None
    ) -> Tensor:
        """token_ids [T] → final hidden states [T, D]. kv_caches: one [2, B, K, P, H] per layer, written in place."""
        x = self._embed(token_ids, meta)
        step = Step(meta, self._rotations(meta), cross)
        for layer, kv in zip(self.layers, kv_caches, strict=True):
            x = layer(x, kv, step)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return x if self.project_out is None else self.project_out(x, None)

    def _embed(self, token_ids: Tensor, meta: StepMeta) -> Tensor:
        x = self.embedding(token_ids)
        if self.spec.embed_scale != 1.0:
            # The scale is rounded to the model's dtype first, as in training.
            x = x * torch.tensor(self.spec.embed_scale, dtype=x.dtype)
        if self.project_in is not None:
            x = self.project_in(x, None)
        if self.positions is not None:
            x = x + self.positions[meta.positions]
        return x if self.embed_norm is None else self.embed_norm(x)

    def _rotations(self, meta: StepMeta) -> dict[Rope, Rotation]:
        return {rope: rotary(meta.positions, meta.prompt_lengths) for rope, rotary in self.rotaries.items()}

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


@dataclass(frozen=True)
class Transformer:
    """One rank's share of a model."""

    spec: ArchSpec
    encoder: Stack | None
    decoder: Stack
    head: Head

    def run(self, forward: Forward, kv_caches: Sequence[Tensor]) -> Tensor:
        """The final hidden states [T, D] of a pass. kv_caches: one [2, B, K, P, H] per layer, written to."""
        if forward.encoding is not None:
            self._encode(forward.encoding, kv_caches)
        return self.decoder(forward.token_ids, kv_caches, forward.meta, forward.cross)

    def _encode(self, encoding: Encoding, kv_caches: Sequence[Tensor]) -> None:
        """Read prompts, each token seeing its whole prompt, and keep what the decoder needs of them."""
        assert self.encoder is not None, "only an encoder-decoder encodes"
        encoded = self.encoder(encoding.token_ids, [kv_caches[0]] * len(self.encoder.layers), encoding.meta)
        for layer, kv in zip(self.decoder.layers, kv_caches, strict=True):
            assert layer.cross is not None, "each layer of the decoder attends to the encoder's output"
            layer.cross.remember(encoded, kv, encoding.meta)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, D] → [R, V] float32."""
        return self.head(hidden)

    @property
    def nbytes(self) -> int:
        """Memory of this rank's matrices; norms, biases and positions are too small to matter."""
        is_shared = self.spec.tied_head and isinstance(self.head.weight, DenseFormat)
        head = 0 if is_shared else self.head.weight.nbytes
        encoder = self.encoder.nbytes if self.encoder else 0
        return self.decoder.embedding.table.nbytes + head + encoder + self.decoder.nbytes

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def decoder_start(self) -> int | None:
        """The token that an encoder-decoder's generations start from; None for a decoder."""
        return self.spec.decoder_start if self.encoder else None

    @property
    def max_positions(self) -> int:
        """Longest sequence; 0: no limit of its own."""
        return self.spec.max_positions

    @property
    def shares_prefixes(self) -> bool:
        """Whether a token's keys and values depend on nothing but the tokens up to it.

        Not so where an encoder's prompt matters too, or where the prompt's length decides how positions are turned.
        """
        ropes = (layer.position for layer in self.spec.layers if isinstance(layer.position, Rope))
        return not self.encoder and not any(isinstance(r.scaling, DynamicScaling | LongScaling) for r in ropes)

    def kv_shape(self, dtype: torch.dtype) -> KVShape:
        """What one token takes in this rank's cache."""
        kv_heads = len(_local_kv_heads(self.spec, self.decoder.embedding.shard))
        return KVShape(self.spec.num_layers, kv_heads, self.spec.head_dim, dtype)


@dataclass(frozen=True)
class Parts:
    """What a model is built with: how attention is computed, and how weights are stored."""

    attention: MakeAttention
    linear: MakeFormat = DenseFormat
    head: MakeFormat = DenseFormat  # quantised checkpoints leave the output head alone
    norm: MakeNorm = stock_norm


def load(weights: Weights, spec: ArchSpec, parts: Parts) -> Transformer:
    """Pull this rank's slices out of the checkpoint. Raises CheckpointError when config and weights disagree."""
    embedding = load_embedding(weights, spec)
    model = Transformer(
        spec=spec,
        encoder=_load_stack(weights.of_encoder(), spec.encoder, embedding, parts) if spec.encoder else None,
        decoder=_load_stack(weights, spec, embedding, parts),
        head=load_head(weights, spec, embedding, parts.head),
    )
    weights.refuse_leftovers()
    return model


def _load_stack(weights: Weights, spec: ArchSpec, embedding: Embedding, parts: Parts) -> Stack:
    hidden, embed_dim = spec.hidden_size, spec.embed_dim
    attention = parts.attention(_scores(weights, spec))
    ropes = {layer.position for layer in spec.layers if isinstance(layer.position, Rope)}
    return Stack(
        spec=spec,
        embedding=embedding,
        project_in=DenseFormat(weights.rows("project_in", (hidden, embed_dim))) if embed_dim else None,
        positions=_load_positions(weights, spec),
        rotaries={rope: Rotary(rope, weights.device) for rope in ropes},
        embed_norm=load_norm(weights, "embed_norm", hidden, spec.norm, parts.norm) if spec.embed_norm else None,
        layers=[_load_layer(weights.of_layer(i), spec, y, attention, parts) for i, y in enumerate(spec.layers)],
        final_norm=load_norm(weights, "final_norm", hidden, spec.norm, parts.norm) if spec.final_norm else None,
        project_out=DenseFormat(weights.rows("project_out", (embed_dim, hidden))) if embed_dim else None,
    )


def _scores(weights: Weights, spec: ArchSpec) -> Scores:
    """How this rank's heads score; slopes and biases are those of the local heads."""
    first, last = weights.shard.range(spec.num_heads)
    slopes = tuple(alibi_slopes(spec.num_heads, spec.alibi)[first:last]) if spec.alibi else ()
    bias = None
    if spec.buckets:
        table = weights.columns("relative_bias", (spec.buckets.num_buckets, spec.num_heads), (first, last))
        bias = bucket_bias(table, spec.buckets)
    return Scores(spec.attention_scale, slopes, spec.score_cap, bias)


def _load_positions(weights: Weights, spec: ArchSpec) -> Tensor | None:
    position = spec.layers[0].position
    if not isinstance(position, Learned):
        return None
    rows = position.offset + position.size
    return weights.table("positions", (rows, spec.hidden_size), (position.offset, rows))


def _load_layer(weights: Weights, spec: ArchSpec, layer: LayerSpec, attention: Attention, parts: Parts) -> Layer:
    wiring, norms = WIRINGS[spec.residual]
    return Layer(
        attention=_load_attention(weights, spec, layer, attention, parts),
        cross=_load_cross(weights, spec, parts) if spec.encoder else None,
        mlp=load_mlp(weights, spec, layer.mlp, parts.linear),
        norms={role: load_norm(weights, role, spec.hidden_size, spec.norm, parts.norm) for role in norms},
        shard=weights.shard,
        wiring=wiring,
    )


def _load_attention(
    weights: Weights, spec: ArchSpec, layer: LayerSpec, attention: Attention, parts: Parts
) -> AttentionBlock:
    size = (spec.hidden_size, spec.num_heads * spec.head_dim)
    return AttentionBlock(
        qkv=_load_qkv(weights, spec, parts.linear),
        out=load_row(weights, "attention_out", size, parts.linear, bias=spec.attention_out_bias),
        q_norm=load_norm(weights, "q_norm", spec.head_dim, spec.norm, parts.norm) if spec.qk_norm else None,
        k_norm=load_norm(weights, "k_norm", spec.head_dim, spec.norm, parts.norm) if spec.qk_norm else None,
        attention=attention,
        spec=spec,
        layer=layer,
    )


def _load_cross(weights: Weights, spec: ArchSpec, parts: Parts) -> CrossBlock:
    inner, hidden = spec.num_heads * spec.head_dim, spec.hidden_size
    part = [weights.shard.range(inner)]
    kv = torch.cat([weights.rows(role, (inner, hidden), part) for role in ("cross_k", "cross_v")])
    return CrossBlock(
        q=load_column(weights, "cross_q", (inner, hidden), parts.linear, bias=False),
        kv=ColumnLinear(parts.linear(kv), None),
        out=load_row(weights, "cross_out", (hidden, inner), parts.linear, bias=False),
        attention=parts.attention(Scores(spec.attention_scale)),
        spec=spec,
    )


def _load_qkv(weights: Weights, spec: ArchSpec, make_format: MakeFormat) -> ColumnLinear:
    """[q | k | v] of this rank's heads, from one tensor or from three."""
    heads, kv_heads = range(*weights.shard.range(spec.num_heads)), _local_kv_heads(spec, weights.shard)
    if weights.has("qkv"):
        ranges = head_ranges(
            weights.names.qkv_layout, spec.num_heads, spec.num_kv_heads, spec.head_dim, heads, kv_heads
        )
        size = ((spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, spec.hidden_size)
        return load_column(weights, "qkv", size, make_format, bias=spec.qkv_bias, ranges=ranges)
    parts = {"q": (spec.num_heads, heads), "k": (spec.num_kv_heads, kv_heads), "v": (spec.num_kv_heads, kv_heads)}
    matrices, biases = [], []
    for role, (count, local) in parts.items():
        part = [(local.start * spec.head_dim, local.stop * spec.head_dim)]
        matrices.append(weights.rows(role, (count * spec.head_dim, spec.hidden_size), part))
        if spec.qkv_bias:
            biases.append(weights.bias(role, count * spec.head_dim, ranges=part))
    return ColumnLinear(make_format(torch.cat(matrices)), torch.cat(biases) if biases else None)


def _local_kv_heads(spec: ArchSpec, shard: Shard) -> range:
    """This rank's kv heads: its share, or the one that its heads use where there are fewer than ranks."""
    if spec.num_kv_heads >= shard.world_size:
        return range(*shard.range(spec.num_kv_heads))
    mine = shard.rank * spec.num_kv_heads // shard.world_size
    return range(mine, mine + 1)
