"""EAGLE-3 heads (Li et al. 2025, arXiv 2503.01840): a layer that goes on from hidden states of several layers.

What the model had in front of some of its layers becomes one vector for each token. The head's layer attends by that
and by the embedding of the token behind, side by side; what it makes stands in for that vector where the model has
computed nothing yet. Its own vocabulary may be the frequent tokens alone. Where keys and values are, and which rows are
computed when: `head.py`. Left out: trees of candidates, and pipeline stages, each of which has some of the layers.

Shapes: R rows, T tokens of a pass, D width of the head, F features of a token, Vl the served model's columns here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from server.arch.spec import validate
from server.arch.stages import Stage
from server.backends.protocol import Norm, StepMeta
from server.checkpoint import formats
from server.checkpoint.weights import Checkpoint, Weights
from server.drafting.alignment import AlignedLogits
from server.drafting.eagle_layouts import EagleSpec, read, taps_of
from server.drafting.served import Served
from server.layers.embedding import Embedding, load_embedding, load_head
from server.layers.linear import GatheredLinear, load_gathered
from server.model.layer import Layer, LayerStep, Stream
from server.model.load import StackLoader
from server.model.transformer import Stack, kv_shape
from server.stepping.cache import Kept, KVShape

WHOLE = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Fusion:
    """What is read of the model's layers [R, n D'] → one vector [R, D]. norms: of all that, or of each layer."""

    norms: Sequence[Norm]
    linear: GatheredLinear

    def __call__(self, read: Tensor) -> Tensor:
        if self.norms:
            parts = zip(self.norms, read.chunk(len(self.norms), dim=1), strict=True)
            read = torch.cat([norm(part.contiguous()) for norm, part in parts], dim=1)
        return self.linear(read.contiguous())


@dataclass(frozen=True)
class Eagle:
    """See `head.Head`."""

    description: str
    nbytes: int
    kv_shape: KVShape
    taps: Sequence[int]
    features: int  # in front of what was read at taps
    fusion: Fusion
    stack: Stack
    columns: Callable[[Tensor], Tensor]  # [R, D] behind the last norm → [R, Vl]
    goes_on_normed: bool

    max_positions = 0  # rotations know any position

    @property
    def width(self) -> int:
        return self.stack.spec.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return self.kv_shape.dtype

    def inputs(self, features: Tensor) -> Tensor:
        return self.fusion(features[:, self.features :])

    def __call__(self, token_ids: Tensor, inputs: Tensor, meta: StepMeta, caches: Sequence[Tensor]) -> Tensor:
        embedded, step = self.stack.begin(token_ids, meta)
        stream = Stream(torch.cat([embedded.total, inputs], dim=1))
        for layer, kv in zip(self.stack.layers, caches, strict=True):
            stream = layer(stream, kv, step)
        return self.stack.end(stream) if self.goes_on_normed else stream.total

    def logits(self, hidden: Tensor) -> Tensor:
        return self.columns(hidden if self.goes_on_normed else self.stack.end(Stream(hidden)))


def load(folder: Path, hf_config: Mapping[str, Any], served: Served) -> Eagle:
    """The head in a folder. Raises ValueError for one that does not go with the served model."""
    model = served.model
    if model.stage.count > 1:
        raise ValueError(
            "--speculative-model is an EAGLE-3 head, which reads layers of all pipeline stages: use "
            "--pipeline-parallel 1"
        )
    checkpoint = Checkpoint(folder)
    spec = read(hf_config, checkpoint)
    taps = taps_of(spec.taps, model.spec.num_layers)
    _refuse_other_sizes(spec, served)
    weights = Weights(
        *(checkpoint, spec.names, model.shard, served.dtype, served.backend.device.torch_device),
        prefix="model." if any(name.startswith("model.") for name in checkpoint.names()) else "",
        format=formats.choose(None, folder, hf_config).format,
    )
    parts = _Parts(spec, served, checkpoint, weights, StackLoader(weights, spec.layers, served.backend, served.cache))
    embedding, own_bytes = parts.embedding()
    columns, head_bytes = parts.columns()
    fusion, stack = parts.fusion(len(taps)), parts.stack(embedding)
    weights.refuse_leftovers()
    alone = kv_shape(spec.layers, Stage.whole(spec.layers.num_layers), model.shard, served.dtype, served.cache)
    return Eagle(
        description=f"{folder.name}, an EAGLE-3 head",
        nbytes=own_bytes + head_bytes + fusion.linear.nbytes + stack.nbytes,
        kv_shape=replace(alone, window=0),
        taps=taps,
        features=model.width,
        fusion=fusion,
        stack=stack,
        columns=columns,
        goes_on_normed=spec.output_is_normed,
    )


def _refuse_other_sizes(spec: EagleSpec, served: Served) -> None:
    """Raise ValueError for a head of another model than the served one, and for what shards cannot divide."""
    pairs = {
        "hidden states of so many numbers": (spec.target_width, served.model.spec.hidden_size),
        "tokens": (spec.layers.vocab_size, served.model.vocab_size),
    }
    for what, (own, its) in pairs.items():
        if own != its:
            raise ValueError(
                f"--speculative-model is for a model with {what}: {own}, and the model has {its}: use a head that was "
                "trained for this model"
            )
    world_size = served.model.shard.world_size
    validate(spec.layers, world_size)
    if spec.layers.hidden_size % world_size:
        raise ValueError(
            f"--speculative-model has a width of {spec.layers.hidden_size}, which --num-shard {world_size} does not "
            "divide: leave it out"
        )


@dataclass(frozen=True)
class _Parts:
    """Loads the parts of a head."""

    spec: EagleSpec
    served: Served
    checkpoint: Checkpoint
    weights: Weights
    loader: StackLoader

    def embedding(self) -> tuple[Embedding, int]:
        """The head's own, or the model's, and the memory that it takes beside that."""
        if self.weights.holds("embed"):
            own = load_embedding(self.weights, self.spec.layers)
            return own, own.table.nbytes
        shared, model = self.served.model.decoder.embedding, self.served.model
        assert shared is not None, "there is one stage"
        if self.spec.layers.hidden_size != (model.spec.embed_dim or model.spec.hidden_size):
            raise ValueError(
                f"--speculative-model has a width of {self.spec.layers.hidden_size}, but no embedding of its own: use "
                "a head that was trained for this model"
            )
        return shared, 0

    def columns(self) -> tuple[Callable[[Tensor], Tensor], int]:
        """Logits, by the head's own matrix or by the model's, and the memory of its own."""
        spec, model, known = self.spec, self.served.model, self.spec.draft_vocab_size
        is_whole = known == model.vocab_size
        if is_whole and not self.weights.holds("head") and spec.layers.hidden_size == model.width:
            return model.logits, 0
        head = load_head(
            self.weights, replace(spec.layers, vocab_size=known), embedding=None, make_format=self.served.backend.linear
        )
        if is_whole:
            return head, head.nbytes
        return AlignedLogits(head, model.vocab_range, model.shard, self._places()), head.nbytes

    def _places(self) -> Tensor:
        """Which of the model's tokens each of the head's is: [draft_vocab_size]. Raises ValueError."""
        known, device = self.spec.draft_vocab_size, self.served.backend.device.torch_device
        distances = self.checkpoint.read("d2t", (known,), dtypes=WHOLE, dtype=torch.int64)
        places = torch.arange(known) + distances
        if places.min() < 0 or places.max() >= self.spec.layers.vocab_size or len(places.unique()) < known:
            raise ValueError(
                f"d2t of --speculative-model does not give each of its {known} tokens one of the model's: the "
                "checkpoint is damaged, download it again"
            )
        return places.to(device)

    def fusion(self, count: int) -> Fusion:
        """What makes one vector of `count` that are read."""
        spec, weights, read = self.spec, self.weights, count * self.spec.target_width
        found = list(self.checkpoint.shape_of(f"{weights.name_of('fuse')}.weight")[-1:])
        if found != [read]:
            raise ValueError(
                f"--speculative-model reads {sum(found)} numbers of each token, and {count} layers of the model have "
                f"{read}: use a head that was trained for this model"
            )
        norms = [self.loader.norm("input_norm", read)] if spec.norms_all else []
        if spec.norms_each:
            norms = [self.loader.norm(f"fuse_norm_{place}", spec.target_width) for place in range(count)]
        has_bias = f"{weights.name_of('fuse')}.bias" in self.checkpoint
        size = (spec.layers.hidden_size, read)
        return Fusion(norms, load_gathered(weights, "fuse", size, self.served.backend.linear, bias=has_bias))

    def stack(self, embedding: Embedding) -> Stack:
        """The layers, the first of which is given the embedding too, and the last norm."""
        first, *others = [self.loader.layer(index) for index in range(self.spec.layers.num_layers)]
        norm = replace(self.loader, weights=self.weights.of_layer(0)).norm("hidden_norm", self.spec.layers.hidden_size)
        joining = replace(
            first,
            norms={**first.norms, "hidden_norm": norm},
            wiring=partial(_joined, residual_is_normed=self.spec.residual_is_normed),
        )
        return replace(self.loader.frame(embedding), layers=(joining, *others))


def _joined(layer: Layer, stream: Stream, kv: Kept, step: LayerStep, *, residual_is_normed: bool) -> Stream:
    """[e | x]: x += A([norm(e) | norm(x)]);  x += M(norm(x)), where the first x that is added to may be norm(x)."""
    embedded, x = (part.contiguous() for part in stream.x.chunk(2, dim=1))
    normed = layer.norms["hidden_norm"](x)
    both = torch.cat([layer.norms["attention_norm"](embedded), normed], dim=1)
    base = normed if residual_is_normed else x
    x, normed = layer.add(base, layer.attend(both, kv, step)).normed(layer.norms["mlp_norm"])
    return layer.add(x, layer.feed(normed))
