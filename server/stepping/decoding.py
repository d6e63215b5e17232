"""What is captured of a decode step: a pass of the model, and the plain ways to choose tokens behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from server.arch.footprint import LOGIT_ROWS
from server.stepping.batch import Forward
from server.stepping.graphs import Form
from server.stepping.sampling import choose_captured
from server.stepping.vocabulary import Vocabulary


@dataclass(frozen=True)
class Decoding:
    """Of one model. hidden: a pass → [T, D]; logits: [R, D] → this rank's [R, Vl].

    gives_hidden: whether the hidden states stand behind the tokens too. ahead: how many positions behind its own a
    token is chosen.
    """

    hidden: Callable[[Forward], Tensor]
    logits: Callable[[Tensor], Tensor]
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
            return *self._sampled(hidden, settings, forward.meta.positions + self.ahead), *behind
        # What a sampler does for plain tokens, and nothing else: a graph repeats every operator.
        best = self.vocabulary.summarise(self.logits(hidden), 1)
        return best.top_ids.squeeze(1), (best.top_logits - best.log_totals).squeeze(1), *behind

    def _sampled(self, hidden: Tensor, settings: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """The next tokens and their log-probabilities, from a few rows of logits at a time."""
        parts = [
            choose_captured(self.vocabulary, self.logits(rows), part, at)
            for rows, part, at in zip(
                hidden.split(LOGIT_ROWS), settings.split(LOGIT_ROWS, dim=1), positions.split(LOGIT_ROWS), strict=True
            )
        ]
        return parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))
