"""Texts on their way through a model, one layer at a time: hidden states of all samples, and one layer's KV cache.

All samples are equally long, so that one cache and one step serve them all, one after the other.

Shapes: L tokens of a sample, D model width, V vocabulary.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from server.backends.device import Device
from server.backends.protocol import StepMeta
from server.blocks import BLOCK_SIZE, num_blocks
from server.layers.embedding import Head
from server.model.layer import Layer, LayerStep, Stream
from server.model.transformer import Stack
from server.stepping.batch import BLOCKS, PROMPT_LENGTH, Layout, Tables


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

    def __init__(self, texts: Texts, frame: Stack, model_shape: tuple[int, int], device: Device) -> None:
        """model_shape: kv heads and head dim."""
        self._texts = texts
        blocks = num_blocks(texts.length)
        self._kv = device.empty_kv((2, blocks, model_shape[0], BLOCK_SIZE, model_shape[1]), torch.float32)
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
        return layer(Stream(x), self._kv, self._step).total

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
