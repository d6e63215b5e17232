"""The passes of a speculative model over a cache of its own: laid out, captured as the engine's are, and chosen from.

Left out: which tokens a pass computes, and what it goes on from but for tokens.

Shapes: R links, T tokens of a pass, D width of what a pass makes of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from server.drafting.chain import Chain, Link
from server.stepping.batch import Carried, Forward, Layout, Spans, Tables
from server.stepping.decoding import Decoding
from server.stepping.graphs import DecodeGraphs, Form, MixedGraphs
from server.stepping.proposals import Surroundings
from server.stepping.sampling import Chosen
from server.stepping.sequences import TokenRun


class Passes:
    """Of one model. run: a pass → [T, D]; logits: [R, D] → the served model's columns.

    ahead: positions from a token to the one that is chosen behind it. carried: [0, D] of the kind of what a pass goes
    on from beside its tokens; None: from nothing.
    """

    def __init__(
        self,
        run: Callable[[Forward], Tensor],
        logits: Callable[[Tensor], Tensor],
        around: Surroundings,
        *,
        ahead: int = 1,
        carried: Tensor | None = None,
    ) -> None:
        self.run = run
        self.caches = around.caches
        self.device = around.device
        self.chain = Chain(around.chooser, around.device, around.vocabulary.size)
        # Latest tokens of its own, which run ahead of the model's, beside the same blocks.
        self.tables = Tables(torch.zeros_like(around.tables.last_tokens), around.tables.entries, None)
        self._logits = logits
        self._ahead = ahead
        self._graphs, self._mixed = None, None
        if around.capture is not None:
            decode = Decoding(run, logits, around.vocabulary, gives_hidden=True, ahead=ahead)
            self._graphs = DecodeGraphs(
                *(around.capture, decode, around.device, self.tables),
                most=around.most,
                has_encoder=False,
                carried=carried,
            )
            if around.captures_exactly:
                self._mixed = MixedGraphs(
                    *(around.capture, run, around.device, self.tables),
                    most=around.most,
                    is_exact=True,
                    gives_hidden=True,
                    carried=carried,
                )

    def captures(self) -> Sequence[Callable[[], None]]:
        """See `Proposer`."""
        return [] if self._graphs is None else self._graphs.captures()

    def forward(self, layout: Layout, carried: Tensor | None = None) -> Forward:
        """A pass. carried: [T, D] that it goes on from."""
        token_ids, meta = self.tables.step(layout, self.device.upload(layout.numbers))
        counts = [end - start for start, end in pairwise(layout.starts)]
        lengths = [first + count for first, count in zip(layout.firsts, counts, strict=True)]
        before = None if carried is None else Carried(carried)
        return Forward([], token_ids, replace(meta, context_lengths=lengths), None, None, before)

    def compute(
        self, runs: Sequence[tuple[int, int, int]], token_ids: list[int], carried: Tensor | None = None
    ) -> Tensor:
        """What a pass makes of known tokens, [T, D]: valid until the next one. runs: see `Spans`."""
        spans = Spans([], runs, token_ids, [0] * len(runs))
        if self._mixed is None or (graph := self._mixed.find(spans)) is None:
            return self.run(self.forward(spans.layout, carried))
        _, hidden = self._mixed.run(graph, spans, carried)
        assert hidden is not None, "it is wanted"
        return hidden

    def next(
        self, links: Sequence[Link], previous: Tensor, place: int, carried: Tensor | None = None
    ) -> tuple[Chosen, Tensor]:
        """The token at this place of each link's proposals, behind `previous` [R], which the tables know.

        And what the pass made of that, [R, D]: valid until the next one. carried: [R, D] that it goes on from.
        """
        runs = [TokenRun(link.sequence, link.end + place - self._ahead, 1) for link in links]
        if self._graphs is None or not self._graphs.takes(len(runs)):
            spans = [(run.sequence.row, run.start, 1) for run in runs]
            hidden = self.run(self.forward(Layout.of(spans, [], len(spans)), carried))
            return self.choose(links, hidden, place, previous), hidden
        has_settings = any(link.has_history or link.sequence.choice.is_constrained for link in links)
        form = Form.HIDDEN if has_settings else self._graphs.form_of(runs)
        found = self._graphs.run(runs, form, None if carried is None else Carried(carried))
        if form is Form.HIDDEN:
            return self.choose(links, found[0], place, previous), found[0]
        token_ids, logprobs, hidden, _ = found
        return Chosen(token_ids.clone(), logprobs.clone()), hidden

    def choose(self, links: Sequence[Link], hidden: Tensor, place: int, previous: Tensor) -> Chosen:
        """The tokens that these hidden states [R, D] give; the tables know them from then on."""
        chosen = self.chain.chosen(links, lambda part: self._logits(hidden[part]), place=place, previous=previous)
        self.tables.keep(self.device.upload([link.sequence.row for link in links]), chosen.token_ids)
        return chosen
