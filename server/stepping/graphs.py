"""Steps that are captured in graphs and then replayed without Python: decodes, and decodes beside few prompt tokens.

A step in which all sequences decode does the same from one token to the next: only what the device's tables and two
short inputs hold is different, the sequences' rows and positions. The step advances the positions itself, and keeps the
tokens that it chose, so that while the same sequences decode the host uploads nothing. There is one graph for each
batch size, in three forms (`Form`), of which the one that samples exists where sizes are known beforehand, on GPUs.

Where requests join at every other step, a server that captures decodes alone would seldom replay a graph, and most of
its steps would take as long as Python needs to launch them. So steps with few prompt tokens are captured too, one for
each pair of how many sequences decode and how many prompt tokens stand beside them, both filled up. All that differs
between two such steps is one list of numbers (`batch.Layout`), which is uploaded before each of them. They end with the
hidden states whose logits choose tokens.

Captures exist on all ranks or on none. Where one rank replays and another computes in Python, their collectives are set
up by different means, and the rank that failed alone is reported as a lost peer by the others. So the ranks compare
after each capture; where one failed, all compute that step without a graph, slower by the host's share of a step, and
the start-up table says which rank failed, and why.

Drafts stand where prompts do, as long as there is room for the tokens that they yield.

On CPUs, where a capture is one more run of the step and nothing is filled up, no sizes are known beforehand. A decode
step is captured when its size first comes; in small models, a mixed one of few tokens when its size comes again.

Left out: prompts with many tokens, whose computation outlasts its launching; prompts whose log-probabilities are asked
for; mixed steps of encoder-decoders, and with adapters; models that cannot be captured, which the backend names
beforehand; and a device that a failed capture took with it, which raises on its rank and ends the server.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from server.backends.device import CaptureFailed, Device
from server.backends.protocol import Computation, GraphCapture
from server.ranks.collectives import Shard
from server.stepping.batch import Carried, Forward, Layout, Spans, Tables
from server.stepping.sampling import TokenChoice, settings_of
from server.stepping.sequences import TokenRun

log = logging.getLogger(__name__)
# Sequences that decode in a captured step: few sizes, for each is captured with every size of prompts.
DECODES = (8, 32, 64, 128, 256)
# Prompts in a captured step, and one place more, whose tokens are those that fill up.
PROMPTS = 8
# Where steps are captured as they come and nothing is filled up, on CPUs: bytes of weights of a model whose launching
# takes as long as its computing, most tokens of a step, sizes that are remembered, and graphs that are kept. A graph
# keeps what operators of torch make that no kernel repeats.
EXACT_BYTES = 256_000_000
MOST_EXACT = 24
MOST_SEEN = 1024
MOST_KEPT = 24


class Form(Enum):
    """What a captured step ends with."""

    PLAIN = auto()  # the most likely tokens
    SAMPLED = auto()  # tokens by temperature, top-k and top-p (`sampling.choose_captured`)
    HIDDEN = auto()  # hidden states, to sample from by anything else; logits of every size would take gigabytes


# What is captured (`decoding.py`): a forward pass, its form and, where it samples, settings. The tokens that are chosen
# in it are the first of the results; all results have a row for each sequence.
Decode = Callable[[Forward, Form, Tensor], tuple[Tensor, ...]]
# What is captured: a forward pass to the hidden states [T, D] of all its tokens.
Run = Callable[[Forward], Tensor]


class DecodeGraphs:
    """The captured decode steps of one engine, for as long as its tables are there.

    most: sequences at once. carried: [0, D] of the kind of what the stage before hands on, in a later pipeline stage.
    is_last: whether no pipeline stage follows, and so whether tokens are chosen. has_adapters: whether sequences may
    have some.
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
        is_last: bool = True,
        has_adapters: bool = False,
    ):
        self._carried = carried
        self._forms = tuple(Form) if is_last else (Form.HIDDEN,)
        # Steps in which no sequence has an adapter are captured apart, and cost what they do without adapters.
        self._kinds = (False, True) if has_adapters else (False,)
        self._capture = capture
        self._decode = decode
        self._device = device
        self._tables = tables
        self._has_encoder = has_encoder
        self._graphs: dict[tuple[int, Form, bool], DecodeGraph] = {}
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
        for form, adapts in product(self._forms, self._kinds):
            self._graph(size, form, adapts=adapts)

    def form_of(self, runs: Sequence[TokenRun]) -> Form:
        """The form of the step that computes the next tokens of these sequences."""
        if Form.PLAIN not in self._forms:
            return Form.HIDDEN
        if all(run.sequence.choice.is_plain for run in runs):
            return Form.PLAIN
        is_simple = bool(self._sizes) and all(run.sequence.choice.is_simple for run in runs)
        return Form.SAMPLED if is_simple else Form.HIDDEN

    def run(self, runs: Sequence[TokenRun], form: Form, carried: Carried | None = None) -> tuple[Tensor, ...]:
        """The results for each sequence of `runs`, then the sequences' rows [S]; all valid until the next run."""
        inputs = [(sequence.row, start) for sequence, start, _, _ in runs]
        adapts = any(run.sequence.adapter for run in runs)
        graph = self._graph(self._size(len(runs)), form, adapts=adapts)
        if graph.inputs != inputs:
            graph.fill(inputs)
        if form is Form.SAMPLED:
            graph.choose_by([run.sequence.choice for run in runs])
        graph.carry(carried)
        graph.inputs = []  # unknown, should the step fail
        graph.replay = graph.replay or self._capture(self._step(graph, form, adapts=adapts))
        results = graph.replay()
        graph.inputs = [(row, position + 1) for row, position in inputs]
        return tuple([result[: len(runs)] for result in results])

    def _size(self, batch_size: int) -> int:
        return next((size for size in self._sizes if size >= batch_size), batch_size)

    def _graph(self, size: int, form: Form, *, adapts: bool) -> DecodeGraph:
        """The graph of this size and form; captured, unless that computes: then it waits for its inputs."""
        if (size, form, adapts) not in self._graphs:
            graph = DecodeGraph(size, self._device, self._carried)
            if not self._capture.computes:
                graph.replay = self._capture(self._step(graph, form, adapts=adapts))
            self._graphs[size, form, adapts] = graph
        return self._graphs[size, form, adapts]

    def _step(self, graph: DecodeGraph, form: Form, *, adapts: bool) -> Computation:
        rows, positions, are_real = graph.numbers

        def step() -> tuple[Tensor, ...]:
            forward = self._tables.decodes(
                rows, positions, are_real, has_encoder=self._has_encoder, has_adapters=adapts
            )
            if graph.carried is not None:
                forward = replace(forward, carried=Carried(graph.carried))
            results = self._decode(forward, form, graph.settings)
            if form is not Form.HIDDEN:
                self._tables.keep(rows, results[0])
            positions.add_(are_real)
            return *results, rows

        return step


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


