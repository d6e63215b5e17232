"""The model: every family served is this one, described by an `ArchSpec`.

A step is flat: the T tokens of all its sequences stand in one row after the other, prompt chunks and decodes alike, and
only attention knows where a sequence ends. There is no padding, no batch dimension, and no state but the KV cache that
the caller passes in.

A pipeline stage is the same with some of the layers: what the first one begins with and the last one ends with, the
others lack. Between two stages goes what is `Carried`.

An encoder-decoder keeps what its decoder needs of a prompt, keys and values of every decoder layer, in the same cache
under blocks of their own; until they are written, those blocks of the first layer serve the encoder's own attention.

Shapes: T tokens in the step, D model width, R rows whose logits are wanted, Vl this rank's part of the vocabulary, W
elements that a token's key or value takes in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from server.arch.footprint import least_step_bytes
from server.arch.spec import ArchSpec, DynamicScaling, LongScaling, QueryScale, Rope
from server.arch.stages import Stage
from server.arch.windows import largest_window
from server.backends.protocol import LinearFormat, Norm, Rotation, StepMeta, TokenAdapters
from server.layers.embedding import Embedding, Head, vocab_share
from server.layers.per_layer import PerLayerEmbedding
from server.layers.position import Rotary, query_scales
from server.model.layer import LayerStep, Stream
from server.model.streamed import AnyLayer
from server.quantisation.kv import AS_COMPUTED, KvFormat
from server.ranks.collectives import Shard
from server.stepping.batch import Carried, Encoding, Forward
from server.stepping.cache import Kept, KvOnDevice, KvPlacement, KVShape


@dataclass(frozen=True)
class Stack:
    """Layers with what stands before and after them: a decoder without its head, or an encoder."""

    spec: ArchSpec  # of these layers
    embedding: Embedding | None  # None: an earlier stage has it, and all that stands before the layers
    project_in: LinearFormat | None  # from the embedding's width to the model's
    positions: Tensor | None  # [positions, D] learned position vectors
    rotaries: Mapping[Rope, Rotary]
    embed_norm: Norm | None
    layers: Sequence[AnyLayer]
    final_norm: Norm | None
    project_out: LinearFormat | None  # back to the embedding's width
    per_layer: PerLayerEmbedding | None = None  # of the first stage, where layers are given inputs of their own
    layers_behind: int = 0  # of later stages
    taps: Sequence[int] = ()  # layers of which a speculative model reads the residual stream before them, ascending

    def __call__(
        self,
        token_ids: Tensor,
        kv_caches: Sequence[Kept],
        meta: StepMeta,
        cross: StepMeta | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """token_ids [T] → final hidden states [T, D]. kv_caches: one [2, B, K, P, W] per layer, written in place.

        Where there are taps, what is read there stands behind them: [T, D * (1 + taps)].

        hidden: [T, D] behind the layers of the stage before, where there is one. Where layers are given inputs of
        their own, those of this stage's layers and of later ones stand behind it, and behind what is returned.
        """
        stream, step = self.begin(token_ids, meta, cross, hidden)
        read = []
        for index, (layer, kv) in enumerate(zip(self.layers, kv_caches, strict=True)):
            if index in self.taps:
                read.append(stream.total)
            stream = layer(stream, kv, step)
        if len(self.layers) in self.taps:
            read.append(stream.total)
        hidden = self.end(stream)
        if read:
            return torch.cat([hidden, *read], dim=1)
        if step.per_layer is None or not self.layers_behind:
            return hidden
        return torch.cat([hidden, step.per_layer[:, -self.layers_behind :].flatten(1)], dim=1)

    def begin(
        self, token_ids: Tensor, meta: StepMeta, cross: StepMeta | None = None, hidden: Tensor | None = None
    ) -> tuple[Stream, LayerStep]:
        """token_ids [T] → the residual stream before the first layer, and what every layer is told."""
        x, per_layer = (self._embed(token_ids, meta), None) if hidden is None else self._taken_apart(hidden)
        if self.per_layer is not None:
            per_layer = self.per_layer(token_ids, x)
        ring = None if meta.ring_tables is None else replace(meta, block_tables=meta.ring_tables)
        return Stream(x), LayerStep(meta, self._rotations(meta), cross, self._query_scales(meta), per_layer, ring)

    def _taken_apart(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual stream [T, D], and the inputs [T, layers, dim] of this stage's layers and of later ones."""
        if self.spec.per_layer_inputs is None:
            return hidden, None
        width, dim = self.spec.hidden_size, self.spec.per_layer_inputs.dim
        return hidden[:, :width].contiguous(), hidden[:, width:].unflatten(1, (-1, dim))

    def end(self, stream: Stream) -> Tensor:
        """The residual stream behind the last layer → final hidden states [T, D]; as it is, where a stage follows."""
        x = stream.total if self.final_norm is None else stream.normed(self.final_norm)[1]
        return x if self.project_out is None else self.project_out(x, None)

    def _embed(self, token_ids: Tensor, meta: StepMeta) -> Tensor:
        assert self.embedding is not None, "a later stage is given hidden states"
        x = self.embedding(token_ids)
        if self.spec.embed_scale != 1.0:
            scale = self.spec.embed_scale
            x = x * (torch.tensor(scale, dtype=x.dtype) if self.spec.rounds_embed_scale else scale)
        if self.project_in is not None:
            x = self.project_in(x, None)
        if self.positions is not None:
            x = x + self.positions[meta.positions]
        return x if self.embed_norm is None else self.embed_norm(x)

    def _rotations(self, meta: StepMeta) -> dict[Rope, Rotation]:
        return {rope: rotary(meta.positions, meta.prompt_lengths) for rope, rotary in self.rotaries.items()}

    def _query_scales(self, meta: StepMeta) -> dict[QueryScale, Tensor]:
        scales = {layer.query_scale for layer in self.spec.layers if layer.query_scale is not None}
        return {scale: query_scales(scale, meta.positions) for scale in scales}

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


