"""What a speculative model proposes, and what that takes: Leviathan et al. 2022 (arXiv 2211.17192), with its own costs.

The shards have the model. A step may ask it for tokens behind those that the step brings; they are guesses of the step
after it, as those from texts are. It follows the tokens that came first, and then takes a pass for each token that it
proposes, so its time lies on a line. Left out: which sequences should be asked about (`speculation.py`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

MEMORY = 16  # answers that count
CREDIT = 1.5  # how many times what is known an answer may count as: one that was interrupted says little


class Proposal(NamedTuple):
    """Tokens behind a text, and how likely the model found each."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    place: int = 0  # of the first, among those that were proposed together


class ProposeCosts:
    """Seconds by sequences and tokens of each, for about as many sequences: two kinds for each doubling."""

    def __init__(self) -> None:
        self._kinds: dict[int, dict[int, tuple[float, int]]] = {}  # kind -> tokens -> seconds, answers

    def note(self, sequences: int, tokens: int, seconds: float) -> None:
        """So many were proposed for each."""
        of_kind = self._kinds.setdefault(round(2 * math.log2(sequences)), {})
        mean, count = of_kind.get(tokens, (seconds, 0))
        count = min(count + 1, MEMORY)
        if count > 1:
            seconds = min(seconds, CREDIT * mean)
        of_kind[tokens] = mean + (seconds - mean) / count, count

    def seconds(self, sequences: int, tokens: int) -> float:
        """What it would take; infinity if nothing is known."""
        if not self._kinds:
            return math.inf
        wanted = 2 * math.log2(sequences)
        kind = min(self._kinds, key=lambda kind: abs(kind - wanted))
        # With no token it would still follow the text, which is about a pass.
        left, seconds_left, slope = -1, 0.0, 0.0
        for known, (seconds, _) in sorted(self._kinds[kind].items()):
            slope = max(0.0, seconds - seconds_left) / (known - left)
            if tokens <= known:
                break
            left, seconds_left = known, max(seconds, seconds_left)
        return seconds_left + slope * (tokens - left)
