"""Which rows of a step's features belong to tokens that sequences have, and which token came behind each.

Heads that go on from what the model computed of a token read both. Behind a draft, only rows up to the last right guess
count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from server.drafting.chain import Link
from server.stepping.proposals import Came
from server.stepping.sequences import StepRuns, TokenRun


@dataclass(frozen=True)
class Span:
    """The tokens of one sequence that a step computed, but for guesses that were wrong."""

    run: TokenRun
    row: int  # of its first token
    came: Sequence[int]  # what the sequence got; empty: nothing, or nobody knows yet

    @property
    def num_rows(self) -> int:
        """How many rows belong to tokens that it has."""
        return self._num_known + max(0, len(self.came) - 1)

    @property
    def last_row(self) -> int:
        """Of the token behind which its latest one was chosen."""
        return self.row + self.num_rows - 1

    @property
    def end(self) -> int:
        """Tokens that it has."""
        return self.run.start + self._num_known + len(self.came)

    @property
    def following(self) -> list[int]:
        """The token behind each row; the last one is missing where it was chosen in this step and nobody knows it."""
        known = list(self.run.token_ids[1 : self._num_known])
        if self.run.num_sampled:
            return known + list(self.came)
        return [*known, self.run.sequence.prompt[self.run.start + self.run.length]]

    def link(self, most: int) -> Link:
        """What at most so many tokens are proposed for, behind its latest one."""
        return Link(self.run.sequence, self.end, most, self.came if self.run.guesses else ())

    @property
    def _num_known(self) -> int:
        return self.run.length if self.run.draft is None else self.run.draft.num_known


def spans(plan: StepRuns, came: Sequence[Came] = ()) -> list[Span]:
    """All of a step, decodes first. came: what sequences got in it, where that is known."""
    runs = [*plan.decodes, *plan.uploaded]
    got = {sequence.id: token_ids for sequence, token_ids in came}
    rows = accumulate((run.length for run in runs), initial=0)
    return [Span(run, row, got.get(run.sequence.id, ())) for run, row in zip(runs, rows, strict=False)]
