"""How often the guesses of a sequence are right, by how much of the text they match.

A match that goes on is a longer one: the chance of each further guess, where those before it are right, is that of a
match as much longer. What is learnt costs nothing, since guesses that were never sent are compared with what came too.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.drafting.drafter import Guess

# Chances for matches below 1, 2, 4, 8, 16, 32 tokens and for longer ones, before anything is known.
PRIORS = (0.05, 0.15, 0.35, 0.55, 0.65, 0.8, 0.95)
LAST = len(PRIORS) - 1
PRIOR = 2.0  # guesses that such a chance counts as
MEMORY = 32.0  # guesses that count: with as many, each counts half


class Acceptance:
    """Of one sequence."""

    def __init__(self) -> None:
        self._right = [PRIOR * chance for chance in PRIORS]
        self._made = [PRIOR] * len(PRIORS)

    def chances(self, guess: Guess) -> list[float]:
        """For each token of the guess, how likely it is right together with all before it: never more than those."""
        chance, found = 1.0, []
        strength = _strength(guess)
        for place in range(len(guess.token_ids)):
            kind = min((strength + place).bit_length(), LAST)
            chance *= self._right[kind] / self._made[kind]
            found.append(chance)
        return found

    def note(self, guess: Guess, token_ids: Sequence[int]) -> None:
        """These came where that was guessed."""
        right, made, strength = self._right, self._made, _strength(guess)
        for guessed, came in zip(guess.token_ids, token_ids, strict=False):
            kind = min(strength.bit_length(), LAST)
            strength += 1
            if made[kind] >= MEMORY:
                made[kind] /= 2
                right[kind] /= 2
            made[kind] += 1
            if guessed != came:
                break
            right[kind] += 1


def _strength(guess: Guess) -> int:
    return int(guess.match * guess.share)
