"""Decode steps that are captured in graphs, one for each batch size, and then replayed without Python.

A step in which all sequences decode does the same from one token to the next: only what the device's tables and two
short inputs hold is different, the sequences' rows and positions. The step advances the positions itself, and keeps the
tokens that it chose, so that while the same sequences decode the host uploads nothing.

Each has two forms: one that chooses the most likely tokens, and one that ends with the hidden states, for the engine to
sample from; logits of every size would take gigabytes. Left out: steps with prompts (`mixed_graphs.py`), and models
that cannot be captured, which the backend names beforehand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from server.backends.protocol import Computation, Device, GraphCapture
from server.stepping.batch import Forward, Tables
from server.stepping.sequences import TokenRun

# What is captured: a forward pass, and whether its tokens are chosen in it, which are then the first of the results.
# All results have a row for each sequence.
Decode = Callable[[Forward, bool], tuple[Tensor, ...]]


class DecodeGraph:
    """One captured step, and what its inputs hold."""

    def __init__(self, size: int, device: Device):
        # Of each sequence its row, its position, and 1; of what fills up the batch zeros.
        self.numbers = torch.zeros(3, size, dtype=torch.int64, device=device.torch_device)
        self.inputs: Sequence[tuple[int, int]] = []  # the rows and positions of the sequences
        self.replay: Computation | None = None  # None: not captured yet
        self._device = device

    def fill(self, inputs: Sequence[tuple[int, int]]) -> None:
        """Upload rows and positions; row 0, which belongs to no sequence, fills up the batch."""
        padding = [0] * (self.numbers.shape[1] - len(inputs))
        rows, positions = zip(*inputs, strict=True)
        ones = [1] * len(inputs)
        self.numbers.copy_(self._device.upload([[*rows, *padding], [*positions, *padding], [*ones, *padding]]))
        self.inputs = inputs


class DecodeGraphs:
    """The captured decode steps of one engine, for as long as its tables are there. most: sequences at once."""

    def __init__(
        self, capture: GraphCapture, decode: Decode, device: Device, tables: Tables, *, most: int, has_encoder: bool
    ):
        self._capture = capture
        self._decode = decode
        self._device = device
        self._tables = tables
        self._has_encoder = has_encoder
        self._graphs: dict[tuple[int, bool], DecodeGraph] = {}
        # Up to the first that takes all sequences.
        self._sizes = capture.sizes[: bisect_left(capture.sizes, most) + 1]

    def takes(self, batch_size: int) -> bool:
        """Whether so many sequences decode in a captured step."""
        return not self._sizes or batch_size <= self._sizes[-1]

    @property
    def largest(self) -> int:
        """The largest batch size of those that are known beforehand. There are some."""
        return self._sizes[-1]

    def captures(self) -> list[Callable[[], None]]:
        """Capture one size in both forms each, the largest first: what it has taken suffices for the others."""
        return [partial(self._prepare, size) for size in reversed(self._sizes)]

    def _prepare(self, size: int) -> None:
        for chooses in (True, False):
            self._graph(size, chooses)

    def run(self, runs: Sequence[TokenRun], *, chooses: bool) -> tuple[Tensor, ...]:
        """The results for each sequence of `runs`, then the sequences' rows [S]; all valid until the next run."""
        inputs = [(sequence.row, start) for sequence, start, _ in runs]
        graph = self._graph(self._size(len(runs)), chooses)
        if graph.inputs != inputs:
            graph.fill(inputs)
        graph.inputs = []  # unknown, should the step fail
        graph.replay = graph.replay or self._capture(self._step(graph, chooses))
        results = graph.replay()
        graph.inputs = [(row, position + 1) for row, position in inputs]
        return tuple([result[: len(runs)] for result in results])

    def _size(self, batch_size: int) -> int:
        return next((size for size in self._sizes if size >= batch_size), batch_size)

    def _graph(self, size: int, chooses: bool) -> DecodeGraph:
        """The graph of this size and form; captured, unless that computes: then it waits for its inputs."""
        if (size, chooses) not in self._graphs:
            graph = DecodeGraph(size, self._device)
            if not self._capture.computes:
                graph.replay = self._capture(self._step(graph, chooses))
            self._graphs[size, chooses] = graph
        return self._graphs[size, chooses]

    def _step(self, graph: DecodeGraph, chooses: bool) -> Computation:
        rows, positions, are_real = graph.numbers

        def step() -> tuple[Tensor, ...]:
            forward = self._tables.decodes(rows, positions, are_real, has_encoder=self._has_encoder)
            results = self._decode(forward, chooses)
            if chooses:
                self._tables.keep(rows, results[0])
            positions.add_(are_real)
            return *results, rows

        return step
