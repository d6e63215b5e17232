"""How many guesses a step gets, and what texts that cannot be guessed lose."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from router.drafting.acceptance import Acceptance
from router.drafting.accounts import MOST_DEBT
from router.drafting.drafter import Drafter, Guess, NgramDrafter
from router.drafting.proposals import Asked, Proposal
from router.drafting.speculation import Candidate, Drafting, Known, Speculation, Verified, allot
from router.drafting.step_costs import CREDIT, FEW, FRESH, StepCosts
from tests.running import ROOT

MOST = 8
Cost = Callable[[int], float]  # rows -> seconds


def cpu(rows: int) -> float:
    return 0.055 + 0.0018 * rows


def arithmetic(rows: int) -> float:
    return 0.002 + 0.01 * rows


def learnt(plain: dict[int, float], drafted: dict[int, float], row_seconds: float = 0.005) -> StepCosts:
    costs = StepCosts()
    costs.note_prompts(100, 100 * row_seconds)
    for rows, seconds in plain.items():
        costs.note(rows, seconds, has_drafts=False)
    for rows, seconds in drafted.items():
        costs.note(rows, seconds, has_drafts=True)
    return costs


SECONDS = st.floats(0.001, 0.1)
CHANCES = st.lists(st.floats(0.05, 1), max_size=3).map(lambda row: list(itertools.accumulate(row, lambda a, b: a * b)))


@given(
    st.lists(CHANCES, min_size=1, max_size=3),
    st.integers(0, 4),
    st.dictionaries(st.integers(1, 12), SECONDS, min_size=1),
    st.dictionaries(st.integers(1, 12), SECONDS),
    st.sampled_from([math.inf, 0.05]),
)
def test_no_other_division_makes_tokens_come_quicker(
    chances: list[list[float]], others: int, plain: dict[int, float], drafted: dict[int, float], most: float
) -> None:
    costs, batch = learnt(plain, drafted), others + len(chances)
    times = [costs.plain(batch), *itertools.islice(costs.drafted(batch), 9)]
    assert times == pytest.approx(sorted(times))

    def rate(nums: Sequence[int]) -> float:
        seconds = times[sum(nums)]
        tokens = batch + sum(sum(row[:num]) for row, num in zip(chances, nums, strict=True))
        return tokens / seconds if seconds <= most or not sum(nums) else 0.0

    found = allot(chances, others, costs, most)
    best = max(itertools.product(*(range(len(row) + 1) for row in chances)), key=rate)
    if any(found):
        assert rate(found) == pytest.approx(rate(best))
        assert rate(found) > 1.049 * rate([0] * len(chances))
    else:
        assert rate(best) <= 1.051 * rate(found)


def test_a_row_costs_what_was_measured_or_a_prompts_token() -> None:
    costs = learnt({4: 0.04}, {8: 0.05})
    assert [0.0425, 0.045, 0.0475, 0.05, 0.055, 0.06] == pytest.approx([*itertools.islice(costs.drafted(4), 6)])
    assert 0.04 == costs.plain(1) == costs.plain(4)
    assert math.inf == StepCosts().plain(1)
    assert [0] == allot([[1.0]], 0, StepCosts())


def test_interrupted_steps_hardly_count_and_old_ones_not_at_all() -> None:
    costs = learnt({}, {})
    for _ in range(FEW):
        costs.note(4, 0.02, has_drafts=True)
    costs.note(8, 9.0, has_drafts=True)
    for _ in range(FRESH // FEW):
        costs.note(1, 0.01, has_drafts=False)
    costs.note(1, 10.0, has_drafts=False)
    assert 0.01 < costs.plain(1) <= 0.01 * (1 + CREDIT / 16)
    with_three, with_seven = (next(itertools.islice(costs.drafted(1), num - 1, None)) for num in (3, 7))
    assert 0.02 == with_three
    assert 0.02 + 4 * 0.005 == pytest.approx(with_seven)
    for _ in range(FRESH):
        costs.note(1, 0.01, has_drafts=False)
    assert 0.01 + 3 * 0.005 == pytest.approx(next(itertools.islice(costs.drafted(1), 2, None)))


def test_acceptance_follows_what_comes_for_matches_of_each_length() -> None:
    acceptance, short, long = Acceptance(), Guess((1, 2), 2), Guess((1, 2), 40)
    for _ in range(6):
        acceptance.note(short, [3])
        acceptance.note(long, [1, 2])
    assert acceptance.chances(short)[0] < 0.1
    assert 0.9 < acceptance.chances(long)[1] < acceptance.chances(long)[0] < 1
    for _ in range(20):
        acceptance.note(long, [3])
    assert acceptance.chances(long)[0] < 0.4
    assert acceptance.chances(Guess((1, 2), 40, share=0.05)) == acceptance.chances(short)


class Wrong:
    """Is right while the text decodes plainly, and wrong as soon as a draft is made of it: the account alone helps."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """It does not matter."""

    def guess(self, most: int) -> Guess:
        return Guess((int(most == MOST),) * most, 40)

    def end(self) -> None:
        """Nothing is kept."""


def seconds_for(texts: list[list[int]], drafters: list[Drafter], cost: Cost, delay: float = 0.0) -> float:
    """What the texts take together, two steps under way where they decode plainly, one where they are drafted."""
    speculation, batch = Speculation(MOST), range(len(texts))
    speculation.costs.note_prompts(100, 100 * (cost(2) - cost(1)))
    known = Known()
    drafts = [Drafting(drafter, MOST, known) for drafter in drafters]
    done, state, total = [0] * len(texts), ["plain"] * len(texts), 0.0
    while live := [one for one in batch if done[one] < len(texts[one])]:
        ready, plain, held = ([o for o in live if state[o] == name] for name in ("ready", "plain", "held"))
        guesses = speculation.choose(
            [Candidate(drafts[o], len(texts[o]) - done[o] - 1) for o in ready], [drafts[o] for o in plain]
        )
        came = {one: texts[one][done[one] : done[one] + 1] for one in plain}
        verified = []
        for one, guess in zip(ready, guesses, strict=True):
            text = texts[one][done[one] :]
            right = next((n for n, id in enumerate(guess) if id != text[n]), len(guess))
            came[one] = text[: right + 1]
            verified.append(Verified(drafts[one], len(guess), right))
            state[one] = "ready" if guess else "plain"
        if came:
            rows = len(came) + sum(map(len, guesses))
            seconds = cost(rows) + (delay if ready else 0.0)
            total += seconds
            speculation.stepped([drafts[o] for o in plain], verified, 0, seconds, [drafts[o] for o in held])
        for one in held:
            state[one] = "ready"
        for one, ids in came.items():
            drafts[one].came(ids)
            done[one] += len(ids)
        if any(guesses):  # nothing is planned behind such a step
            for one in plain:
                state[one] = "ready"
            continue
        waiting = [Candidate(drafts[o], len(texts[o]) - done[o] - 2, True) for o in plain]
        for one, guess in zip(plain, speculation.choose(waiting, [drafts[o] for o in ready]), strict=True):
            state[one] = "held" if guess else "plain"
    return total


@pytest.mark.parametrize("cost", [cpu, arithmetic])
@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("delay", [0.0, 0.005])
def test_texts_that_are_always_guessed_wrongly_take_two_percent_longer_at_most(
    cost: Cost, batch: int, delay: float
) -> None:
    texts = [[0] * 400 for _ in range(batch)]
    assert seconds_for(texts, [Wrong() for _ in texts], cost, delay) <= 1.02 * 400 * cost(batch)


@pytest.mark.parametrize("cost", [cpu, arithmetic])
@pytest.mark.parametrize("batch", [1, 8])
def test_texts_with_nothing_to_repeat_take_as_long_as_ever(cost: Cost, batch: int) -> None:
    random = Random(5)
    texts = [[random.randrange(60) for _ in range(400)] for _ in range(batch)]
    drafters: list[Drafter] = [NgramDrafter([random.randrange(60) for _ in range(1000)]) for _ in texts]
    assert seconds_for(texts, drafters, cost) <= 1.01 * 400 * cost(batch)


def test_drafts_beside_prompts_are_paid_for_by_what_is_known() -> None:
    """The time of such a step says nothing of its rows."""
    speculation, drafting = Speculation(MOST), Drafting(NgramDrafter([]), MOST)
    speculation.costs = learnt({1: 0.01}, {}, row_seconds=0.002)
    before = speculation.costs.plain(1)
    speculation.stepped([], [Verified(drafting, 4, 1)], 0, None)
    assert before == speculation.costs.plain(1)
    assert 1 * 0.01 - 4 * 0.002 == pytest.approx(drafting.account.room(0.0) - 2 * 0.01 * MOST_DEBT)


def test_no_step_with_drafts_takes_longer_than_it_may() -> None:
    for most_seconds, most in ((None, 8), (0.0645, 4), (0.001, 0)):
        speculation = Speculation(MOST, most_seconds=most_seconds)
        speculation.costs = learnt({1: cpu(1)}, {}, row_seconds=0.0018)
        drafting = speculation.begin([1, 2, 3] * 20)
        assert [most] == [len(ids) for ids in speculation.choose([Candidate(drafting, 100)], [])]
        assert [()] == speculation.choose([Candidate(drafting, 0)], [])


def test_a_request_may_want_fewer_guesses_and_a_key_its_answers_alone() -> None:
    speculation = Speculation(MOST)
    speculation.costs = learnt({1: cpu(1)}, {}, row_seconds=0.0018)
    first = speculation.begin([1, 2, 3], "key", "salt")
    first.came([*range(10, 60)])
    first.end()
    lengths = []
    for owner, salt, most in (("key", "salt", None), ("key", "salt", 2), ("key", "salt", 0), ("key", "", 8)):
        later = speculation.begin([1, 2, 3], owner, salt, most)
        later.came([*range(10, 42)])
        lengths += [len(ids) for ids in speculation.choose([Candidate(later, 100)], [])]
    assert [8, 2, 0, 0] == lengths


def edited(text: str, random: Random) -> str:
    """The text with one line in twelve changed, left out, or said twice."""
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        change = random.randrange(36)
        lines += [line.replace("self", "this").replace("a", "e", 2)] if change == 0 else [line] * (change != 1)
        lines += [line] * (change == 2)
    return "".join(lines)


@pytest.mark.parametrize(("batch", "least"), [(1, 3.5), (8, 1.5)])
def test_files_that_are_repeated_with_changes_come_much_quicker(batch: int, least: float) -> None:
    tokenizer = Tokenizer.from_file(str(ROOT / "server/demo/tokenizer.json"))
    random, paths = Random(2), sorted(Path(ROOT / "router/scheduling").glob("*.py"))[1 : 1 + batch]
    prompts = [tokenizer.encode(path.read_text()).ids for path in paths]
    texts = [tokenizer.encode(edited(path.read_text(), random)).ids[:1500] for path in paths]
    taken = seconds_for(texts, [NgramDrafter(prompt) for prompt in prompts], cpu)
    assert len(texts[0]) * cpu(batch) > least * taken


def test_one_interrupted_step_does_not_end_guessing() -> None:
    costs = StepCosts()
    for _ in range(100):
        costs.note(1, 0.07, has_drafts=False)
    for _ in range(12):
        costs.note(9, 0.12, has_drafts=True)
    chances = [[0.9**n for n in range(1, 9)]]
    assert [8] == allot(chances, 0, costs)
    costs.note(2, 2.0, has_drafts=True)
    assert [8] == allot(chances, 0, costs)


def test_a_step_whose_proposals_took_all_of_its_time_tells_nothing_of_others() -> None:
    speculation = Speculation(MOST, most_proposals=2)
    drafting = speculation.begin([1, 2, 3])
    for seconds in (0.02, 0.01):  # by two clocks, its proposals may even have taken longer than it did
        speculation.stepped([drafting], (), 0, seconds, asked=Asked(2, 1, 0.02))
        assert speculation.may_pay(1) and math.inf == speculation.costs.plain(1)
    speculation.stepped([drafting], (), 0, 0.03, asked=Asked(2, 1, 0.02))
    assert pytest.approx(0.01) == speculation.costs.plain(1)


class Says:
    """A drafter that always says the same."""

    def __init__(self, *token_ids: int) -> None:
        self._said = Guess(token_ids, match=3)

    def extend(self, token_ids: Sequence[int]) -> None: ...

    def guess(self, most: int) -> Guess:
        return self._said._replace(token_ids=self._said.token_ids[:most])

    def end(self) -> None: ...


@pytest.mark.parametrize("most", [8, 1])
def test_what_is_guessed_stays_the_same_until_something_comes(most: int) -> None:
    """The text promises more of eight tokens, the proposal of one; a grammar's masks are of what was guessed first."""
    drafting = Drafting(Says(*[1] * 8), 8)
    drafting.propose(Proposal((2,), (math.log(0.5),)))
    text = drafting.chances(Guess((1,) * 8, match=3))
    [proposed] = drafting.chances(Guess((2,), logprobs=(math.log(0.5),)))
    assert text[0] < proposed < sum(text)
    first = drafting.guess(most).token_ids
    for fewer in range(1, 9):
        assert drafting.guess(fewer).token_ids[0] == first[0]
    drafting.came([5])
    drafting.propose(Proposal((3,), (math.log(0.5),)))
    assert (3,) == drafting.guess(1).token_ids
