"""A smaller model of the same vocabulary, which writes ahead (Leviathan et al. 2022, arXiv 2211.17192).

It computes every token that the model has computed, with layers of its own in blocks of the same numbers: prompts
beside the model's chunks, generated tokens when something is to be proposed. Blocks that a later prompt shares hold
what it made of them; where it had not followed so far when they were filled, its proposals are worse for a while.

Left out: models with states, rings or an encoder, whose caches are no blocks alone.

Shapes: n sequences, T tokens of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from server.blocks import BLOCK_SIZE
from server.drafting.chain import Link
from server.drafting.passes import Passes
from server.model.transformer import Transformer
from server.stepping.proposals import Came, Proposal, Surroundings
from server.stepping.sampling import Chosen
from server.stepping.sequences import SequenceState, StepRuns

# Tokens that it catches up with in a step, of each prompt that is computed and of all other sequences together: all the
# step's sequences wait for them.
MOST_BEHIND = 512


@dataclass
class Followed:
    """How far the draft model is with a sequence."""

    computed: int  # tokens whose keys and values are in the cache
    pending: list[int] = field(default_factory=list)  # those behind them that the sequence has …
    proposed: list[int] = field(default_factory=list)  # … and what was computed in their places as proposals

    @property
    def end(self) -> int:
        """Tokens that the sequence has."""
        return self.computed + len(self.pending)

    def know(self, start: int, token_ids: Sequence[int]) -> None:
        """The sequence has these from position `start` on. Tokens that were never told leave a gap."""
        if start > self.end:
            self.computed, self.pending, self.proposed = start, [], []
        self.pending += token_ids[self.end - start :]

    def compute(self, count: int) -> None:
        """So many of those that are pending are computed, over what was proposed in their places."""
        del self.pending[:count]
        self.computed += count
        self.proposed.clear()

    def confirm(self) -> None:
        """What came as it was proposed has been computed, but for the latest token, whose successor is asked for."""
        while len(self.pending) > 1 and self.proposed and self.pending[0] == self.proposed[0]:
            del self.pending[0], self.proposed[0]
            self.computed += 1
        self.proposed.clear()


class DraftModel:
    """See `Proposer`. model: without states, rings and encoder; logits: [R, D] → the served model's columns [R, Vl]."""

    reads_features = False
    taps = ()

    def __init__(
        self, model: Transformer, dtype: torch.dtype, logits: Callable[[Tensor], Tensor], name: str, most: int
    ) -> None:
        self.kv_shape = replace(model.kv_shape(dtype), window=0)  # no rings
        self.most = most
        self.nbytes = model.nbytes
        self.description = f"{name}, a draft model of {model.spec.num_layers} layers"
        self._model = model
        self._logits = logits
        self._passes: DraftPasses | None = None

    def open(self, around: Surroundings) -> None:
        self._passes = DraftPasses(self._model, self._logits, around)

    def captures(self) -> Sequence[Callable[[], None]]:
        return [] if self._passes is None else self._passes.passes.captures()

    def close(self) -> None:
        self._passes = None

    def see(self, plan: StepRuns) -> None:
        for run in (*plan.decodes, *plan.uploaded):
            if run.sequence.followed is None:
                run.sequence.followed = Followed(run.start)
        for run in plan.uploaded:
            token_ids = run.token_ids if run.draft is None else run.token_ids[: run.draft.num_known]
            run.sequence.followed.know(run.start, token_ids)

    def follow(self, plan: StepRuns, features: Tensor | None) -> None:
        self._catch_up(run.sequence for run in plan.chunks)

    def came(self, came: Sequence[Came]) -> None:
        for sequence, token_ids in came:
            sequence.followed.pending += token_ids

    def propose(
        self, plan: StepRuns, features: Tensor | None, came: Sequence[Came], wanted: Mapping[int, int]
    ) -> list[Proposal]:
        drafted = {run.sequence.id for run in plan.drafts if run.guesses}
        chunks = {run.sequence.id: run for run in plan.chunks}
        links, others, left = [], list[SequenceState](), MOST_BEHIND
        for sequence, token_ids in came:
            sequence.followed.confirm()
            most = min(wanted.get(sequence.id, 0), self._room(sequence))
            of_step = min(chunks[sequence.id].length, MOST_BEHIND) if sequence.id in chunks else self.most + 1
            behind = max(0, len(sequence.followed.pending) - of_step)
            if most > 0 and behind <= left:
                left -= behind
                unknown = token_ids if sequence.id in drafted else ()
                links.append(Link(sequence, sequence.followed.end, most, unknown))
                chunks.pop(sequence.id, None)
            elif sequence.id in wanted and sequence.id not in chunks:
                others.append(sequence)
        self._catch_up((run.sequence for run in chunks.values()), others, left)
        if not links:
            return []
        assert self._passes is not None, "the engine opens it with its cache"
        proposals = self._passes.propose(links)
        sequences = {link.sequence.id: link.sequence for link in links}
        for id, token_ids, _ in proposals:
            sequences[id].followed.proposed = list(token_ids[:-1])
        return proposals

    def _room(self, sequence: SequenceState) -> int:
        """How many tokens have room behind those that it has: all but the last of them are computed."""
        followed: Followed = sequence.followed
        room = len(sequence.blocks) * BLOCK_SIZE
        if self._model.max_positions:
            room = min(room, self._model.max_positions)
        return room + 1 - followed.end

    def _catch_up(self, chunks: Iterable[SequenceState], others: Iterable[SequenceState] = (), left: int = 0) -> None:
        """Compute what is pending of these, as far as there is room, and propose nothing. left: tokens of `others`."""
        assert self._passes is not None, "the engine opens it with its cache"
        behind = []
        for sequence in chunks:
            if (count := min(self._computable(sequence), MOST_BEHIND)) > 0:
                behind.append((sequence, count))
        for sequence in others:
            if (count := min(self._computable(sequence), left)) > 0:
                behind.append((sequence, count))
                left -= count
        if behind:
            self._passes.compute(behind)

    def _computable(self, sequence: SequenceState) -> int:
        """How many pending tokens have room."""
        pending = len(sequence.followed.pending)
        return min(pending, self._room(sequence) - 1 + pending)


class DraftPasses:
    """What a draft model computes over one cache."""

    def __init__(self, model: Transformer, logits: Callable[[Tensor], Tensor], around: Surroundings) -> None:
        self.passes = Passes(lambda forward: model.run(forward, around.caches).hidden, logits, around)

    def propose(self, links: Sequence[Link]) -> list[Proposal]:
        """Compute what is pending, and tokens behind it."""
        return self.passes.chain(links, self._first(links), lambda *of: self.passes.next(*of)[0])

    def compute(self, behind: Sequence[tuple[SequenceState, int]]) -> Tensor:
        """Compute so many pending tokens of each sequence; the hidden states [T, D]."""
        spans = [(sequence.row, sequence.followed.computed, count) for sequence, count in behind]
        known = [id for sequence, count in behind for id in sequence.followed.pending[:count]]
        hidden = self.passes.compute(spans, known)
        for sequence, count in behind:
            sequence.followed.compute(count)
        return hidden

    def _first(self, links: Sequence[Link]) -> Chosen:
        counts = [len(link.sequence.followed.pending) for link in links]
        latest = [link.sequence.followed.pending[-1] for link in links]
        hidden = self.compute([(link.sequence, count) for link, count in zip(links, counts, strict=True)])
        ends = self.passes.device.upload([end - 1 for end in accumulate(counts)])
        return self.passes.choose(links, hidden[ends], 0, self.passes.device.upload(latest))
