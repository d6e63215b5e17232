"""What a speculative model proposes, and what that takes: Leviathan et al. 2022 (arXiv 2211.17192), with its own costs.

The shards have the model. A step may ask it for tokens behind those that the step brings; they are guesses of the step
after it, as those from texts are. It follows the tokens that came first, and then takes a pass for each token that it
proposes, so its time lies on a line. Left out: which sequences should be asked about (`speculation.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

RIGHT = 0.6  # chance of a proposal behind right ones, before anything is known …
PRIOR = 4.0  # … and proposals that this, or what is known of the place before, counts as
MOST_PLACES = 16
PLACE_MEMORY = 512.0  # proposals that count: with as many, each counts half
SKILL_PRIOR = 8.0
SKILL_MEMORY = 32.0
MOST_RIGHT = 0.98  # the highest chance: nothing is certain
MEMORY = 16  # answers that count
CREDIT = 1.5  # how many times what is known an answer may count as: one that was interrupted says little
FEW = 3  # answers until then may have been interrupted themselves


class Proposal(NamedTuple):
    """Tokens behind a text, and how likely the model found each."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    place: int = 0  # of the first, among those that were proposed together


class Places:
    """How often the first of a model's proposals was right, the second behind a right one, and so on, of all sequences.

    Where little is known of a place, it is as the one before.
    """

    def __init__(self) -> None:
        self._right = [0.0] * MOST_PLACES
        self._made = [0.0] * MOST_PLACES

    def note(self, place: int, *, is_right: bool) -> None:
        """What was proposed there came, or did not."""
        place = min(place, MOST_PLACES - 1)
        if self._made[place] >= PLACE_MEMORY:
            self._right[place] /= 2
            self._made[place] /= 2
        self._right[place] += is_right
        self._made[place] += 1

    def chances(self, most: int) -> Iterator[float]:
        """Of so many places, each where those before it are right."""
        chance = RIGHT
        for right, made in zip(self._right[:most], self._made[:most], strict=True):
            chance = (right + PRIOR * chance) / (made + PRIOR)
            yield chance


class Skill:
    """How well a model does for one sequence, compared with all: how many of its proposals were right."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._right = self._expected = SKILL_PRIOR

    def compare(self, proposal: Proposal, token_ids: Sequence[int]) -> Proposal:
        """With what came; what it said behind that is returned, where it stands."""
        chances = [*self._places.chances(proposal.place + len(proposal.token_ids))][proposal.place :]
        pairs = zip(proposal.token_ids, token_ids, chances, strict=False)
        for place, (proposed, came, chance) in enumerate(pairs, proposal.place):
            if self._expected >= SKILL_MEMORY:
                self._expected /= 2
                self._right /= 2
            self._expected += chance
            self._right += proposed == came
            self._places.note(place, is_right=proposed == came)
            if proposed != came:
                return Proposal()
        num = len(token_ids)
        return Proposal(proposal.token_ids[num:], proposal.logprobs[num:], proposal.place + num)

    def promise(self, most: int) -> list[float]:
        """How many of one proposal, of two, and so on, are right, as it is expected."""
        factor, chance, found = self._right / self._expected, 1.0, list[float]()
        for of_all in self._places.chances(most):
            chance *= min(MOST_RIGHT, factor * of_all)
            found.append(chance + (found[-1] if found else 0.0))
        return found


class Asked(NamedTuple):
    """What a step was asked for, and what came of it."""

    most: int  # tokens of each sequence
    num_answered: int = 0  # sequences for which something was proposed
    seconds: float = 0.0  # that it took


class ProposeCosts:
    """Seconds by sequences and tokens of each, for about as many sequences: two kinds for each doubling."""

    def __init__(self) -> None:
        self._kinds: dict[int, dict[int, tuple[float, int]]] = {}  # kind -> tokens -> seconds, answers

    def note(self, sequences: int, tokens: int, seconds: float) -> None:
        """So many were proposed for each."""
        of_kind = self._kinds.setdefault(round(2 * math.log2(sequences)), {})
        mean, count = of_kind.get(tokens, (seconds, 0))
        if count < FEW and mean > CREDIT * seconds:
            mean, count = seconds, 0
        count = min(count + 1, MEMORY)
        if count > 1:
            seconds = min(seconds, CREDIT * mean)
        mean += (seconds - mean) / count
        for fewer in [known for known, (took, _) in of_kind.items() if known < tokens and took > mean]:
            del of_kind[fewer]  # more take less now
        of_kind[tokens] = mean, count

    def _nearest(self, sequences: int) -> dict[int, tuple[float, int]]:
        wanted = 2 * math.log2(sequences)
        return self._kinds[min(self._kinds, key=lambda kind: abs(kind - wanted))]

    def is_sure(self, sequences: int) -> bool:
        """Whether so many answers count that not all were interrupted."""
        return bool(self._kinds) and sum(count for _, count in self._nearest(sequences).values()) >= FEW

    def seconds(self, sequences: int, tokens: int) -> float:
        """What it would take; infinity if nothing is known."""
        if not self._kinds:
            return math.inf
        # With no token it would still follow the text, which is about a pass.
        left, seconds_left, slope = -1, 0.0, 0.0
        for known, (seconds, _) in sorted(self._nearest(sequences).items()):
            slope = max(0.0, seconds - seconds_left) / (known - left)
            if tokens <= known:
                break
            left, seconds_left = known, max(seconds, seconds_left)
        return seconds_left + slope * (tokens - left)
