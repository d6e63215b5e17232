"""Texts on their way through a model, one layer at a time, and what is learned of the inputs of its matrices.

Of the texts there are the hidden states of all samples, and one layer's KV cache. All samples are equally long, so that
one cache and one step serve them all, one after the other. A layer is the model's own; the matrices of one of its
places are wrapped, so that each of their inputs is seen as it is used. Of the inputs only sums are kept.

Shapes: L tokens of a sample, T tokens, D model width or input features, V vocabulary.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from server.arch.spec import Activation
from server.backends.device import Device
from server.backends.protocol import GroupedLinear, LinearFormat, StepMeta
from server.blocks import BLOCK_SIZE, num_blocks
from server.layers.embedding import Head
from server.model.layer import AttentionBlock, Layer, LayerStep, Stream
from server.model.transformer import Stack
from server.quantize.plan import PLACES
from server.stepping.batch import BLOCKS, PROMPT_LENGTH, Layout, Tables

Watch = Callable[[int, Tensor], None]  # an expert's number, 0 where there are none, and inputs [T, D] of it


@dataclass(frozen=True)
class Texts:
    """Samples of `length` tokens each."""

    samples: Sequence[Sequence[int]]
    length: int

    @classmethod
    def of(cls, samples: Sequence[Sequence[int]]) -> Texts:
        """At least one sample."""
        return cls(samples, len(samples[0]))


class Streams:
    """The hidden states of some texts between two layers."""

    def __init__(self, texts: Texts, frame: Stack, device: Device) -> None:
        self._texts = texts
        blocks = num_blocks(texts.length)
        kinds = {frame.spec.kv_heads(layer) for layer in frame.spec.layers}
        self._caches = {
            kind: device.empty_kv((2, blocks, kind.count, BLOCK_SIZE, kind.dim), torch.float32) for kind in kinds
        }
        self._tables = Tables.empty(2, blocks, device.torch_device)
        self._tables.entries[1, PROMPT_LENGTH] = texts.length
        self._tables.entries[1, BLOCKS:] = torch.arange(blocks, device=device.torch_device)
        self._states: list[Tensor] = []  # [L, D] each
        self._step: LayerStep | None = None
        for sample in texts.samples:
            token_ids, meta = self._lay_out(sample, device)
            stream, self._step = frame.begin(token_ids, meta)
            self._states.append(stream.total)

    def _lay_out(self, sample: Sequence[int], device: Device) -> tuple[Tensor, StepMeta]:
        layout = Layout.of([(1, 0, len(sample))], list(sample))
        token_ids, meta = self._tables.step(layout, device.upload(layout.numbers))
        return token_ids, replace(meta, context_lengths=[len(sample)])

    def through(self, layer: Layer) -> None:
        """Take every sample through a layer and forget what it was."""
        for index, x in enumerate(self._states):
            self._states[index] = self._one(layer, x)

    def show(self, layer: Layer) -> None:
        """Take every sample through a layer whose matrices are watched, and stay before it."""
        for x in self._states:
            self._one(layer, x)

    def _one(self, layer: Layer, x: Tensor) -> Tensor:
        assert self._step is not None, "there is at least one sample"
        assert isinstance(layer.attention, AttentionBlock), "others are refused"
        return layer(Stream(x), self._caches[layer.attention.kv_heads], self._step).total

    def perplexity(self, frame: Stack, head: Head) -> float:
        """Of the texts, behind the last layer: each token but a sample's first, by those before it.

        inf: more than a float can be; nan: the logits are not numbers.
        """
        total, count = 0.0, 0
        for sample, x in zip(self._texts.samples, self._states, strict=True):
            logits = head(frame.end(Stream(x))[:-1]).float()
            targets = torch.tensor(sample[1:], device=logits.device)
            total += float(F.cross_entropy(logits, targets, reduction="sum"))
            count += len(targets)
        loss = total / count
        return math.inf if loss > math.log(sys.float_info.max) else math.exp(loss)


@dataclass
class Inputs:
    """What is kept of inputs [T, D]."""

    products: Tensor  # [D, D] float32, the sum of x xᵀ
    magnitudes: Tensor  # [D] float32, the sum of |x|
    largest: Tensor  # [D] float32, the largest |x|
    count: int = 0

    @classmethod
    def of(cls, width: int, device: torch.device) -> Inputs:
        """Statistics of no inputs yet."""
        return cls(
            torch.zeros(width, width, device=device),
            torch.zeros(width, device=device),
            torch.zeros(width, device=device),
        )

    def add(self, x: Tensor) -> None:
        """Accumulate the statistics of more inputs."""
        x = x.float()
        self.products.addmm_(x.t(), x)
        self.magnitudes += x.abs().sum(0)
        self.largest = torch.maximum(self.largest, x.abs().amax(0))
        self.count += len(x)

    @property
    def mean_products(self) -> Tensor:
        """[D, D] the mean of x xᵀ."""
        return self.products / max(self.count, 1)

    def divided(self, scale: Tensor) -> Inputs:
        """As if each input had been divided by its scale [D]."""
        return Inputs(
            self.products / (scale[:, None] * scale), self.magnitudes / scale, self.largest / scale, self.count
        )


@dataclass(frozen=True)
class WatchedLinear:
    """A `LinearFormat` that shows its inputs."""

    linear: LinearFormat
    watch: Watch

    @property
    def nbytes(self) -> int:
        """As it is."""
        return self.linear.nbytes

    def __call__(
        self, x: Tensor, bias: Tensor | None, activation: Activation | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """See `LinearFormat`."""
        self.watch(0, x)
        return self.linear(x, bias, activation, residual)

    def finest(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `LinearFormat`."""
        self.watch(0, x)
        return self.linear.finest(x, bias)


@dataclass(frozen=True)
class WatchedExperts:
    """A `GroupedLinear` that shows the inputs of each expert."""

    experts: GroupedLinear
    watch: Watch

    @property
    def nbytes(self) -> int:
        """As they are."""
        return self.experts.nbytes

    def __call__(
        self, x: Tensor, ends: Tensor, activation: Activation | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """See `GroupedLinear`."""
        for expert, (start, stop) in enumerate(pairwise([0, *ends.tolist()])):
            if stop > start:
                self.watch(expert, x[start:stop])
        return self.experts(x, ends, activation, bias)


def watched(layer: Layer, place: str, watch: Watch) -> Layer:
    """The layer with the matrices of one place showing their inputs."""
    part, field, _ = PLACES[place]
    block: Any = getattr(layer, part)
    linear: Any = getattr(block, field)
    if hasattr(linear, "weight"):
        shown: Any = replace(linear, weight=WatchedLinear(linear.weight, watch))
    else:
        shown = WatchedExperts(linear, watch)
    fields: dict[str, Any] = {part: replace(block, **{field: shown})}
    return replace(layer, **fields)