class Size(NamedTuple):
    """Of a mixed step that is captured."""

    decodes: int
    others: int  # sequences that do not decode; where steps are filled up, the last of them has the tokens that do that
    tokens: int  # of these
    sampled: int  # tokens that it yields


class MixedGraphs:
    """The captured mixed steps over some tables, for no more decodes than are captured alone. most: sequences at once.

    is_exact: whether steps are captured as they come, of a capture that computes. gives_hidden: whether the hidden
    states of all tokens are wanted too. carried: [0, D] of the kind of what a step goes on from beside its tokens;
    None: from nothing.
    """

    def __init__(
        self,
        capture: GraphCapture,
        run: Run,
        device: Device,
        tables: Tables,
        *,
        most: int,
        is_exact: bool = False,
        gives_hidden: bool = False,
        carried: Tensor | None = None,
    ):
        self._is_exact = is_exact
        self._gives_hidden = gives_hidden
        self._carried = carried
        self._capture = capture
        self._run = run
        self._device = device
        self._tables = tables
        most = min([most, *capture.sizes[-1:]])
        decodes = DECODES[: bisect_left(DECODES, most) + 1] if capture.prompt_tokens else ()
        sizes = [
            Size(decode, PROMPTS + 1, tokens, decode + PROMPTS)
            for decode, tokens in product(reversed(decodes), reversed(capture.prompt_tokens))
        ]
        self._decodes, self._tokens = decodes, capture.prompt_tokens  # both ascending
        # Those that are not known beforehand go again, the longest unused first, as do sizes that came once.
        self._graphs = OrderedDict((size, self._blank(size)) for size in sizes)
        self._seen: OrderedDict[Size, None] = OrderedDict()

    @property
    def has_sizes(self) -> bool:
        """Whether sizes are known beforehand."""
        return bool(self._decodes)

    def find(self, spans: Spans) -> MixedGraph | None:
        """The graph of such a step; None: it is computed without."""
        if not self.has_sizes:
            return self._found(spans) if self._is_exact else None
        decodes, tokens = _decodes_for(spans), len(spans.token_ids)
        if not 0 < len(spans.others) <= PROMPTS or decodes > self._decodes[-1] or tokens > self._tokens[-1]:
            return None
        decodes = self._decodes[bisect_left(self._decodes, decodes)]
        tokens = self._tokens[bisect_left(self._tokens, tokens)]
        return self._graphs[Size(decodes, PROMPTS + 1, tokens, decodes + PROMPTS)]

    def _found(self, spans: Spans) -> MixedGraph | None:
        """The graph of exactly such a step, if one came before: most never come again."""
        decodes, tokens = len(spans.decodes), len(spans.token_ids)
        if not tokens or decodes + tokens > MOST_EXACT:
            return None
        size = Size(decodes, len(spans.others), tokens, decodes + sum(spans.sampled))
        if size in self._graphs:
            self._graphs.move_to_end(size)
        elif size in self._seen:
            self._graphs[size] = self._blank(size)
            if len(self._graphs) > MOST_KEPT:
                self._graphs.popitem(last=False)
        else:
            self._seen[size] = None
            if len(self._seen) > MOST_SEEN:
                self._seen.popitem(last=False)
        return self._graphs.get(size)

    def _blank(self, size: Size) -> MixedGraph:
        return MixedGraph(size, self._device, self._carried)

    def captures(self) -> list[Callable[[], None]]:
        """Capture one graph each, the largest first: what it has taken suffices for the others."""
        return [partial(self._prepare, graph) for graph in self._graphs.values()] if self.has_sizes else []

    @property
    def largest(self) -> tuple[int, int]:
        """Decodes and prompt tokens of the largest step whose size is known beforehand. There is one."""
        return self._decodes[-1], self._tokens[-1]

    def run(
        self, graph: MixedGraph, spans: Spans, carried: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """What the next tokens are chosen from, a row for each sequence that gets one: see `DecodeGraphs.run`.

        And the hidden states [T, D] of all tokens of the step, if they are wanted. All are valid until the next run.
        """
        graph.fill(spans, self._device)
        graph.carry(carried)
        self._prepare(graph)
        assert graph.replay is not None
        decodes, sampled, tokens = len(spans.decodes), len(spans.decodes) + sum(spans.sampled), len(spans.token_ids)
        results = graph.replay()
        chosen_from = tuple(result[:sampled] for result in results[:4])
        if not self._gives_hidden:
            return chosen_from, None
        hidden, first = results[4], graph.size.decodes
        return chosen_from, torch.cat([hidden[:decodes], hidden[first : first + tokens]])

    def _prepare(self, graph: MixedGraph) -> None:
        if graph.replay is not None:
            return
        step = self._step(graph)
        try:
            graph.replay = self._capture(step)
        except CaptureFailed as error:
            if not self._is_exact:
                raise
            # There is one rank, so no other waits. What the failed capture computed of the step is computed again.
            log.warning("steps with prompts or drafts are computed without graphs: %s", error)
            self._is_exact, graph.replay = False, step

    def _step(self, graph: MixedGraph) -> Computation:
        layout = replace(graph.blank, blocks=self._tables.width)
        *_, sample_rows, sample_at, _ = layout.split(graph.numbers)
        carried = None if graph.carried is None else Carried(graph.carried)

        def step() -> tuple[Tensor, ...]:
            token_ids, meta = self._tables.step(layout, graph.numbers)
            hidden = self._run(Forward([], token_ids, meta, None, None, carried))
            found = hidden[sample_at], meta.positions[sample_at] + 1, token_ids[sample_at], sample_rows
            return (*found, hidden) if self._gives_hidden else found

        return step


class MixedGraph:
    """One captured step: room for its numbers, and its replay."""

    def __init__(self, size: Size, device: Device, carried: Tensor | None = None):
        self.size = size
        self.blank = self._layout(Spans([], [], [], []))
        self.numbers = device.upload(self.blank.numbers)
        # What the tokens go on from, if anything.
        self.carried = None if carried is None else carried.new_zeros(size.decodes + size.tokens, carried.shape[1])
        self.replay: Computation | None = None

    def fill(self, spans: Spans, device: Device) -> None:
        """Upload what the next replay computes."""
        self.numbers.copy_(device.upload(self._layout(spans).numbers))

    def carry(self, carried: Tensor | None) -> None:
        """Take up what the step's tokens go on from, where they do: there is nothing that fills up."""
        if self.carried is not None and carried is not None:
            self.carried.copy_(carried)

    def _layout(self, spans: Spans) -> Layout:
        """The step of these tokens, filled up."""
        missing = self.size.decodes - len(spans.decodes)
        decodes = [*spans.decodes, *[(0, 0, 1)] * missing]
        fill = self.size.tokens - len(spans.token_ids)
        lacking = self.size.others - len(spans.others)
        others = [*spans.others, *[(0, 0, 0)] * (lacking - 1), *[(0, 0, fill)] * bool(lacking)]
        runs = [*decodes, *others]
        layout = Layout.of(runs, [*spans.token_ids, *[0] * fill], self.size.decodes)
        layout = layout.sampling([*[1] * len(spans.decodes), *[0] * missing, *spans.sampled, *[0] * lacking])
        unused = [(len(runs) - 1, 0)] * (self.size.sampled - len(layout.sampled))
        return replace(layout, sampled=[*layout.sampled, *unused])


def _decodes_for(spans: Spans) -> int:
    """The decodes of a captured step that has room for this one: a token comes behind each, and behind each prompt."""
    return max(len(spans.decodes), len(spans.decodes) + sum(spans.sampled) - PROMPTS)


class AgreedCapture:
    """A `GraphCapture` whose captures exist on every rank or on none. `failures`: why some do not, one for each."""

    def __init__(self, capture: GraphCapture, shard: Shard, device: torch.device):
        # What computes while it captures would have computed a part when it fails.
        assert not capture.computes
        self.sizes, self.prompt_tokens = capture.sizes, capture.prompt_tokens
        self.computes = False
        self.failures: list[str] = []
        self._capture = capture
        self._shard = shard
        self._device = device

    def __call__(self, function: Computation) -> Computation:
        """A replay of `function`, or `function` itself where a rank has none. All ranks capture in the same order."""
        replay, problem = function, None
        try:
            replay = self._capture(function)
        except CaptureFailed as error:
            problem = str(error)
        reason = self._shard.first_problem(problem, self._device)
        if reason is None:
            return replay
        log.warning("a step is computed without a graph: %s", reason)
        self.failures.append(reason)
        return function
