"""What a step reports of tokens that were known before it: log-probabilities of a prompt, and of forced tokens.

These come from the logits at each token's predecessor, a few rows at a time, so that a long prompt takes no more memory
than a batch does. They are the model's own: nothing that tokens are chosen by changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from server.backends.protocol import Device
from server.stepping.batch import Forward
from server.stepping.choosing import LOGIT_ROWS
from server.stepping.sequences import TokenRun
from server.stepping.vocabulary import Vocabulary


class KnownLogprobs(NamedTuple):
    """On the host: of each token, and of its candidates where it is one that was forced, n for each token."""

    logprobs: list[float]
    top_ids: list[int]
    top_logprobs: list[float]


class Reported(NamedTuple):
    """The same where it was computed: [k], and candidates [m, n] of the last m tokens."""

    logprobs: Tensor
    top_ids: Tensor | None
    top_logprobs: Tensor | None

    def downloaded(self, device: Device) -> Reported:
        """A copy on the host, complete once an event that is made afterwards has been reached."""
        return Reported(*(None if part is None else device.download(part) for part in self))  # type: ignore[arg-type]

    def read(self) -> KnownLogprobs:
        """The numbers, once they are there."""
        ids, values = (() if part is None else part.flatten().tolist() for part in (self.top_ids, self.top_logprobs))
        return KnownLogprobs(self.logprobs.tolist(), list(ids), list(values))


def counted(logprobs: Sequence[float], wanted: int) -> int:
    """How many candidates, most likely first, are reported: those wanted, but for tokens that a warper removed."""
    return sum(logprob > float("-inf") for logprob in logprobs[:wanted])


def reported_tokens(
    forward: Forward, hidden: Tensor, logits: Callable[[Tensor], Tensor], vocabulary: Vocabulary, device: Device
) -> dict[int, Reported]:
    """By sequence. hidden: [T, D] of the step; logits: of some rows of it."""
    find = _Finder(hidden, logits, vocabulary, device)
    return {
        run.sequence.id: find(run, start)
        for run, start in zip(forward.runs, forward.meta.query_starts, strict=False)
        if run.reported
    }


class _Finder:
    def __init__(self, hidden: Tensor, logits: Callable[[Tensor], Tensor], vocabulary: Vocabulary, device: Device):
        self._hidden, self._logits, self._vocabulary, self._device = hidden, logits, vocabulary, device

    def __call__(self, run: TokenRun, start: int) -> Reported:
        """Of one run, whose first token is the step's token `start`."""
        sequence, wanted = run.sequence, run.reported
        first = start + wanted.start - 1 - run.start  # the row before the first token
        rows = self._hidden[first : first + len(wanted)]
        targets = self._device.upload(sequence.prompt[wanted.start : wanted.stop])
        found = [
            self._one(part, ids) for part, ids in zip(rows.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True)
        ]
        logprobs = torch.cat(found)
        forced = rows[max(0, sequence.forced_from - wanted.start) :]
        if not (sequence.choice.top_n_tokens and sequence.choice.raw_logprobs and len(forced)):
            return Reported(logprobs, None, None)
        best = [self._best(part, sequence.choice.top_n_tokens) for part in forced.split(LOGIT_ROWS)]
        return Reported(logprobs, torch.cat([ids for ids, _ in best]), torch.cat([values for _, values in best]))

    def _one(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        return self._vocabulary.logprobs(self._logits(rows), token_ids)

    def _best(self, rows: Tensor, n: int) -> tuple[Tensor, Tensor]:
        best = self._vocabulary.summarise(self._logits(rows), n)
        return best.top_ids, best.top_logits - best.log_totals
