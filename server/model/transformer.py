"""The model: every family served is this one, described by an `ArchSpec`.

A step is flat: the T tokens of all its sequences stand in one row after the other, prompt chunks and decodes alike, and
only attention knows where a sequence ends. There is no padding, no batch dimension, and no state but the KV cache that
the caller passes in.

An encoder-decoder keeps what its decoder needs of a prompt, keys and values of every decoder layer, in the same cache
under blocks of their own; until they are written, those blocks of the first layer serve the encoder's own attention.

Shapes: T tokens in the step, D model width, R rows whose logits are wanted, Vl this rank's part of the vocabulary, W
elements that a token's key or value takes in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from server.arch.spec import ArchSpec, DynamicScaling, LongScaling, Rope
from server.backends.protocol import LinearFormat, Norm, Rotation, StepMeta
from server.distributed import Shard
from server.layers.embedding import Embedding, Head
from server.layers.position import Rotary
from server.model.layer import LayerStep, Stream
from server.model.streamed import AnyLayer
from server.quant.kv import AS_COMPUTED, KvFormat
from server.stepping.batch import Encoding, Forward
from server.stepping.cache import KVShape
from server.stepping.kv_placement import KvOnDevice, KvPlacement


@dataclass(frozen=True)
class Stack:
    """Layers with what stands before and after them: a decoder without its head, or an encoder."""

    spec: ArchSpec
    embedding: Embedding
    project_in: LinearFormat | None  # from the embedding's width to the model's
    positions: Tensor | None  # [positions, D] learned position vectors
    rotaries: Mapping[Rope, Rotary]
    embed_norm: Norm | None
    layers: Sequence[AnyLayer]
    final_norm: Norm | None
    project_out: LinearFormat | None  # back to the embedding's width

    def __call__(
        self, token_ids: Tensor, kv_caches: Sequence[Tensor], meta: StepMeta, cross: StepMeta | None = None
    ) -> Tensor:
        """token_ids [T] → final hidden states [T, D]. kv_caches: one [2, B, K, P, W] per layer, written in place."""
        stream, step = self.begin(token_ids, meta, cross)
        for layer, kv in zip(self.layers, kv_caches, strict=True):
            stream = layer(stream, kv, step)
        return self.end(stream)

    def begin(self, token_ids: Tensor, meta: StepMeta, cross: StepMeta | None = None) -> tuple[Stream, LayerStep]:
        """token_ids [T] → the residual stream before the first layer, and what every layer is told."""
        return Stream(self._embed(token_ids, meta)), LayerStep(meta, self._rotations(meta), cross)

    def end(self, stream: Stream) -> Tensor:
        """The residual stream behind the last layer → final hidden states [T, D]."""
        x = stream.total if self.final_norm is None else stream.normed(self.final_norm)[1]
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
    cache: KvFormat = AS_COMPUTED
    kv_placement: KvPlacement = field(default_factory=KvOnDevice)

    def run(self, forward: Forward, kv_caches: Sequence[Tensor]) -> Tensor:
        """The final hidden states [T, D] of a pass. kv_caches: one [2, B, K, P, W] per layer, written to.

        Raises DiskError where weights or blocks that are on a disk cannot be moved.
        """
        with self.kv_placement.step(forward):
            if forward.encoding is not None:
                self._encode(forward.encoding, kv_caches)
            return self.decoder(forward.token_ids, kv_caches, forward.meta, forward.cross)

    def _encode(self, encoding: Encoding, kv_caches: Sequence[Tensor]) -> None:
        """Read prompts, each token seeing its whole prompt, and keep what the decoder needs of them."""
        assert self.encoder is not None, "only an encoder-decoder encodes"
        encoded = self.encoder(encoding.token_ids, [kv_caches[0]] * len(self.encoder.layers), encoding.meta)
        for layer, kv in zip(self.decoder.layers, kv_caches, strict=True):
            layer.remember(encoded, kv, encoding.meta)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, D] → [R, Vl]. See `Head`."""
        return self.head(hidden)

    @property
    def nbytes(self) -> int:
        """Memory of this rank's matrices; norms, biases and positions are too small to matter."""
        encoder = self.encoder.nbytes if self.encoder else 0
        return self.decoder.embedding.table.nbytes + self.head.nbytes + encoder + self.decoder.nbytes

    @property
    def vocab_size(self) -> int:
        """Tokens of the whole vocabulary."""
        return self.spec.vocab_size

    @property
    def vocab_range(self) -> tuple[int, int]:
        """The first token whose logits this rank computes, and how many it computes, with padding."""
        return self.head.start, self.head.width

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
        kv_heads = len(local_kv_heads(self.spec, self.decoder.embedding.shard))
        return KVShape(self.spec.num_layers, kv_heads, self.spec.head_dim, dtype, format=self.cache)


def local_kv_heads(spec: ArchSpec, shard: Shard) -> range:
    """This rank's kv heads: its share, or the one that its heads use where there are fewer than ranks."""
    if spec.num_kv_heads >= shard.world_size:
        return range(*shard.range(spec.num_kv_heads))
    mine = shard.rank * spec.num_kv_heads // shard.world_size
    return range(mine, mine + 1)
