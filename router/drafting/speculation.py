"""How many guesses each sequence of a step gets: as many as make tokens come quickest.

A guess costs a row of the step, which all its sequences wait for, and gains a token if it and those before it are
right. As a step's time depends on the rows of all alone, the likeliest guesses are the best of any number, and the best
number is found by looking at each. What has been promised is then compared with what came: each sequence has an
account, and a draft may lose no more than keeps that out of debt.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import islice
from typing import NamedTuple

from router.drafting.acceptance import Acceptance
from router.drafting.drafter import NOTHING, Drafter, Guess, NgramDrafter, SuffixDrafter
from router.drafting.earlier_answers import EarlierAnswers
from router.drafting.step_costs import StepCosts

MARGIN = 1.05  # how many times the tokens per second of a plain step drafts must promise
MOST_DEBT = 0.01  # share of a sequence's time that its drafts may have lost
FIRST_DEBT = 1.5  # plain steps that they may have lost beyond that: one to sit out, and half of one
LEAST_PROMISE = 0.5  # tokens that a first draft promises: to begin, a sequence sits out a step or a part of one


class Account:
    """What the drafts of a sequence have gained, in seconds: what tokens came earlier, less what steps took longer."""

    def __init__(self) -> None:
        self.balance = 0.0
        self._seconds = 0.0  # that its tokens would have taken without drafts

    def decoded(self, num_tokens: int, plain_seconds: float) -> None:
        """So many tokens came, each of which would have taken a plain step."""
        self._seconds += num_tokens * plain_seconds

    def room(self, plain_seconds: float) -> float:
        """Seconds that its next draft may lose."""
        return self.balance + MOST_DEBT * self._seconds + FIRST_DEBT * plain_seconds


class Drafting:
    """What is known of one sequence: its drafter, how often that is right, and what it gained."""

    def __init__(self, drafter: Drafter, most: int) -> None:
        """most: guesses in a step, at most."""
        self.account = Account()
        self._drafter = drafter
        self._acceptance = Acceptance()
        self.most = most
        self._guess: Guess | None = None  # of what comes next …
        self._num_asked = 0  # … for which so many tokens were asked

    def came(self, token_ids: Sequence[int]) -> None:
        """The text went on with these, by whatever step."""
        guess = self._drafter.guess(1) if self._guess is None else self._guess
        self._acceptance.note(guess, token_ids)
        self._drafter.extend(token_ids)
        self._guess = None

    def guess(self, most: int) -> Guess:
        """What may come next, at most so many tokens: the same, but for their number, until something has come."""
        if self._guess is None or most > self._num_asked:
            self._guess, self._num_asked = self._drafter.guess(most), most
        return self._guess if most == self._num_asked else self._guess._replace(token_ids=self._guess.token_ids[:most])

    def chances(self, guess: Guess) -> list[float]:
        """For each of these guesses, how likely it is right together with all before it."""
        return self._acceptance.chances(guess)

    def end(self) -> None:
        """The text is complete: later ones of its owner may be guessed from it."""
        self._drafter.end()


class Candidate(NamedTuple):
    """A sequence that could have a draft in the next step."""

    drafting: Drafting
    most: int  # tokens that a draft may have: what its length, blocks and rings leave
    is_under_way: bool = False  # whether its latest token has not come yet, so that it would have to wait for it


class Verified(NamedTuple):
    """A sequence that had a draft, maybe without guesses, in a step that is over."""

    drafting: Drafting
    num_guesses: int
    num_right: int


class Speculation:
    """Drafts of all sequences of a scheduler."""

    def __init__(self, most: int, *, finds_answers: bool = True, most_seconds: float | None = None) -> None:
        """most: guesses of a sequence in a step at most. finds_answers: whether guesses come from earlier answers too.

        most_seconds: that a step with drafts may take.
        """
        self.costs = StepCosts()
        self._most = most
        self._answers = EarlierAnswers() if finds_answers else None
        self._most_seconds = math.inf if most_seconds is None else most_seconds

    def begin(
        self, token_ids: Sequence[int], owner: str = "", cache_salt: str = "", most: int | None = None
    ) -> Drafting:
        """Of a sequence with this prompt. most: guesses in a step, where its request wants fewer."""
        drafter: Drafter = NgramDrafter(token_ids)
        if self._answers is not None:
            drafter = SuffixDrafter(token_ids, self._answers, (owner, cache_salt))
        return Drafting(drafter, self._most if most is None else min(most, self._most))

    def choose(self, candidates: Sequence[Candidate], others: int) -> list[tuple[int, ...]]:
        """The guesses that each of these gets in a step in which so many others decode.

        Of one whose latest token is under way, what it might get: if it is anything, the sequence should wait for it.
        These are asked about apart from those that could have a draft at once.
        """
        num, batch = len(candidates), others + len(candidates)
        guesses = [_promising(candidate) for candidate in candidates]
        plain = self.costs.plain(batch) if any(chances for _, chances in guesses) else math.inf
        if math.isinf(plain):
            return [()] * num
        # What each loses if all of them have one guess, two, and so on, and none is right.
        times = islice(self.costs.drafted(batch), num - 1, num * self._most, num)
        losses = [batch * (seconds - plain) / num for seconds in times]
        for (drafting, _, is_under_way), (_, chances) in zip(candidates, guesses, strict=True):
            del chances[bisect_right(losses, drafting.account.room(plain) - is_under_way * plain) :]
        nums = allot([chances for _, chances in guesses], others, self.costs, self._most_seconds)
        return [token_ids[:num] for (token_ids, _), num in zip(guesses, nums, strict=True)]

    def stepped(
        self,
        plain: Collection[Drafting],
        verified: Collection[Verified],
        others: int,
        seconds: float | None,
        held: Collection[Drafting] = (),
    ) -> None:
        """A step is over: those that decoded plainly in it, those that had drafts, and how many have no `Drafting`.

        seconds: what it took, from when it could begin, or with drafts from its sending; None if it had prompts too.
        held: those that sat it out to wait for their latest token.
        """
        batch, num_guesses = len(plain) + len(verified) + others, sum(num for _, num, _ in verified)
        if seconds is not None and batch:
            self.costs.note(batch + num_guesses, seconds, has_drafts=bool(verified))
        plain_seconds = self.costs.plain(batch)
        if math.isinf(plain_seconds):
            return
        for drafting in plain:
            drafting.account.decoded(1, plain_seconds)
        for drafting in held:
            drafting.account.balance -= plain_seconds
        if not verified:
            return
        if seconds is None:
            seconds = next(islice(self.costs.drafted(batch), num_guesses - 1, None)) if num_guesses else plain_seconds
        # All sequences of the step have waited; the drafts share that by their rows.
        lost = batch * (seconds - plain_seconds) / (len(verified) + num_guesses)
        for drafting, num, num_right in verified:
            drafting.account.decoded(1 + num_right, plain_seconds)
            drafting.account.balance += num_right * plain_seconds - (1 + num) * lost


def _promising(candidate: Candidate) -> tuple[tuple[int, ...], list[float]]:
    """The guesses of a draft that it could have, and their chances; none if they promise too little to begin for."""
    drafting, most, is_under_way = candidate
    most = min(most, drafting.most)
    guess = drafting.guess(most + is_under_way) if most > 0 else NOTHING
    chances = drafting.chances(guess)[is_under_way:]
    if is_under_way and sum(chances) < LEAST_PROMISE:
        return (), []
    return guess.token_ids[is_under_way:], chances


def allot(
    chances: Sequence[Sequence[float]], others: int, costs: StepCosts, most_seconds: float = math.inf
) -> list[int]:
    """How many guesses each sequence gets, where each has these chances that a guess and all before it are right."""
    batch = others + len(chances)
    found = [0] * len(chances)
    ranked = sorted(((chance, place) for place, row in enumerate(chances) for chance in row), reverse=True)
    plain = costs.plain(batch) if ranked else math.inf
    if math.isinf(plain):
        return found
    tokens, most_rate, best = float(batch), MARGIN * batch / plain, 0
    for num, ((chance, _), seconds) in enumerate(zip(ranked, costs.drafted(batch), strict=False), 1):
        if seconds > most_seconds:
            break
        tokens += chance
        if tokens / seconds > most_rate:
            most_rate, best = tokens / seconds, num
    for _, place in ranked[:best]:
        found[place] += 1
    return found
