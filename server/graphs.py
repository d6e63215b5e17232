"""Decode steps that are captured once for each batch size and then repeated without Python.

A step in which all sequences decode does the same from one token to the next: only what the device's tables and two
short inputs hold is different, the sequences' rows and positions. The step advances the positions itself, and keeps the
tokens that it chose, so that while the same sequences decode the host uploads nothing.

Two forms are captured as they are needed: one that chooses the most likely tokens, and one that ends with the logits,
from which the engine samples. Left out: steps with prompts, whose shapes never repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from server.batch import Forward, Tables, Work
from server.capture import Capture, Computation
from server.upload import upload

# What is captured: a forward pass, and whether its tokens are chosen in it, which are then the first of the results.
# All results have a row for each sequence.
Decode = Callable[[Forward, bool], tuple[Tensor, ...]]


class Graph:
    """One captured step, and what its inputs hold."""

    def __init__(self, size: int, device: torch.device):
        self.rows = torch.zeros(size, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.rows)
        self.places: Sequence[tuple[int, int]] = []  # the sequences' rows and positions
        self.repeat: Computation | None = None  # None: not captured yet

    def fill(self, places: Sequence[tuple[int, int]]) -> None:
        """Upload rows and positions, and nobody's for the rest of the batch."""
        nobody = [(0, 0)] * (len(self.rows) - len(places))
        inputs = upload([*places, *nobody], self.rows.device)
        self.rows.copy_(inputs[:, 0])
        self.positions.copy_(inputs[:, 1])
        self.places = places


class DecodeGraphs:
    """The captured decode steps of one engine. Raises NotCapturable where the model cannot be captured."""

    def __init__(self, capture: Capture, decode: Decode, *, has_encoder: bool):
        self._capture = capture
        self._decode = decode
        self._has_encoder = has_encoder
        self._tables: Tables | None = None  # those that the graphs read
        self._graphs: dict[tuple[int, bool], Graph] = {}

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

    def run(self, work: Sequence[Work], tables: Tables, *, chooses: bool) -> tuple[Tensor, ...]:
        """The results for each sequence of `work`, then the sequences' rows [S]; all valid until the next run."""
        places = [(w.sequence.row, w.start) for w in work]
        graph = self._graph(self._size(len(work)), chooses, tables)
        if graph.places != places:
            graph.fill(places)
        graph.places = []
        graph.repeat = graph.repeat or self._capture(self._step(graph, chooses, tables))
        results = graph.repeat()
        graph.places = [(row, position + 1) for row, position in places]
        return tuple(result[: len(work)] for result in results)

    def _size(self, batch_size: int) -> int:
        return next((size for size in self._capture.sizes if size >= batch_size), batch_size)

    def _graph(self, size: int, chooses: bool, tables: Tables) -> Graph:
        """The graph for these tables; captured, unless that computes: then it waits for its inputs."""
        if tables is not self._tables:
            self._tables, self._graphs = tables, {}
        if (size, chooses) not in self._graphs:
            graph = Graph(size, tables.blocks.device)
            if not self._capture.computes:
                graph.repeat = self._capture(self._step(graph, chooses, tables))
            self._graphs[size, chooses] = graph
        return self._graphs[size, chooses]

    def _step(self, graph: Graph, chooses: bool, tables: Tables) -> Computation:
        rows, positions = graph.rows, graph.positions

        def step() -> tuple[Tensor, ...]:
            results = self._decode(tables.decodes(rows, positions, has_encoder=self._has_encoder), chooses)
            if chooses:
                tables.last_tokens[rows] = results[0]
            positions.add_(rows > 0)
            return *results, rows

        return step
