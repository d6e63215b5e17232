"""Proposes token behind token, each chosen as the model will choose: by the sequence's settings, with the same noise.

So a speculative model that finds the same tokens likely proposes just those that come, at any temperature. Left out:
what a grammar allows, which the router knows and cuts proposals by.

Shapes: n sequences, R of them that still get proposals, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from server.backends.device import Device
from server.stepping.logit_rules import Allowed
from server.stepping.next_tokens import TokenChooser
from server.stepping.proposals import Proposal
from server.stepping.sampling import Chosen
from server.stepping.sequences import SampledRow, SequenceState


@dataclass
class Link:
    """A sequence for which tokens are proposed."""

    sequence: SequenceState
    end: int  # tokens that it has: the position of the first that is proposed
    most: int
    unknown: Sequence[int] = ()  # tokens that it has, but that its history lacks
    proposed: list[int] = field(default_factory=list)  # so far, where its history matters

    @property
    def has_history(self) -> bool:
        """Whether what is proposed changes what comes behind it."""
        return self.sequence.history is not None or self.sequence.recent is not None

    @property
    def row(self) -> SampledRow:
        """Where its next token is chosen: never in its own history."""
        return SampledRow(self.sequence, len(self.proposed), (*self.unknown, *self.proposed))


# Chooses the next token of some of the links, behind tokens [R] that were just chosen: those at this place, from 1 on.
Pass = Callable[[Sequence[Link], Tensor, int], Chosen]


class Chain:
    """Chooses proposals for one speculative model. size: of the model's vocabulary, below which they are."""

    def __init__(self, choose: TokenChooser, device: Device, size: int) -> None:
        self._choose = choose
        self._device = device
        self._size = size

    def chosen(
        self, links: Sequence[Link], logits: Callable[[slice], Tensor], *, place: int, previous: Tensor
    ) -> Chosen:
        """The token of each link at this place of its proposals. logits: of some rows; previous: [R] tokens before."""
        positions = self._device.upload([link.end + place for link in links])
        everything = Allowed.but((), self._size)
        allowed = {
            (link.sequence.id, link.row.place): everything for link in links if link.sequence.choice.is_constrained
        }
        parts = self._choose(
            [link.row for link in links], logits, positions=positions, previous=previous, allowed=allowed
        )
        return parts[0] if len(parts) == 1 else Chosen(*map(torch.cat, zip(*(part[:2] for part in parts), strict=True)))

    def __call__(self, links: Sequence[Link], first: Chosen, next_pass: Pass) -> list[Proposal]:
        """All proposals. first: those at place 0, of every link; next_pass: what computes the others."""
        passes = [(list(links), first)]
        while True:
            before, chosen = passes[-1]
            if any(link.has_history for link in before):
                (there,) = self._read([Chosen(chosen.token_ids, chosen.logprobs)])
                for link, token in zip(before, there.token_ids.tolist(), strict=True):
                    link.proposed.append(token)
            going_on = [place for place, link in enumerate(before) if link.most > len(passes)]
            if not going_on:
                break
            tokens = chosen.token_ids
            if len(going_on) < len(before):
                tokens = tokens[self._device.upload(going_on)]
            active = [before[place] for place in going_on]
            passes.append((active, next_pass(active, tokens, len(passes))))
        return self._proposals(links, passes)

    def _read(self, chosen: Sequence[Chosen]) -> list[Chosen]:
        """The same on the host; waits for the device."""
        there = [one.downloaded(self._device) for one in chosen]
        if (done := self._device.event()) is not None:
            done.synchronize()
        return there

    def _proposals(self, links: Sequence[Link], passes: Sequence[tuple[Sequence[Link], Chosen]]) -> list[Proposal]:
        """Read what the passes chose, up to a token that the model does not know, or that has no probability."""
        there = self._read([Chosen(chosen.token_ids, chosen.logprobs) for _, chosen in passes])
        found: dict[int, tuple[list[int], list[float]]] = {link.sequence.id: ([], []) for link in links}
        ended: set[int] = set()
        for (of, _), chosen in zip(passes, there, strict=True):
            for link, token, logprob in zip(of, chosen.token_ids.tolist(), chosen.logprobs.tolist(), strict=True):
                id = link.sequence.id
                if token >= self._size or not math.isfinite(logprob):
                    ended.add(id)
                if id not in ended:
                    found[id][0].append(token)
                    found[id][1].append(logprob)
        return [Proposal(id, *columns) for id, columns in found.items() if columns[0]]
