"""Texts on their way through a model, one layer at a time, and what is learned of the inputs of its matrices.

Of the texts there are the hidden states of all samples, and one layer's KV cache. All samples are equally long, so that
one cache and one step serve them all, one after the other. A layer is the model's own; the matrices of one of its
places are wrapped, so that each of their inputs is seen as it is used. Of the inputs only sums are kept.

Shapes: L tokens of a sample, T tokens, D model width or input features, V vocabulary.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from server.arch.spec import Activation, KvHeads, LayerSpec
from server.backends.device import Device
from server.backends.protocol import GroupedLinear, LinearFormat, StepMeta
from server.blocks import BLOCK_SIZE, num_blocks
from server.layers.embedding import Head
from server.layers.linear import ColumnLinear, RowLinear
from server.layers.mlp import MoeMlp
from server.model.layer import BesideBlock, Layer, LayerStep, Stream
from server.model.transformer import Stack
from server.quantize.plan import PLACES
from server.stepping.batch import BLOCKS, PROMPT_LENGTH, Layout, Tables
from server.stepping.cache import Kept, KvAndState

# Place (`plan.PLACES`) -> what a block calls the matrices there.
FIELDS: Mapping[str, Sequence[str]] = {
    "qkv": ("qkv", "down", "qkvz", "bcx", "zxbcdt"),
    "q_b": ("up",),
    "attention_out": ("out",),
    "recurrence_out": ("out",),
    "up": ("up",),
    "down": ("down",),
}
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
        self._spec, self._device = frame.spec, device
        self._kept: dict[tuple[KvHeads | None, int], Kept] = {}  # by what a layer keeps of a sample
        blocks = num_blocks(texts.length)
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

    def through(self, layer: Layer, index: int) -> None:
        """Take every sample through a layer, the model's `index`-th, and forget what it was."""
        for number, x in enumerate(self._states):
            self._states[number] = self._one(layer, index, x)

    def show(self, layer: Layer, index: int) -> None:
        """Take every sample through a layer whose matrices are watched, and stay before it."""
        for x in self._states:
            self._one(layer, index, x)

    def _one(self, layer: Layer, index: int, x: Tensor) -> Tensor:
        assert self._step is not None, "there is at least one sample"
        return layer(Stream(x), self._kept_by(self._spec.layers[index]), self._step).total

    def _kept_by(self, layer: LayerSpec) -> Kept:
        """Where a layer keeps what it does of the sample at hand, which begins anew."""
        heads, size = self._spec.cached(layer), layer.recurrence.state_size if layer.recurrence else 0
        if (heads, size) not in self._kept:
            self._kept[heads, size] = self._empty(heads, size)
        return self._kept[heads, size]

    def _empty(self, heads: KvHeads | None, size: int) -> Kept:
        states = torch.zeros(2, size, dtype=torch.float32, device=self._device.torch_device)
        if heads is None:
            return states
        shape = (heads.rows, num_blocks(self._texts.length), heads.count, BLOCK_SIZE, heads.dim)
        blocks = self._device.empty_kv(shape, torch.float32)
        return KvAndState(blocks, states) if size else blocks

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
    part, _ = PLACES[place]
    block: Any = getattr(layer, part)
    fields: dict[str, Any] = {part: _watched(block, place, watch)}
    return replace(layer, **fields)


def _watched(block: Any, place: str, watch: Watch) -> Any:
    if isinstance(block, BesideBlock):
        if place == "qkv":  # both read the same
            return replace(block, attention=_watched(block.attention, place, watch))
        parts = list(block.out.parts)
        which = ("attention_out", "recurrence_out").index(place)
        parts[which] = _shown(parts[which], watch)
        return replace(block, out=replace(block.out, parts=tuple(parts)))
    field = next(name for name in FIELDS[place] if hasattr(block, name))
    linear = getattr(block, field)
    shown = WatchedExperts(linear, watch) if isinstance(block, MoeMlp) else _shown(linear, watch)
    return replace(block, **{field: shown})


def _shown(linear: Any, watch: Watch) -> Any:
    """linear: a weight, or what has one beside its bias."""
    if not isinstance(linear, ColumnLinear | RowLinear):
        return WatchedLinear(linear, watch)
    fields: dict[str, Any] = {"weight": WatchedLinear(linear.weight, watch)}
    return replace(linear, **fields)
