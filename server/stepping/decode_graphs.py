"""Decode steps that are captured in graphs, one for each batch size, and then replayed without Python.

A step in which all sequences decode does the same from one token to the next: only what the device's tables and two
short inputs hold is different, the sequences' rows and positions. The step advances the positions itself, and keeps the
tokens that it chose, so that while the same sequences decode the host uploads nothing.

Each has three forms (`Form`), of which the one that samples exists where sizes are known beforehand, on GPUs. Left out:
steps with prompts (`mixed_graphs.py`), and models that cannot be captured, which the backend names beforehand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from functools import partial

import torch
from torch import Tensor

from server.backends.device import Device
from server.backends.protocol import Computation, GraphCapture
from server.stepping.batch import Carried, Forward, Tables
from server.stepping.captured_sampling import settings_of
from server.stepping.sampling import TokenChoice
from server.stepping.sequences import TokenRun


class Form(Enum):
    """What a captured step ends with."""

    PLAIN = auto()  # the most likely tokens
    SAMPLED = auto()  # tokens by temperature, top-k and top-p (`captured_sampling.py`)
    HIDDEN = auto()  # hidden states, to sample from by anything else; logits of every size would take gigabytes


# What is captured: a forward pass, its form and, where it samples, settings. The tokens that are chosen in it are the
# first of the results; all results have a row for each sequence.
Decode = Callable[[Forward, Form, Tensor], tuple[Tensor, ...]]


class DecodeGraph:
    """One captured step, and what its inputs hold."""

    def __init__(self, size: int, device: Device, carried: Tensor | None = None):
        # What the stage before made of the sequences' tokens, in a later pipeline stage.
        self.carried = None if carried is None else carried.new_zeros(size, carried.shape[1])
        # Of each sequence its row, its position, and 1; of what fills up the batch zeros.
        self.numbers = torch.zeros(3, size, dtype=torch.int64, device=device.torch_device)
        # What tokens are sampled by: greedy all of them, until `choose_by`.
        self.settings = device.upload(settings_of([], size), torch.float64)
        self.inputs: Sequence[tuple[int, int]] = []  # the rows and positions of the sequences
        self.choices: Sequence[TokenChoice] = []  # of the sequences
        self.replay: Computation | None = None  # None: not captured yet
        self._device = device

    def fill(self, inputs: Sequence[tuple[int, int]]) -> None:
        """Upload rows and positions; row 0, which belongs to no sequence, fills up the batch."""
        padding = [0] * (self.numbers.shape[1] - len(inputs))
        rows, positions = zip(*inputs, strict=True)
        ones = [1] * len(inputs)
        self.numbers.copy_(self._device.upload([[*rows, *padding], [*positions, *padding], [*ones, *padding]]))
        self.inputs = inputs

    def carry(self, carried: Carried | None) -> None:
        """Take up what the stage before made, where there is one."""
        if self.carried is not None and carried is not None:
            self.carried[: len(carried.hidden)].copy_(carried.hidden)

    def choose_by(self, choices: Sequence[TokenChoice]) -> None:
        """Upload what the sequences' tokens are sampled by, unless it is as it was."""
        if self.choices != choices:
            self.settings.copy_(self._device.upload(settings_of(choices, self.settings.shape[1]), torch.float64))
            self.choices = choices


class DecodeGraphs:
    """The captured decode steps of one engine, for as long as its tables are there.

    most: sequences at once. carried: [0, D] of the kind of what the stage before hands on, in a later pipeline stage.
    """

    def __init__(
        self,
        capture: GraphCapture,
        decode: Decode,
        device: Device,
        tables: Tables,
        *,
        most: int,
        has_encoder: bool,
        carried: Tensor | None = None,
    ):
        self._carried = carried
        self._capture = capture
        self._decode = decode
        self._device = device
        self._tables = tables
        self._has_encoder = has_encoder
        self._graphs: dict[tuple[int, Form], DecodeGraph] = {}
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
        """Capture one size in all forms each, the largest first: what it has taken suffices for the others."""
        return [partial(self._prepare, size) for size in reversed(self._sizes)]

    def _prepare(self, size: int) -> None:
        for form in Form:
            self._graph(size, form)

    def form_of(self, runs: Sequence[TokenRun]) -> Form:
        """The form of the step that chooses the next tokens of these sequences."""
        if all(sequence.choice.is_plain for sequence, _, _ in runs):
            return Form.PLAIN
        is_simple = bool(self._sizes) and all(sequence.choice.is_simple for sequence, _, _ in runs)
        return Form.SAMPLED if is_simple else Form.HIDDEN

    def run(self, runs: Sequence[TokenRun], form: Form, carried: Carried | None = None) -> tuple[Tensor, ...]:
        """The results for each sequence of `runs`, then the sequences' rows [S]; all valid until the next run."""
        inputs = [(sequence.row, start) for sequence, start, _ in runs]
        graph = self._graph(self._size(len(runs)), form)
        if graph.inputs != inputs:
            graph.fill(inputs)
        if form is Form.SAMPLED:
            graph.choose_by([sequence.choice for sequence, _, _ in runs])
        graph.carry(carried)
        graph.inputs = []  # unknown, should the step fail
        graph.replay = graph.replay or self._capture(self._step(graph, form))
        results = graph.replay()
        graph.inputs = [(row, position + 1) for row, position in inputs]
        return tuple([result[: len(runs)] for result in results])

    def _size(self, batch_size: int) -> int:
        return next((size for size in self._sizes if size >= batch_size), batch_size)

    def _graph(self, size: int, form: Form) -> DecodeGraph:
        """The graph of this size and form; captured, unless that computes: then it waits for its inputs."""
        if (size, form) not in self._graphs:
            graph = DecodeGraph(size, self._device, self._carried)
            if not self._capture.computes:
                graph.replay = self._capture(self._step(graph, form))
            self._graphs[size, form] = graph
        return self._graphs[size, form]

    def _step(self, graph: DecodeGraph, form: Form) -> Computation:
        rows, positions, are_real = graph.numbers

        def step() -> tuple[Tensor, ...]:
            forward = self._tables.decodes(rows, positions, are_real, has_encoder=self._has_encoder)
            if graph.carried is not None:
                forward = replace(forward, carried=Carried(graph.carried))
            results = self._decode(forward, form, graph.settings)
            if form is not Form.HIDDEN:
                self._tables.keep(rows, results[0])
            positions.add_(are_real)
            return *results, rows

        return step
