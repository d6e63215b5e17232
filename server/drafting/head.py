"""Proposals of a head on the served model: it goes on from what the model computed of each token.

At a position it is given that and the token behind, and finds the token after that one: so it computes a step's rows
once the step's tokens are known. Behind the latest one it goes on from its own output and its own tokens, and writes
over what it kept of these when others come. Chunks of prompts are always computed, other rows where a step is asked for
proposals behind them: in a step that is not asked a sequence leaves a gap, and for a while its proposals are worse. So
are those behind a prefix that another prompt shares up to a block's end, where the next token was another one.

Shapes: R rows, T tokens of a pass, F features of a token, D of them that a pass goes on from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from server.backends.protocol import StepMeta
from server.blocks import BLOCK_SIZE
from server.drafting.chain import Link
from server.drafting.passes import Passes
from server.stepping.batch import Forward, Layout
from server.stepping.cache import KVShape
from server.stepping.proposals import Came, Proposal, Surroundings
from server.stepping.sampling import Chosen
from server.stepping.sequences import SequenceState, StepRuns, TokenRun

AHEAD = 2  # positions from a row to the token that it proposes
UNREAD = (0,)  # what came of a prompt, where only the device knows it yet


class Head(Protocol):
    """What computes rows of one rank."""

    @property
    def description(self) -> str:
        """What it is, for people."""

    @property
    def nbytes(self) -> int:
        """Memory of its weights."""

    @property
    def kv_shape(self) -> KVShape:
        """What it keeps of a position."""

    @property
    def taps(self) -> Sequence[int]:
        """See `Proposer`."""

    @property
    def max_positions(self) -> int:
        """That it may compute; 0: no limit of its own."""

    @property
    def width(self) -> int:
        """D."""

    @property
    def dtype(self) -> torch.dtype:
        """That it computes in."""

    def inputs(self, features: Tensor) -> Tensor:
        """features [R, F] of the model → [R, D]."""

    def __call__(self, token_ids: Tensor, inputs: Tensor, meta: StepMeta, caches: Sequence[Tensor]) -> Tensor:
        """The tokens [T] behind each position, and inputs [T, D] of it → [T, D], from which it may go on."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, D] → the served model's columns [R, Vl]."""


class Rows(NamedTuple):
    """Some rows of a step, whose next tokens are known."""

    sequence: SequenceState
    start: int  # position of the first
    at: int  # where it is among the step's rows
    behind: Sequence[int]  # the token behind each

    @property
    def end(self) -> int:
        """Tokens that the sequence has, if these rows end with that which its latest one came from."""
        return self.start + len(self.behind) + 1


def rows_of(plan: StepRuns, came: Mapping[int, Sequence[int]]) -> Iterator[Rows]:
    """Those of the chunks of prompts, and of sequences that got tokens, by id: as far as they were right."""
    runs = (*plan.decodes, *plan.uploaded)
    starts = accumulate((run.length for run in runs), initial=0)
    for place, (run, at) in enumerate(zip(runs, starts, strict=False)):
        is_chunk = place >= len(plan.decodes) + len(plan.drafts)
        if run.sequence.id in came or (is_chunk and not run.num_sampled):
            behind = _behind(run, came.get(run.sequence.id, ()))
            first = 0 if run.draft is None else run.draft.num_again  # what is computed again is known here
            yield Rows(run.sequence, run.start + first, at + first, behind[first:])


def _behind(run: TokenRun, came: Sequence[int]) -> list[int]:
    """The tokens behind the rows of a run, as far as these are of right tokens."""
    if not run.num_sampled:
        return [*run.token_ids[1:], run.sequence.prompt[run.start + run.length]]
    right = run.length - len(run.guesses) + len(came) - 1
    return [*run.token_ids[1:right], came[-1]]


def _ends(rows: Sequence[Rows]) -> Iterator[int]:
    """Where each ends in a pass that computes them one after the other."""
    return accumulate(len(row.behind) for row in rows)


