"""How many guesses each sequence of a step gets, and a model is asked for: as many as make tokens come quickest.

A guess costs a row of the step, which all its sequences wait for, and gains a token if it and those before it are
right. As a step's time depends on the rows of all alone, the likeliest guesses are the best of any number, and the best
number is found by looking at each. What has been promised is then compared with what came: each sequence of a step has
an account, whether it has guesses or only waits for those of others, and a step takes no longer than all can pay for.

What a model proposes takes time before it is known how likely it is. So it is asked where that has paid, by how often
its tokens were right at each place; and now and then where it is not known whether it would.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import islice
from typing import NamedTuple

from router.drafting.acceptance import Acceptance, Chances
from router.drafting.accounts import Account, Loans
from router.drafting.drafter import NOTHING, Drafter, Guess, NgramDrafter, Silent, SuffixDrafter, indexed
from router.drafting.earlier_answers import EarlierAnswers
from router.drafting.proposals import Asked, Places, Proposal, ProposeCosts, Skill
from router.drafting.step_costs import CREDIT, StepCosts
from router.drafting.token_index import TokenIndex

MARGIN = 1.05  # how many times the tokens per second of a plain step drafts must promise
LEAST_PROMISE = 1.1  # tokens that a first draft promises: to begin, a sequence sits out a step
TRIALS = 4.0  # plain steps that trying proposals may cost since the start …
TRIAL_SHARE = 0.002  # … and share of the time since then
FIRST_PROPOSALS = 2  # tokens that are asked for while it is not known what that takes …
FIRST_SECONDS = 0.5  # … and plain steps that this is expected to take
DEEP = 0.5  # plain steps beyond its room that a sequence may lose, beside others, whose draft should gain some
LOOKED_AGAIN = 16  # steps for which it holds that no guesses could pay


class Known:
    """What is known of the guesses of all sequences, with which each begins."""

    def __init__(self) -> None:
        self.loans = Loans()
        self.chances = Chances()
        self.places = Places()


class Drafting:
    """What is known of one sequence: its drafter, what a model proposes, how often these are right, and its account."""

    def __init__(self, drafter: Drafter, most: int, known: Known | None = None) -> None:
        """most: guesses in a step, at most."""
        known = Known() if known is None else known
        self.account = Account(known.loans)
        self.most = most
        self._drafter = drafter
        self._acceptance = Acceptance(known.chances)
        self._skill = Skill(known.places)
        self._proposal = Proposal()
        self._is_proposed: bool | None = None  # whether that is guessed; None: nobody has asked yet
        self._guess: Guess | None = None  # of what comes next, from the text …
        self._num_asked = 0  # … for which so many tokens were asked

    def came(self, token_ids: Sequence[int]) -> None:
        """The text went on with these, by whatever step."""
        guess = self._drafter.guess(1) if self._guess is None else self._guess
        self._acceptance.note(guess, token_ids)
        self._drafter.extend(token_ids)
        self._guess = self._is_proposed = None
        if self._proposal.token_ids:
            self._acceptance.note(_guess_of(self._proposal, len(token_ids)), token_ids)
            self._proposal = self._skill.compare(self._proposal, token_ids)

    def propose(self, proposal: Proposal) -> None:
        """A model proposes this behind the text as it is now."""
        self._proposal, self._is_proposed = proposal, None

    def guess(self, most: int) -> Guess:
        """What may come next, at most so many tokens: of what the text says and what is proposed, the likelier.

        Until something comes, fewer tokens are the first of more: a grammar's masks are those behind what was guessed.
        """
        text = self._text_guess(most)
        if not self._proposal.token_ids:
            return text
        proposed = _guess_of(self._proposal, most)
        if self._is_proposed is None:
            self._is_proposed = sum(self.chances(proposed)) >= sum(self.chances(text))
        return proposed if self._is_proposed else text

    def _text_guess(self, most: int) -> Guess:
        """The same, but for its number, until something has come."""
        if self._guess is None or most > self._num_asked:
            self._guess, self._num_asked = self._drafter.guess(most), most
        return self._guess if most == self._num_asked else self._guess._replace(token_ids=self._guess.token_ids[:most])

    def chances(self, guess: Guess) -> list[float]:
        """For each of these guesses, how likely it is right together with all before it."""
        return self._acceptance.chances(guess)

    def text_promises(self, most: int) -> float:
        """How many of so many guesses from the text are right, as it is expected."""
        return sum(self.chances(self._text_guess(most)))

    def proposals_promise(self, most: int) -> list[float]:
        """How many of one proposal, of two, and so on, are right, as it is expected."""
        return self._skill.promise(most)

    def end(self) -> None:
        """The text is complete: later ones of its owner may be guessed from it."""
        self._drafter.end()


def _guess_of(proposal: Proposal, most: int) -> Guess:
    return Guess(proposal.token_ids[:most], logprobs=proposal.logprobs[:most])


class Candidate(NamedTuple):
    """A sequence that could have a draft in the next step, or be proposed for in it."""

    drafting: Drafting
    most: int  # tokens that a draft may have: what its length, blocks and rings leave
    is_under_way: bool = False  # whether its latest token has not come yet, so that it would have to wait for it


class Verified(NamedTuple):
    """A sequence that had a draft, maybe without guesses, in a step that is over."""

    drafting: Drafting
    num_guesses: int
    num_right: int


class Asking(NamedTuple):
    """What a step asks a model for."""

    most: int = 0  # tokens for each; 0: nothing
    places: Sequence[int] = ()  # of the candidates, for which


class Speculation:
    """Of all sequences that run on the same shards."""

    def __init__(
        self,
        most: int,
        *,
        finds_answers: bool = True,
        reads_texts: bool = True,
        most_proposals: int = 0,
        most_seconds: float | None = None,
        row_seconds: float = math.inf,
    ) -> None:
        """most: guesses of a sequence in a step; most_proposals: of those, from a model; most_seconds: of a step.

        finds_answers: whether earlier answers are looked into; reads_texts: whether any text is. row_seconds: what a
        guess adds to a step at most, as far as is known.
        """
        self.costs = StepCosts(row_seconds)
        self.propose_costs = ProposeCosts()
        self.most_proposals = most_proposals
        self._most = most
        self._known = Known()
        self._answers = EarlierAnswers() if finds_answers else None
        self._reads_texts = reads_texts
        self._most_seconds = math.inf if most_seconds is None else most_seconds
        self._indexed: tuple[Sequence[int], TokenIndex] | None = None  # the latest prompt: samples share it
        self._hopeless: dict[int, int] = {}  # by batch: until which step no guesses could pay
        self._trial_room = 0.0  # seconds that trying proposals may still cost, beyond TRIALS

    def begin(
        self, token_ids: Sequence[int], owner: str = "", cache_salt: str = "", most: int | None = None
    ) -> Drafting:
        """Of a sequence with this prompt, which stays as it is. most: guesses in a step, if a request wants fewer."""
        most = self._most if most is None else min(most, self._most)
        return Drafting(self._drafter(token_ids, (owner, cache_salt)) if most else Silent(), most, self._known)

    def _drafter(self, token_ids: Sequence[int], owner: tuple[str, str]) -> Drafter:
        if not self._reads_texts:
            return Silent()
        if self._indexed is None or self._indexed[0] is not token_ids:
            self._indexed = token_ids, indexed(token_ids)
        index = self._indexed[1].copy()
        return NgramDrafter(index) if self._answers is None else SuffixDrafter(index, self._answers, owner)

    def may_pay(self, batch: int) -> bool:
        """Whether any number of guesses could pay in a step of so many sequences, if all were right."""
        if self._hopeless.get(batch, 0) > self.costs.num_steps:
            return False
        plain = self.costs.plain(batch)
        least = MARGIN * batch / plain  # tokens per second
        times = enumerate(islice(self.costs.drafted(batch), batch * self._most), batch + 1)
        if math.isinf(plain) or any(tokens > least * seconds for tokens, seconds in times):
            return True
        self._hopeless[batch] = self.costs.num_steps + LOOKED_AGAIN
        return False

    def choose(
        self, candidates: Sequence[Candidate], others: Sequence[Drafting | None], prompt_tokens: int = 0
    ) -> list[tuple[int, ...]]:
        """The guesses that each of these gets in a step in which these others decode, and so much of prompts is read.

        Of one whose latest token is under way, what it might get: if it is anything, the sequence should wait for it.
        These are asked about apart from those that could have a draft at once.
        """
        num, batch = len(candidates), len(others) + len(candidates)
        guesses = [_promising(candidate) for candidate in candidates]
        plain = self.costs.plain(batch) if any(chances for _, chances in guesses) else math.inf
        if math.isinf(plain):
            return [()] * num
        waited = plain if any(candidate.is_under_way for candidate in candidates) else 0.0
        most_seconds = self._most_seconds - waited - self.costs.prompts(prompt_tokens)
        nums = self._affordable(candidates, [chances for _, chances in guesses], others, plain, most_seconds)
        return [token_ids[:num] for (token_ids, _), num in zip(guesses, nums, strict=True)]

    def _affordable(
        self,
        candidates: Sequence[Candidate],
        chances: list[list[float]],
        others: Sequence[Drafting | None],
        plain: float,
        most_seconds: float,
    ) -> list[int]:
        """How many guesses each gets, so that who has none, or too few to gain by them, can wait for those of others.

        `chances` of those that could lose more than they may are emptied.
        """
        batch = len(candidates) + len(others)
        accounts = [one.drafting.account for one in candidates]
        rooms = [
            account.room(plain) - one.is_under_way * plain for account, one in zip(accounts, candidates, strict=True)
        ]
        patience = [account.patience(plain) for account in accounts]
        least = min((one.account.patience(plain) for one in others if one is not None), default=math.inf)

        def nums_of(most: int, most_extra: float) -> list[int]:
            cut = [row[:most] for row in chances]
            return allot(cut, len(others), self.costs, min(most_seconds, plain + most_extra))

        most = max(map(len, chances))
        while most:
            nums = nums_of(most, least)
            if not (total := sum(nums)):
                return nums
            extra = next(islice(self.costs.drafted(batch), total - 1, None)) - plain
            gains = [sum(row[:num]) * plain for row, num in zip(chances, nums, strict=True)]
            least_rooms = [
                -DEEP * plain if gain >= extra and num < total else extra * num / total
                for gain, num in zip(gains, nums, strict=True)
            ]
            poor = [place for place, num in enumerate(nums) if num and rooms[place] < least_rooms[place]]
            for place in poor:
                chances[place].clear()
            if not poor and all(max(pair) >= extra for pair in zip(gains, patience, strict=True)):
                return nums
            most = most if poor else most // 2
        return nums_of(self._most, min(least, *patience))

    def ask(self, candidates: Sequence[Candidate], *, may_try: bool = True) -> Asking:
        """How many tokens to have proposed, and for whom, in a step in which these get tokens, and no others.

        may_try: whether also to find out whether that pays; a step with prompts tells little.
        """
        batch = len(candidates)
        plain = self.costs.plain(batch)
        if math.isinf(plain):
            return Asking()
        ranked = sorted(
            ((promise, place) for place, one in enumerate(candidates) if (promise := self._promise(one, plain))),
            key=lambda row: row[0][0],
            reverse=True,
        )
        if not ranked:
            return Asking()
        accounts = [one.drafting.account for one in candidates]
        patience = [account.patience(plain) for account in accounts]
        found, most_rate = Asking(), MARGIN * batch / plain
        times = [plain, *islice(self.costs.drafted(batch), len(ranked) * self.most_proposals)]
        for most in range(1, self.most_proposals + 1):
            rows, tokens, gains = 0, float(batch), [0.0] * batch
            for num, (promise, place) in enumerate(ranked, 1):
                rows += min(most, len(promise))
                gains[place] = promise[min(most, len(promise)) - 1]
                tokens += gains[place]
                if num & num - 1 and num < len(ranked):
                    continue  # some numbers are enough
                seconds = times[rows] + self.propose_costs.seconds(num, most)
                if seconds > self._most_seconds or tokens <= most_rate * seconds:
                    continue
                extra = seconds - plain
                if all(gain * plain >= extra or one >= extra for gain, one in zip(gains, patience, strict=True)):
                    found, most_rate = Asking(most, [place for _, place in ranked[:num]]), tokens / seconds
        if found.most or not may_try:
            return found
        return self._trial(plain, patience, [place for _, place in ranked])

    def _promise(self, candidate: Candidate, plain: float) -> list[float]:
        """How many of its proposals would be right; none where it cannot have any, or its text says more."""
        drafting = candidate.drafting
        if drafting.account.room(plain) < -DEEP * plain:
            return []
        most = min(candidate.most, drafting.most, self.most_proposals)
        promise = drafting.proposals_promise(most) if most > 0 else []
        return promise if promise and promise[-1] > drafting.text_promises(most) else []

    def _trial(self, plain: float, patience: Sequence[float], places: Sequence[int]) -> Asking:
        """Ask, to find out what it takes and is worth, where that may be lost."""
        most = self.most_proposals
        if not self.propose_costs.is_sure(len(places)):
            most = min(most, FIRST_PROPOSALS)
        seconds = self._expected(len(places), most, plain)
        asked = set(places)
        room = min((one for place, one in enumerate(patience) if place not in asked), default=math.inf)
        if seconds > min(room, TRIALS * plain + self._trial_room, self._most_seconds - plain):
            return Asking()
        self._trial_room -= seconds
        return Asking(most, places)

    def _expected(self, sequences: int, most: int, plain: float) -> float:
        """What proposing takes, as far as is known: the first answers may have been interrupted."""
        seconds = self.propose_costs.seconds(sequences, most)
        return seconds if self.propose_costs.is_sure(sequences) else min(seconds, FIRST_SECONDS * plain)

    def stepped(
        self,
        plain: Collection[Drafting],
        verified: Collection[Verified],
        others: int,
        seconds: float | None,
        held: Collection[Drafting] = (),
        asked: Asked | None = None,
    ) -> None:
        """A step is over: those that decoded plainly in it, those that had drafts, and how many have no `Drafting`.

        seconds: what it took, from when it could begin, or with drafts from its sending; None if it had prompts too.
        held: those that sat it out to wait for their latest token. asked: for proposals, whose time is part of it.
        """
        batch, num_guesses = len(plain) + len(verified) + others, sum(num for _, num, _ in verified)
        known = self._known_seconds(batch, num_guesses) if batch else math.inf
        if seconds is not None and asked is not None:
            seconds = max(0.0, seconds - asked.seconds)
        if seconds and batch:
            self.costs.note(batch + num_guesses, seconds, has_drafts=bool(verified))
        plain_seconds = self.costs.plain(batch) if batch else math.inf
        if math.isinf(plain_seconds):
            return
        extra = 0.0
        if verified or asked is not None:
            # Guesses are no reason for an interruption.
            extra = max(0.0, (known if seconds is None else min(seconds, CREDIT * known)) - plain_seconds)
        if asked is not None:
            extra += self._proposing(asked, plain_seconds, is_pure=seconds is not None)
        self._trial_room += TRIAL_SHARE * plain_seconds
        for drafting in plain:
            drafting.account.decoded(1, plain_seconds, extra, drafts=False)
        for drafting, num, num_right in verified:
            drafting.account.decoded(1 + num_right, plain_seconds, extra, drafts=num > 0)
        for drafting in held:
            drafting.account.waited(plain_seconds)

    def _known_seconds(self, batch: int, num_guesses: int) -> float:
        """Of a step with so many guesses, before it is measured."""
        if not num_guesses:
            return self.costs.plain(batch)
        return next(islice(self.costs.drafted(batch), num_guesses - 1, None))

    def _proposing(self, asked: Asked, plain: float, *, is_pure: bool) -> float:
        """What proposals took for which there is a reason. is_pure: behind prompts a model has more to follow."""
        num = max(1, asked.num_answered)
        expected = self._expected(num, asked.most, plain)
        if is_pure and asked.num_answered:
            self.propose_costs.note(num, asked.most, asked.seconds)
        return min(asked.seconds, CREDIT * expected)


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
