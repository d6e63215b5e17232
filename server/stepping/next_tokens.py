"""What a step's logits give: the next tokens of its sequences, and log-probabilities of tokens that were known before.

`TokenChooser` stands between the engine, which has logits, and `Sampler`, which is made for certain choices: most steps
choose for the same sequences as the step before, so that what a sampler has uploaded once is used again.

Known tokens are those of a prompt, and those that a grammar forced. Their log-probabilities come from the logits at
each token's predecessor, and are the model's own: nothing that tokens are chosen by changes them. All is done a few
rows at a time, so that a long prompt takes no more memory than a batch does.

Shapes: k tokens of one chunk, n candidates of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from server.arch.footprint import LOGIT_ROWS
from server.backends.device import Device
from server.stepping.batch import Forward
from server.stepping.logit_rules import Allowed
from server.stepping.sampling import Chosen, Sampler, TokenChoice, Watermark
from server.stepping.sequences import SampledRow, TokenRun
from server.stepping.vocabulary import Vocabulary

# Samplers that are kept for the same rows: sequences with a grammar take part in one step and sit out the next.
MOST_SAMPLERS = 4


class TokenChooser:
    """Chooses the tokens of one engine."""

    def __init__(self, watermark: Watermark, device: Device, vocabulary: Vocabulary):
        self._watermark = watermark
        self._device = device
        self._vocabulary = vocabulary
        self._samplers: dict[int, list[tuple[list[TokenChoice], Sampler]]] = {}  # by the first row, the latest first

    def __call__(
        self,
        rows: Sequence[SampledRow],
        logits: Callable[[slice], Tensor],
        *,
        positions: Tensor,
        previous: Tensor,
        allowed: Mapping[tuple[int, int], Allowed],
    ) -> list[Chosen]:
        """A token for each of `rows`, a few at a time, so that no batch takes more memory than they do.

        logits: of some rows, [R, Vl]; positions, previous: see `Sampler`; allowed: where there is a grammar, by the
        sequence's id and the row's place in its draft.
        """
        masks = [allowed.get((row.sequence.id, row.place)) for row in rows] if allowed else [None] * len(rows)
        unknown = any(
            mask is None and row.sequence.choice.is_constrained for mask, row in zip(masks, rows, strict=True)
        )
        assert not unknown, "a grammar says what comes next"
        chosen = []
        for first in range(0, len(rows), LOGIT_ROWS):
            part = slice(first, first + LOGIT_ROWS)
            histories = [row.history for row in rows[part]]
            recents = [row.recent for row in rows[part]]
            sampler = self._sampler([row.sequence.choice for row in rows[part]], first)
            chosen.append(sampler(logits(part), positions[part], previous[part], histories, recents, masks[part]))
        return chosen

    def _sampler(self, choices: list[TokenChoice], first: int) -> Sampler:
        """The sampler of the rows from `first` on: one of the last, if they choose as they did then."""
        known = self._samplers.setdefault(first, [])
        found = next((one for one in known if one[0] == choices), None)
        if found is None:
            found = choices, Sampler(choices, self._watermark, self._device, self._vocabulary)
            known[:] = [found, *known[: MOST_SAMPLERS - 1]]
        return found[1]


class KnownLogprobs(NamedTuple):
    """On the host: of each token, and of its candidates where these are wanted, n for each token."""

    logprobs: list[float]
    top_ids: list[int]
    top_logprobs: list[float]


class Reported(NamedTuple):
    """The same where it was computed: [k], and candidates [k, n]."""

    logprobs: Tensor
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None

    def downloaded(self, device: Device) -> Reported:
        """A copy on the host, complete once an event that is made afterwards has been reached."""
        logprobs = device.download(self.logprobs)
        if self.top_ids is None or self.top_logprobs is None:
            return Reported(logprobs)
        return Reported(logprobs, device.download(self.top_ids), device.download(self.top_logprobs))

    def read(self) -> KnownLogprobs:
        """The numbers, once they are there."""
        logprobs = self.logprobs.tolist()
        if self.top_ids is None or self.top_logprobs is None:
            return KnownLogprobs(logprobs, [], [])
        return KnownLogprobs(logprobs, self.top_ids.flatten().tolist(), self.top_logprobs.flatten().tolist())


def counted(logprobs: Sequence[float], wanted: int) -> int:
    """How many candidates, most likely first, are reported: those wanted, but for tokens that a warper removed."""
    return sum(logprob > float("-inf") for logprob in logprobs[:wanted])


def reported_tokens(
    forward: Forward, hidden: Tensor, logits: Callable[..., Tensor], vocabulary: Vocabulary, device: Device
) -> dict[int, Reported]:
    """By sequence. hidden: [T, D] of the step; logits: of some rows of it, which may have adapters."""
    found = {}
    for run, start in zip(forward.runs, forward.meta.query_starts, strict=False):
        if wanted := run.reported:
            first = start + wanted.start - 1 - run.start  # the row before the first token
            rows = hidden[first : first + len(wanted)].split(LOGIT_ROWS)
            ids = device.upload(run.sequence.prompt[wanted.start : wanted.stop]).split(LOGIT_ROWS)
            n, adapters = candidates_of(run), forward.meta.adapters
            own = () if adapters is None else (adapters.at(slice(first, first + len(wanted))),)
            parts = [
                _report(logits(some, *(one.at(slice(len(some))) for one in own)), of, n, vocabulary)
                for some, of in zip(rows, ids, strict=True)  # of one sequence, whose tokens have one adapter
            ]
            found[run.sequence.id] = parts[0] if len(parts) == 1 else _joined(parts)
    return found


def candidates_of(run: TokenRun) -> int:
    """How many candidates are reported with each known token: those of /v1, whose log-probabilities are the model's."""
    choice = run.sequence.choice
    return choice.top_n_tokens if choice.raw_logprobs else 0


def _report(logits: Tensor, token_ids: Tensor, n: int, vocabulary: Vocabulary) -> Reported:
    if not n:
        return Reported(vocabulary.logprobs(logits, token_ids))
    best = vocabulary.summarise(logits, n)
    logprobs = vocabulary.logprobs(logits, token_ids, best.log_totals)
    return Reported(logprobs, best.top_ids, best.top_logits - best.log_totals)


def _joined(parts: Sequence[Reported]) -> Reported:
    ids = [part.top_ids for part in parts if part.top_ids is not None]
    values = [part.top_logprobs for part in parts if part.top_logprobs is not None]
    logprobs = torch.cat([part.logprobs for part in parts])
    return Reported(logprobs, torch.cat(ids), torch.cat(values)) if ids else Reported(logprobs)
