"""What is captured of a decode step: a pass of the model, and the plain ways to choose tokens behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from server.arch.footprint import LOGIT_ROWS
from server.backends.protocol import StepMeta, TokenAdapters
from server.stepping.batch import Forward
from server.stepping.graphs import Form
from server.stepping.sampling import choose_captured
from server.stepping.vocabulary import Vocabulary


@dataclass(frozen=True)
class Decoding:
    """Of one model. hidden: a pass → [T, D]; logits: [R, D] → this rank's [R, Vl], of rows that may have adapters.

    gives_hidden: whether the hidden states stand behind the tokens too. ahead: how many positions behind its own a
    token is chosen.
    """

    hidden: Callable[[Forward], Tensor]
    logits: Callable[..., Tensor]
    vocabulary: Vocabulary
    gives_hidden: bool = False
    ahead: int = 1

    def __call__(self, forward: Forward, form: Form, settings: Tensor) -> tuple[Tensor, ...]:
        """A step in which every sequence has one token and gets the next. settings: see `settings_of`."""
        hidden = self.hidden(forward)
        if form is Form.HIDDEN:
            return hidden, forward.meta.positions + self.ahead, forward.token_ids
        behind = (hidden,) if self.gives_hidden else ()
        if form is Form.SAMPLED:
            return *self._sampled(hidden, settings, forward.meta), *behind
        # What a sampler does for plain tokens, and nothing else: a graph repeats every operator.
        best = self.vocabulary.summarise(self._logits(hidden, forward.meta.adapters), 1)
        return best.top_ids.squeeze(1), (best.top_logits - best.log_totals).squeeze(1), *behind

    def _logits(self, hidden: Tensor, adapters: TokenAdapters | None) -> Tensor:
        return self.logits(hidden) if adapters is None else self.logits(hidden, adapters)

    def _sampled(self, hidden: Tensor, settings: Tensor, meta: StepMeta) -> tuple[Tensor, ...]:
        """The next tokens and their log-probabilities, from a few rows of logits at a time."""
        positions, parts = meta.positions + self.ahead, []
        for first in range(0, len(hidden), LOGIT_ROWS):
            some = slice(first, first + LOGIT_ROWS)
            adapters = None if meta.adapters is None else meta.adapters.at(some)
            logits = self._logits(hidden[some], adapters)
            parts.append(choose_captured(self.vocabulary, logits, settings[:, some], positions[some]))
        return parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))
