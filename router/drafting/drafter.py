"""What a text may go on with, guessed from what was said before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from router.drafting.earlier_answers import EarlierAnswers, Owner
from router.drafting.token_index import MOST_MATCH, TokenIndex

MOST_TOKENS = 1 << 16  # of a text that are looked at, the last ones: indexing as many takes 2 ms
BEGINNING = MOST_MATCH  # tokens of a prompt that are remembered with its answer: what was said before the answer began


class Guess(NamedTuple):
    """Tokens that may come next, and what speaks for them."""

    token_ids: tuple[int, ...] = ()
    match: int = 0  # how many of the text's last tokens were found where the guess comes from
    share: float = 1.0  # of the places where they were found, how many go on with the guess's first token


NOTHING = Guess()


class Drafter(Protocol):
    """Guesses of one sequence, whose history is its prompt and what came behind it."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """The text went on with these."""

    def guess(self, most: int) -> Guess:
        """What it may go on with next, at most so many tokens."""

    def end(self) -> None:
        """The text is complete."""


class NgramDrafter:
    """Goes on as the text did where its last tokens, as many as possible, occurred last."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._index = TokenIndex(token_ids[-MOST_TOKENS:])
        self._place = self._match = 0  # where the longest match ends, and how long it is
        self._is_known = False  # whether these are right

    @property
    def text(self) -> array[int]:
        """The tokens that are looked at."""
        return self._index.token_ids

    def extend(self, token_ids: Sequence[int]) -> None:
        """The text went on with these. What continues the longest match continues the then longest one."""
        tokens = self._index.token_ids
        start = len(tokens)
        self._index.extend(token_ids)
        if self._is_known and self._match:
            place = self._place
            for offset in range(len(token_ids)):
                if tokens[place + offset] != tokens[start + offset]:
                    self._is_known = False
                    break
            self._place += len(token_ids)
            self._match += len(token_ids)
        else:
            self._is_known = False
        if len(tokens) > 2 * MOST_TOKENS:
            self._index, self._is_known = TokenIndex(tokens[-MOST_TOKENS:]), False

    def guess(self, most: int) -> Guess:
        """What followed the match; where that reaches the end of the text, the period between goes on."""
        if not self._is_known:
            self._match, places = self._index.own_matches()
            self._place = places[0] if places else 0
            self._is_known = True
        if not self._match:
            return NOTHING
        behind = self._index.token_ids[self._place : self._place + most].tolist()
        while len(behind) < most:
            behind += behind[: most - len(behind)]
        return Guess(tuple(behind), min(self._match, MOST_MATCH))

    def end(self) -> None:
        """Nothing is kept."""


class SuffixDrafter:
    """Looks into earlier answers to the same owner too, where they match more of the text than itself does."""

    def __init__(self, token_ids: Sequence[int], answers: EarlierAnswers, owner: Owner) -> None:
        self._own = NgramDrafter(token_ids)
        self._answers = answers
        self._owner = owner
        self._said = array("i", token_ids[-BEGINNING:])  # what is remembered
        self._num_before = len(self._said)

    def extend(self, token_ids: Sequence[int]) -> None:
        """The text went on with these."""
        self._own.extend(token_ids)
        self._said.extend(token_ids)

    def guess(self, most: int) -> Guess:
        """The guess with the longer match."""
        own = self._own.guess(most)
        if own.match == MOST_MATCH:
            return own
        match, token_ids, share = self._answers.guess(self._owner, self._own.text, most, own.match + 1)
        return Guess(token_ids, match, share) if token_ids else own

    def end(self) -> None:
        """Remember the answer."""
        if len(self._said) > self._num_before:
            self._answers.add(self._owner, self._said)
