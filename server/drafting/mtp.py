"""The layer that predicts the token after the next, which some checkpoints have beside the model's own (MTP).

DeepSeek-AI 2024 (arXiv 2412.19437, section 2.2): a layer as the model's, whose input is made of the hidden state at a
position, as the head reads it, and of the embedding of the token behind. Embedding and head are the model's. The same
layer goes on from its own output, normalised as the model's is, for any number of tokens.

Left out: further such layers, which would each predict one token more.

Shapes: T tokens of a pass, D model width, R rows, Vl this rank's part of the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from server.arch.spec import ArchSpec
from server.arch.stages import Stage
from server.backends.protocol import Backend, Norm, StepMeta
from server.checkpoint.random_weights import RandomCheckpoint
from server.checkpoint.weights import Weights
from server.layers.embedding import Embedding, load_embedding, load_head
from server.layers.linear import RowLinear, load_row
from server.model.layer import Stream
from server.model.load import StackLoader
from server.model.transformer import Stack, Transformer, kv_shape
from server.quantisation.kv import KvFormat
from server.ranks.collectives import Shard
from server.stepping.cache import KVShape


@dataclass(frozen=True)
class Predictor:
    """See `head.Head`."""

    stack: Stack  # of one layer
    embed_norm: Norm
    hidden_norm: Norm
    joined: RowLinear  # [embedding | hidden state] → the layer's input
    logits: Callable[[Tensor], Tensor]
    shard: Shard
    kv_shape: KVShape
    nbytes: int

    taps = ()
    description = "the model's own layer that predicts the token after the next"

    @property
    def width(self) -> int:
        return self.stack.spec.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return self.kv_shape.dtype

    @property
    def max_positions(self) -> int:
        return self.stack.spec.max_positions

    def inputs(self, features: Tensor) -> Tensor:
        return features[:, : self.width]

    def __call__(self, token_ids: Tensor, inputs: Tensor, meta: StepMeta, caches: Sequence[Tensor]) -> Tensor:
        stream, step = self.stack.begin(token_ids, meta)
        both = torch.cat([self.embed_norm(stream.total), self.hidden_norm(inputs)], dim=1)
        first, end = self.shard.range(both.shape[1])
        part = self.joined(both[:, first:end].contiguous())
        x = part if self.shard.world_size == 1 else self.shard.all_reduce(part)
        (layer,), (kv,) = self.stack.layers, caches
        return self.stack.end(layer(Stream(x), kv, step))


def load_predictor(
    weights: Weights, model: Transformer, backend: Backend, dtype: torch.dtype, cache: KvFormat
) -> Predictor:
    """The first such layer of the checkpoint that a model was loaded from.

    Raises ValueError where there is none, and CheckpointError for tensors that no such layer has.
    """
    spec, shard = model.spec, weights.shard
    own = _weights_of(weights, spec)
    number, hidden = own.layer, spec.hidden_size
    assert number is not None, "it is one of several"
    # The names count the layer behind the model's, or from 0 on.
    loader = StackLoader(own, replace(spec, layers=(spec.predictor,) * (number + 1)), backend, cache)
    embedding = _embedding(own, weights, model)
    joined = load_row(own, "predictor_in", (hidden, 2 * hidden), backend.linear, bias=False)
    logits: Callable[[Tensor], Tensor] = model.logits
    head_bytes = 0
    if _has_other(own, weights, "head", "embed" if spec.tied_head else "head"):
        head = load_head(own, replace(spec, tied_head=False), None, backend.linear)
        logits, head_bytes = head, head.nbytes
    layer = loader.layer(number)
    alone = replace(spec, layers=(spec.predictor,))
    found = Predictor(
        stack=replace(loader.frame(embedding), spec=alone, layers=(layer,)),
        embed_norm=loader.norm("predictor_embed_norm", hidden),
        hidden_norm=loader.norm("predictor_hidden_norm", hidden),
        joined=joined,
        logits=logits,
        shard=shard,
        kv_shape=replace(kv_shape(alone, Stage.whole(1), shard, dtype, cache), window=0),
        nbytes=layer.nbytes + joined.weight.nbytes + head_bytes + _bytes_beside(embedding, model),
    )
    _refuse_others(own, weights, spec)
    return found


def _weights_of(weights: Weights, spec: ArchSpec) -> Weights:
    """Those of the layer. Raises ValueError where there is none."""
    if weights.names.predictor is not None and spec.num_predictors:
        own = weights.of_predictor(spec.num_layers)
        if own.holds("predictor_in"):
            return own
    raise ValueError(
        f"--speculative-method is mtp, but {weights.checkpoint.folder} has no layer that predicts the token after the "
        "next, or none that is served: use auto, or --speculative-model with a draft model"
    )


def _embedding(own: Weights, weights: Weights, model: Transformer) -> Embedding:
    """The model's; read once more in a later stage, and where the layer has another one."""
    if _has_other(own, weights, "embed", "embed"):
        return load_embedding(own, replace(model.spec, tied_head=False))
    return model.decoder.embedding or load_embedding(weights, model.spec)


def _bytes_beside(embedding: Embedding, model: Transformer) -> int:
    return 0 if embedding is model.decoder.embedding else embedding.table.nbytes


def _has_other(own: Weights, weights: Weights, role: str, of_model: str) -> bool:
    """Whether the layer has a table that is not the same as the model's."""
    if isinstance(own.checkpoint, RandomCheckpoint) or not own.holds(role):
        return False
    return own.checkpoint.differ(f"{own.name_of(role)}.weight", f"{weights.name_of(of_model)}.weight")


def _refuse_others(own: Weights, weights: Weights, spec: ArchSpec) -> None:
    """Raise CheckpointError for tensors of the layer that were not read, but for copies of the model's tables."""
    assert own.layer is not None, "it is one of several"
    copies = tuple(rf"^{re.escape(own.name_of(role))}\." for role in ("embed", "head"))
    further = own.names_of_layers(range(own.layer + 1, own.layer + spec.num_predictors))
    own.refuse_leftovers(copies + further, among=weights.names_of_predictors(spec.num_layers, spec.num_predictors))
