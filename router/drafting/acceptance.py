"""How often guesses are right, by what speaks for them.

Those from texts by how much of the text they match: a match that goes on is a longer one, so the chance of each further
guess, where those before it are right, is that of a match as much longer. Those that a model proposes by how likely it
finds them. What is learnt costs nothing, since guesses that were never sent are compared with what came too. A sequence
begins with what is known of all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from router.drafting.drafter import Guess

# Chances for matches below 1, 2, 4, 8, 16, 32 tokens and for longer ones, before anything is known.
MATCHES = (0.05, 0.15, 0.35, 0.55, 0.65, 0.8, 0.95)
LAST = len(MATCHES) - 1
NUM_LIKELIHOODS = 10  # kinds of proposals, each a tenth
PRIORS = (*MATCHES, *(0.9 * (tenth + 0.5) / NUM_LIKELIHOODS for tenth in range(NUM_LIKELIHOODS)))
COMMON_PRIOR = 8.0  # guesses that such a chance counts as
# Guesses that what is known of all sequences counts as for one: texts differ more in what they repeat.
WEIGHTS = (*(2.0 for _ in MATCHES), *(8.0 for _ in range(NUM_LIKELIHOODS)))
COMMON_MEMORY = 512.0  # guesses that count: with as many, each counts half
MEMORY = 32.0


class Chances:
    """How often guesses of each kind were right. common: of all sequences, where this is of one."""

    def __init__(self, common: Chances | None = None) -> None:
        self._common = common
        self._memory = COMMON_MEMORY if common is None else MEMORY
        chances = PRIORS if common is None else [common.of(kind) for kind in range(len(PRIORS))]
        self._made = [COMMON_PRIOR] * len(PRIORS) if common is None else [*WEIGHTS]
        self._right = [weight * chance for weight, chance in zip(self._made, chances, strict=True)]

    def of(self, kind: int) -> float:
        """Of the next one."""
        return self._right[kind] / self._made[kind]

    def note(self, kind: int, *, is_right: bool) -> None:
        """One came."""
        if self._made[kind] >= self._memory:
            self._made[kind] /= 2
            self._right[kind] /= 2
        self._made[kind] += 1
        self._right[kind] += is_right
        if self._common is not None:
            self._common.note(kind, is_right=is_right)


class Acceptance:
    """Of one sequence. common: of all."""

    def __init__(self, common: Chances | None = None) -> None:
        self._chances = Chances(Chances() if common is None else common)

    def chances(self, guess: Guess) -> list[float]:
        """For each token of the guess, how likely it is right together with all before it: never more than those."""
        chance, found = 1.0, []
        for kind in _kinds(guess):
            chance *= self._chances.of(kind)
            found.append(chance)
        return found

    def note(self, guess: Guess, token_ids: Sequence[int]) -> None:
        """These came where that was guessed."""
        for guessed, came, kind in zip(guess.token_ids, token_ids, _kinds(guess), strict=False):
            self._chances.note(kind, is_right=guessed == came)
            if guessed != came:
                break


def _kinds(guess: Guess) -> Iterator[int]:
    """Of each token of a guess."""
    for logprob in guess.logprobs:
        yield len(MATCHES) + min(int(NUM_LIKELIHOODS * math.exp(min(0.0, logprob))), NUM_LIKELIHOODS - 1)
    if guess.logprobs:
        return
    strength = int(guess.match * guess.share)
    for place in range(len(guess.token_ids)):
        yield min((strength + place).bit_length(), LAST)
