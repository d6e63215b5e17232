"""Steps that compute prompts beside decodes, captured in graphs of padded sizes.

Where requests join at every other step, a server that captures decodes alone would seldom replay a graph, and most of
its steps would take as long as Python needs to launch them. So steps with few prompt tokens are captured too, one for
each pair of how many sequences decode and how many prompt tokens stand beside them, both filled up. All that differs
between two such steps is one list of numbers (`batch.Layout`), which is uploaded before each of them.

A graph ends with the hidden states whose logits choose tokens. Left out: prompts with many tokens, whose computation
outlasts its launching; prompts whose log-probabilities are asked for; encoder-decoders.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product

from torch import Tensor

from server.backends.device import Device
from server.backends.protocol import Computation, GraphCapture
from server.stepping.batch import Forward, Layout, Tables
from server.stepping.sequences import StepRuns

# Sequences that decode in a captured step: few sizes, for each is captured with every size of prompts.
DECODES = (8, 32, 64, 128, 256)
# Prompts in a captured step, and one place more, whose tokens are those that fill up.
PROMPTS = 8

# What is captured: a forward pass to the hidden states [T, D] of all its tokens.
Run = Callable[[Forward], Tensor]


class MixedGraph:
    """One captured step: room for its numbers, and its replay."""

    def __init__(self, decodes: int, tokens: int, device: Device):
        self.decodes, self.tokens = decodes, tokens
        self.blank = self._layout([], [], [], [])
        self.numbers = device.upload(self.blank.numbers)
        self.replay: Computation | None = None

    def fill(self, plan: StepRuns, device: Device) -> None:
        """Upload what the next replay computes."""
        decodes, prompts = (
            [(s.row, start, length) for s, start, length in runs] for runs in (plan.decodes, plan.chunks)
        )
        token_ids = [id for s, start, length in plan.chunks for id in s.prompt[start : start + length]]
        chunks = [self.decodes + i for i, run in enumerate(plan.chunks) if run.yields_token]
        layout = self._layout(decodes, prompts, token_ids, [*range(len(plan.decodes)), *chunks])
        self.numbers.copy_(device.upload(layout.numbers))

    def _layout(
        self,
        decodes: Sequence[tuple[int, int, int]],
        chunks: Sequence[tuple[int, int, int]],
        token_ids: list[int],
        sampled: list[int],
    ) -> Layout:
        """The step of these runs (row, first position, tokens), filled up; `sampled` are indices of the padded runs."""
        padding = self.tokens - len(token_ids)
        runs = chain(
            decodes,
            [(0, 0, 1)] * (self.decodes - len(decodes)),
            chunks,
            [(0, 0, 0)] * (PROMPTS - len(chunks)),
            [(0, 0, padding)],
        )
        layout = Layout.of(list(runs), [*token_ids, *[0] * padding], self.decodes)
        nobody = [self.decodes + PROMPTS] * (self.decodes + PROMPTS - len(sampled))
        return replace(layout, sampled=[*sampled, *nobody])


class MixedGraphs:
    """The captured mixed steps of one engine, for no more decodes than are captured alone. most: sequences at once."""

    def __init__(self, capture: GraphCapture, run: Run, device: Device, tables: Tables, *, most: int):
        self._capture = capture
        self._run = run
        self._device = device
        self._tables = tables
        most = min([most, *capture.sizes[-1:]])
        decodes = DECODES[: bisect_left(DECODES, most) + 1] if capture.prompt_tokens else ()
        self._graphs = {
            size: MixedGraph(*size, device) for size in product(reversed(decodes), reversed(capture.prompt_tokens))
        }
        self._decodes, self._tokens = decodes, capture.prompt_tokens  # both ascending

    @property
    def has_sizes(self) -> bool:
        """Whether any mixed step is captured."""
        return bool(self._graphs)

    def takes(self, plan: StepRuns) -> bool:
        """Whether such a step is captured."""
        return (
            self.has_sizes
            and 0 < len(plan.chunks) <= PROMPTS
            and len(plan.decodes) <= self._decodes[-1]
            and sum(run.length for run in plan.chunks) <= self._tokens[-1]
            and not any(run.reported for run in plan.chunks)
        )

    def captures(self) -> list[Callable[[], None]]:
        """Capture one graph each, the largest first: what it has taken suffices for the others."""
        return [partial(self._prepare, graph) for graph in self._graphs.values()]

    @property
    def largest(self) -> tuple[int, int]:
        """Decodes and prompt tokens of the largest step that is captured. There is one."""
        return self._decodes[-1], self._tokens[-1]

    def run(self, plan: StepRuns) -> tuple[Tensor, ...]:
        """What the next tokens are chosen from, a row for each sequence that gets one: see `DecodeGraphs.run`."""
        tokens = sum(run.length for run in plan.chunks)
        decodes = self._decodes[bisect_left(self._decodes, len(plan.decodes))]
        graph = self._graphs[decodes, self._tokens[bisect_left(self._tokens, tokens)]]
        self._prepare(graph)
        assert graph.replay is not None
        graph.fill(plan, self._device)
        results = graph.replay()
        sampled = len(plan.decodes) + sum(run.yields_token for run in plan.chunks)
        return tuple(result[:sampled] for result in results)

    def _prepare(self, graph: MixedGraph) -> None:
        if graph.replay is None:
            graph.replay = self._capture(self._step(graph))

    def _step(self, graph: MixedGraph) -> Computation:
        layout = replace(graph.blank, blocks=self._tables.width)
        *_, sample_rows, sample_at, _ = layout.split(graph.numbers)

        def step() -> tuple[Tensor, ...]:
            token_ids, meta = self._tables.step(layout, graph.numbers)
            hidden = self._run(Forward([], token_ids, meta, None, None))
            return hidden[sample_at], meta.positions[sample_at] + 1, token_ids[sample_at], sample_rows

        return step