class HeadProposer:
    """See `Proposer`. most: tokens at once."""

    reads_features = True

    def __init__(self, head: Head, most: int) -> None:
        self.kv_shape = head.kv_shape
        self.taps = head.taps
        self.nbytes = head.nbytes
        self.description = head.description
        self.most = most
        self._head = head
        self._passes: HeadPasses | None = None

    def open(self, around: Surroundings) -> None:
        self._passes = HeadPasses(self._head, around)

    def captures(self) -> Sequence[Callable[[], None]]:
        return [] if self._passes is None else self._passes.passes.captures()

    def close(self) -> None:
        self._passes = None

    def see(self, plan: StepRuns) -> None:
        """Nothing: it keeps nothing of sequences but in their blocks."""

    def came(self, came: Sequence[Came]) -> None:
        """Nothing, likewise."""

    def follow(self, plan: StepRuns, features: Tensor | None) -> None:
        assert self._passes is not None and features is not None, "the engine opens it with its cache"
        ended = {run.sequence.id: UNREAD for run in plan.chunks if run.num_sampled}
        if rows := list(rows_of(plan, ended)):
            self._passes.compute(rows, features, unread=ended)

    def propose(
        self, plan: StepRuns, features: Tensor | None, came: Sequence[Came], wanted: Mapping[int, int]
    ) -> list[Proposal]:
        assert self._passes is not None and features is not None, "the engine opens it with its cache"
        chunks = {run.sequence.id for run in plan.chunks}
        tokens = {s.id: token_ids for s, token_ids in came if s.id in wanted or s.id in chunks}
        rows = list(rows_of(plan, tokens))
        drafted = {run.sequence.id for run in plan.drafts if run.guesses}
        links = {}
        for row in rows:
            id = row.sequence.id
            most = min(wanted.get(id, 0), self._room(row)) if id in tokens else 0
            if most > 0:
                links[id] = Link(row.sequence, row.end, most, tokens[id] if id in drafted else ())
        if links:
            return self._passes.propose(rows, features, links)
        if rows:
            self._passes.compute(rows, features)
        return []

    def _room(self, row: Rows) -> int:
        """How many tokens have room behind a sequence's latest one: all but the last of them are computed."""
        room = len(row.sequence.blocks) * BLOCK_SIZE
        if self._head.max_positions:
            room = min(room, self._head.max_positions)
        return room + 1 - row.end


@dataclass
class Latest:
    """What the last pass made of sequences."""

    links: Sequence[Link]
    hidden: Tensor  # [R, D] of each


class HeadPasses:
    """What a head computes over one cache."""

    def __init__(self, head: Head, around: Surroundings) -> None:
        self._head = head
        self._model_tokens = around.tables.last_tokens
        self._latest: Latest | None = None
        none = torch.empty(0, head.width, dtype=head.dtype, device=around.device.torch_device)
        self.passes = Passes(self._hidden, head.logits, around, ahead=AHEAD, carried=none)

    def compute(self, rows: Sequence[Rows], features: Tensor, unread: Collection[int] = ()) -> Tensor:
        """Keep what the head needs of these rows; what it makes of each, [R, D].

        unread: sequences, by id, behind whose last row is the latest token, which the model's tables know.
        """
        spans = [(row.sequence.row, row.start, len(row.behind)) for row in rows]
        token_ids, inputs = [token for row in rows for token in row.behind], self._inputs(rows, features)
        if not unread:
            return self.passes.compute(spans, token_ids, inputs)
        forward = self.passes.forward(Layout.of(spans, token_ids), inputs)
        ends = zip(rows, _ends(rows), strict=True)
        places = self._upload([[end - 1, row.sequence.row] for row, end in ends if row.sequence.id in unread])
        forward.token_ids.index_copy_(0, places[:, 0], self._model_tokens[places[:, 1]])
        return self._hidden(forward)

    def propose(self, rows: Sequence[Rows], features: Tensor, links: Mapping[int, Link]) -> list[Proposal]:
        """Compute these rows, and tokens behind those of some sequences, by id."""
        mine = [row for row in rows if row.sequence.id in links]
        proposing, latest = [links[row.sequence.id] for row in mine], [row.behind[-1] for row in mine]
        previous = self._upload(latest)
        if len(mine) == sum(len(row.behind) for row in rows):
            self._latest = Latest(proposing, self._inputs(rows, features))
            self.passes.tables.keep(self._upload([row.sequence.row for row in mine]), previous)
            first = self._next(proposing, previous, 0)
        else:
            hidden = self.compute(rows, features)
            at = [end - 1 for row, end in zip(rows, _ends(rows), strict=True) if row.sequence.id in links]
            self._latest = Latest(proposing, hidden[self._upload(at)])
            first = self.passes.choose(proposing, self._latest.hidden, 0, previous)
        return self.passes.chain(proposing, first, self._next)

    def _inputs(self, rows: Sequence[Rows], features: Tensor) -> Tensor:
        """What the head is given of these rows, [R, D]."""
        at = [place for row in rows for place in range(row.at, row.at + len(row.behind))]
        own = features if len(at) == len(features) else features[self._upload(at)]
        return self._head.inputs(own)

    def _next(self, links: Sequence[Link], previous: Tensor, place: int) -> Chosen:
        chosen, hidden = self.passes.next(links, previous, place, self._before(links))
        self._latest = Latest(links, hidden)
        return chosen

    def _before(self, links: Sequence[Link]) -> Tensor:
        """What the last pass made of these, which are some of its links: [R, D]."""
        assert self._latest is not None, "a pass was before"
        if len(links) == len(self._latest.links):
            return self._latest.hidden
        own = {link.sequence.id for link in links}
        at = [place for place, link in enumerate(self._latest.links) if link.sequence.id in own]
        return self._latest.hidden[self._upload(at)]

    def _upload(self, numbers: Sequence[object]) -> Tensor:
        return self.passes.device.upload(numbers)

    def _hidden(self, forward: Forward) -> Tensor:
        assert forward.carried is not None, "a head goes on from something"
        return self._head(forward.token_ids, forward.carried.hidden, forward.meta, self.passes.caches)
