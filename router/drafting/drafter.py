"""What a text may go on with, guessed from what was said before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from router.drafting.earlier_answers import EarlierAnswers, Owner
from router.drafting.token_index import LEAST_MATCH, MOST_MATCH, TokenIndex

MOST_TOKENS = 1 << 16  # of a text that are looked at, the last ones: indexing as many takes 2 ms
LONG = 8  # tokens of a match behind which its place is remembered
SEARCHED = 64  # tokens behind that, of the place and of the text, where the match may go on
RESUMED = 2  # tokens that a match counts more where it goes on so: measured on edited files, it is as often right
BEGINNING = MOST_MATCH  # tokens of a prompt that are remembered with its answer: what was said before the answer began


class Guess(NamedTuple):
    """Tokens that may come next, and what speaks for them."""

    token_ids: tuple[int, ...] = ()
    match: int = 0  # how many of the text's last tokens were found where the guess comes from
    share: float = 1.0  # of the places where they were found, how many go on with the guess's first token
    logprobs: tuple[float, ...] = ()  # how likely a model finds each, where one proposes them


NOTHING = Guess()


class Drafter(Protocol):
    """Guesses of one sequence, whose history is its prompt and what came behind it."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """The text went on with these."""

    def guess(self, most: int) -> Guess:
        """What it may go on with next, at most so many tokens."""

    def end(self) -> None:
        """The text is complete."""


class Silent:
    """Guesses nothing."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """It does not matter."""

    def guess(self, most: int) -> Guess:
        """Nothing."""
        return NOTHING

    def end(self) -> None:
        """Nothing is kept."""


class NgramDrafter:
    """Goes on as the text did where its last tokens, as many as possible, occurred last.

    Where a long match was broken, places near to that are looked at first for a while: who repeats a text with changes
    comes back to it.
    """

    def __init__(self, text: Sequence[int] | TokenIndex) -> None:
        """text: its tokens, or these indexed, as `indexed` does it; the index then belongs to this drafter."""
        self._index = text if isinstance(text, TokenIndex) else indexed(text)
        self._is_known = False  # whether the longest match of the text as it is now was looked for
        self._place = self._match = 0  # where it ends, and how long it is
        self._broken_at = self._search_until = (
            0  # where a long one ended, and lengths of the text up to which it counts
        )
        self._is_resumed = False  # whether the match was found near to that

    @property
    def text(self) -> array[int]:
        """The tokens that are looked at."""
        return self._index.token_ids

    def extend(self, token_ids: Sequence[int]) -> None:
        """The text went on with these. What continues the longest match continues the then longest one."""
        start = len(self.text)
        self._index.extend(token_ids)
        if self._is_known and self._match:
            self._follow(start)
        else:
            self._is_known = False
        if len(self.text) > 2 * MOST_TOKENS:
            self._index, self._is_known, self._search_until = TokenIndex(self.text[-MOST_TOKENS:]), False, 0

    def _follow(self, start: int) -> None:
        """Move the match on over what came from `start` on."""
        text = self.text
        for place in range(start, len(text)):
            if text[self._place] != text[place]:
                self._is_known = False
                if self._match >= LONG:
                    self._broken_at, self._search_until = self._place, len(text) + SEARCHED
                break
            self._place += 1
            self._match += 1

    def _find(self) -> None:
        """Look for the longest match."""
        is_near = len(self.text) < self._search_until
        near = self._index.places_near(self._broken_at, LONG, SEARCHED) if is_near else []
        self._match, places = self._index.own_matches(near)
        self._place = places[0] if places else 0
        self._is_resumed = self._place in near
        self._is_known = True

    def guess(self, most: int) -> Guess:
        """What followed the match; where that reaches the end of the text, the period between goes on."""
        if not self._is_known:
            self._find()
        if not self._match:
            return NOTHING
        behind = self.text[self._place : self._place + most].tolist()
        while len(behind) < most:
            behind += behind[: most - len(behind)]
        return Guess(tuple(behind), self._match + RESUMED * self._is_resumed)

    def end(self) -> None:
        """Nothing is kept."""


class SuffixDrafter:
    """Looks into earlier answers to the same owner too, where they match more of the text than itself does."""

    def __init__(self, text: Sequence[int] | TokenIndex, answers: EarlierAnswers, owner: Owner) -> None:
        self._own = NgramDrafter(text)
        self._answers = answers
        self._owner = owner
        self._said = self._own.text[-BEGINNING:]  # what is remembered
        self._num_before = len(self._said)

    def extend(self, token_ids: Sequence[int]) -> None:
        """The text went on with these."""
        self._own.extend(token_ids)
        self._said.extend(token_ids)

    def guess(self, most: int) -> Guess:
        """The guess with the longer match."""
        own = self._own.guess(most)
        if own.match >= LONG:
            return own
        match, token_ids, share = self._answers.guess(
            self._owner, self._own.text, most, max(LEAST_MATCH, own.match + 1)
        )
        return Guess(token_ids, match, share) if token_ids else own

    def end(self) -> None:
        """Remember the answer."""
        if len(self._said) > self._num_before:
            self._answers.add(self._owner, self._said)


def indexed(token_ids: Sequence[int]) -> TokenIndex:
    """The last MOST_TOKENS of a text."""
    return TokenIndex(token_ids[-MOST_TOKENS:])
