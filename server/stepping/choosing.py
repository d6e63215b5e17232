"""The next tokens of a step's sequences, from their logits, a few rows at a time.

Between the engine, which has logits, and `Sampler`, which is made for certain choices: most steps choose for the same
sequences as the step before, so that what a sampler has uploaded once is used again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from server.backends.device import Device
from server.stepping.masks import Allowed
from server.stepping.sampling import Chosen, Sampler, TokenChoice, Watermark
from server.stepping.sequences import SequenceState
from server.stepping.vocabulary import Vocabulary

# Rows whose logits are looked at together: 128 rows of BLOOM's 250,880 are 128 MB, and sampling takes several times
# that.
LOGIT_ROWS = 128
# Samplers that are kept for the same rows: sequences with a grammar take part in one step and sit out the next.
MOST_SAMPLERS = 4


class Chooser:
    """Chooses the tokens of one engine."""

    def __init__(self, watermark: Watermark, device: Device, vocabulary: Vocabulary):
        self._watermark = watermark
        self._device = device
        self._vocabulary = vocabulary
        self._samplers: dict[int, list[tuple[list[TokenChoice], Sampler]]] = {}  # by the first row, the latest first

    def __call__(
        self,
        sequences: list[SequenceState],
        logits: Callable[[slice], Tensor],
        *,
        positions: Tensor,
        previous: Tensor,
        allowed: Mapping[int, Allowed],
    ) -> list[Chosen]:
        """A token for each of `sequences`, a few rows at a time, so that no batch takes more memory than they do.

        logits: of some rows, [R, Vl]; positions, previous: see `Sampler`; allowed: of sequences with a grammar, by id.
        """
        assert all(s.id in allowed for s in sequences if s.choice.is_constrained), "a grammar says what comes next"
        chosen = []
        for first in range(0, len(sequences), LOGIT_ROWS):
            rows = slice(first, first + LOGIT_ROWS)
            histories = [s.history for s in sequences[rows]]
            recents = [s.recent for s in sequences[rows]]
            masks = [allowed.get(s.id) for s in sequences[rows]] if allowed else []
            sampler = self._sampler([s.choice for s in sequences[rows]], first)
            chosen.append(sampler(logits(rows), positions[rows], previous[rows], histories, recents, masks))
        return chosen

    def _sampler(self, choices: list[TokenChoice], first: int) -> Sampler:
        """The sampler of the rows from `first` on: one of the last, if they choose as they did then."""
        known = self._samplers.setdefault(first, [])
        found = next((one for one in known if one[0] == choices), None)
        if found is None:
            found = choices, Sampler(choices, self._watermark, self._device, self._vocabulary)
            known[:] = [found, *known[: MOST_SAMPLERS - 1]]
        return found[1]