@dataclass(frozen=True)
class Transformer:
    """One rank's share of a model, or of a stage of it."""

    spec: ArchSpec  # of the whole model
    shard: Shard
    stage: Stage
    encoder: Stack | None  # the first stage has it
    decoder: Stack
    head: Head | None  # the last stage has it
    cache: KvFormat = AS_COMPUTED
    kv_placement: KvPlacement = field(default_factory=KvOnDevice)
    adapters: TokenAdapters = field(default_factory=TokenAdapters)  # what adapted layers read

    def run(self, forward: Forward, kv_caches: Sequence[Kept]) -> Carried:
        """The hidden states behind the last layer. kv_caches: one [2, B, K, P, W] per layer, written to.

        Raises DiskError where weights or blocks that are on a disk cannot be moved.
        """
        with self.kv_placement.step(forward):
            encoded, before = None, forward.carried
            if forward.encoding is not None:
                with self.adapters.of(forward.encoding.meta.adapters):
                    encoded = self._encode(forward.encoding, kv_caches) if before is None else before.encoded
                    assert encoded is not None, "an earlier stage hands on what its encoder made"
                    self._remember(encoded, forward.encoding, kv_caches)
            hidden = None if before is None else before.hidden
            with self.adapters.of(forward.meta.adapters):
                return Carried(self.decoder(forward.token_ids, kv_caches, forward.meta, forward.cross, hidden), encoded)

    def _encode(self, encoding: Encoding, kv_caches: Sequence[Kept]) -> Tensor:
        """Read prompts, each token seeing its whole prompt: [E, D]."""
        assert self.encoder is not None, "only an encoder-decoder encodes"
        return self.encoder(encoding.token_ids, [kv_caches[0]] * len(self.encoder.layers), encoding.meta)

    def _remember(self, encoded: Tensor, encoding: Encoding, kv_caches: Sequence[Kept]) -> None:
        """Keep what the decoder's layers need of encoded prompts."""
        for layer, kv in zip(self.decoder.layers, kv_caches, strict=True):
            assert isinstance(kv, Tensor), "a layer of an encoder-decoder has blocks alone"
            layer.remember(encoded, kv, encoding.meta)

    def logits(self, hidden: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        """hidden [R, D] → [R, Vl]. See `Head`. adapters: which the rows have."""
        assert self.head is not None, "the last stage has the head"
        with self.adapters.of(adapters):
            return self.head(hidden[:, : self.width] if self.decoder.taps else hidden)

    def tapped(self, taps: Sequence[int]) -> Transformer:
        """The same model, which gives the residual stream before these layers behind its hidden states."""
        return replace(self, decoder=replace(self.decoder, taps=tuple(sorted(taps))))

    @property
    def width(self) -> int:
        """Of final hidden states, D."""
        return self.spec.embed_dim or self.spec.hidden_size

    @property
    def nbytes(self) -> int:
        """Memory of this rank's matrices; norms, biases and positions are too small to matter."""
        table = 0 if self.decoder.embedding is None else self.decoder.embedding.table.nbytes
        table += 0 if self.decoder.per_layer is None else self.decoder.per_layer.nbytes
        head = 0 if self.head is None else self.head.nbytes
        encoder = self.encoder.nbytes if self.encoder else 0
        return table + head + encoder + self.decoder.nbytes

    @property
    def vocab_size(self) -> int:
        """Tokens of the whole vocabulary."""
        return self.spec.vocab_size

    @property
    def vocab_range(self) -> tuple[int, int]:
        """The first token whose logits this rank computes, and how many it computes, with padding."""
        (start, stop), padding = vocab_share(self.shard, self.spec.vocab_size)
        return start, stop - start + padding

    @property
    def decoder_start(self) -> int | None:
        """The token that an encoder-decoder's generations start from; None for a decoder."""
        return self.spec.decoder_start if self.spec.encoder else None

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
        return not self.spec.encoder and not any(isinstance(r.scaling, DynamicScaling | LongScaling) for r in ropes)

    @property
    def takes_drafts(self) -> bool:
        """Whether a sequence can go on from any of the tokens that a step computed."""
        return True

    @property
    def has_states(self) -> bool:
        """Whether any layer of the whole model is recurrent."""
        return bool(self.spec.recurrences)

    def kv_shape(self, dtype: torch.dtype) -> KVShape:
        """What one token takes in this rank's cache."""
        return kv_shape(self.spec, self.stage, self.shard, dtype, self.cache)

    def least_step_bytes(self, prefill_tokens: int, dtype: torch.dtype) -> int:
        """See `footprint.least_step_bytes`."""
        return least_step_bytes(self.spec, prefill_tokens, dtype.itemsize, self.shard.world_size)


def kv_shape(spec: ArchSpec, stage: Stage, shard: Shard, dtype: torch.dtype, cache: KvFormat) -> KVShape:
    """What a rank's part of a stage of a model keeps of sequences."""
    layers = [spec.layers[layer] for layer in stage.layers]
    kinds = [layer.recurrence for layer in layers]
    states = [0 if kind is None else kind.part(shard.world_size).state_size for kind in kinds]
    kept = [heads for heads in map(spec.cached, layers) if heads is not None]
    sizes = tuple((len(local_kv_heads(heads.count, shard)), heads.dim) for heads in kept)
    kv_heads, head_dim = sizes[0] if sizes else (spec.num_kv_heads, spec.head_dim)
    differ, rows = sizes if len(set(sizes)) > 1 else (), kept[0].rows if kept else 2
    is_shared = any(layer.kv_from for layer in layers)
    return KVShape(
        len(sizes),
        kv_heads,
        head_dim,
        dtype,
        format=cache,
        sizes=differ,
        rows=rows,
        states=tuple(states),
        attending=tuple(layer.attends for layer in layers),
        sources=tuple(i - layer.kv_from for i, layer in enumerate(layers)) if is_shared else (),
        window=largest_window(spec),
        windows=tuple(layer.window for layer in layers if spec.cached(layer)),
    )


def local_kv_heads(count: int, shard: Shard) -> range:
    """This rank's of so many kv heads: its share, or the one that its heads use where there are fewer than ranks."""
    if count >= shard.world_size:
        return range(*shard.range(count))
    mine = shard.rank * count // shard.world_size
    return range(mine, mine + 1)
