"""Decode steps that are captured in graphs, one for each batch size, and then replayed without Python.

A step in which all sequences decode does the same from one token to the next: only what the device's tables and two
short inputs hold is different, the sequences' rows and positions. The step advances the positions itself, and keeps the
tokens that it chose, so that while the same sequences decode the host uploads nothing.

Two forms are captured as they are needed: one that chooses the most likely tokens, and one that ends with the logits,
from which the engine samples. Left out: steps with prompts, whose shapes never repeat, and models that cannot be
captured, which the backend names beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from server.backends.protocol import Computation, Device, GraphCapture
from server.stepping.batch import Forward, Tables, TokenRun

# What is captured: a forward pass, and whether its tokens are chosen in it, which are then the first of the results.
# All results have a row for each sequence.
Decode = Callable[[Forward, bool], tuple[Tensor, ...]]


class DecodeGraph:
    """One captured step, and what its inputs hold."""

    def __init__(self, size: int, device: Device):
        self.rows = torch.zeros(size, dtype=torch.int64, device=device.torch_device)
        self.positions = torch.zeros_like(self.rows)
        self.inputs: Sequence[tuple[int, int]] = []  # the rows and positions of the sequences
        self.replay: Computation | None = None  # None: not captured yet
        self._device = device

    def fill(self, inputs: Sequence[tuple[int, int]]) -> None:
        """Upload rows and positions; row 0, which belongs to no sequence, fills up the batch."""
        padding = [(0, 0)] * (len(self.rows) - len(inputs))
        uploaded = self._device.upload([*inputs, *padding])
        self.rows.copy_(uploaded[:, 0])
        self.positions.copy_(uploaded[:, 1])
        self.inputs = inputs


class DecodeGraphs:
    """The captured decode steps of one engine."""

    def __init__(self, capture: GraphCapture, decode: Decode, device: Device, *, has_encoder: bool):
        self._capture = capture
        self._decode = decode
        self._device = device
        self._has_encoder = has_encoder
        self._tables: Tables | None = None  # those that the graphs read
        self._graphs: dict[tuple[int, bool], DecodeGraph] = {}

    def takes(self, batch_size: int) -> bool:
        """Whether so many sequences decode in a captured step."""
        return not self._capture.sizes or batch_size <= self._capture.sizes[-1]

    def sizes(self) -> list[int]:
        """The batch sizes that are known beforehand, largest first: what it has taken suffices for the others."""
        return sorted(self._capture.sizes, reverse=True)

    def prepare(self, sizes: Sequence[int], tables: Tables) -> None:
        """Capture steps that choose plain tokens for these batch sizes."""
        for size in sizes:
            self._graph(size, True, tables)

    def run(self, runs: Sequence[TokenRun], tables: Tables, *, chooses: bool) -> tuple[Tensor, ...]:
        """The results for each sequence of `runs`, then the sequences' rows [S]; all valid until the next run."""
        inputs = [(run.sequence.row, run.start) for run in runs]
        graph = self._graph(self._size(len(runs)), chooses, tables)
        if graph.inputs != inputs:
            graph.fill(inputs)
        graph.inputs = []  # unknown, should the step fail
        graph.replay = graph.replay or self._capture(self._step(graph, chooses, tables))
        results = graph.replay()
        graph.inputs = [(row, position + 1) for row, position in inputs]
        return tuple(result[: len(runs)] for result in results)

    def _size(self, batch_size: int) -> int:
        return next((size for size in self._capture.sizes if size >= batch_size), batch_size)

    def _graph(self, size: int, chooses: bool, tables: Tables) -> DecodeGraph:
        """The graph for these tables; captured, unless that computes: then it waits for its inputs."""
        if tables is not self._tables:
            self._tables, self._graphs = tables, {}
        if (size, chooses) not in self._graphs:
            graph = DecodeGraph(size, self._device)
            if not self._capture.computes:
                graph.replay = self._capture(self._step(graph, chooses, tables))
            self._graphs[size, chooses] = graph
        return self._graphs[size, chooses]

    def _step(self, graph: DecodeGraph, chooses: bool, tables: Tables) -> Computation:
        rows, positions = graph.rows, graph.positions

        def step() -> tuple[Tensor, ...]:
            results = self._decode(tables.decodes(rows, positions, has_encoder=self._has_encoder), chooses)
            if chooses:
                tables.last_tokens[rows] = results[0]
            positions.add_(rows > 0)
            return *results, rows

        return step
