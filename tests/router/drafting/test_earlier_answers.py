"""Guesses from earlier answers: whose they are, which are kept, and which of several."""

from __future__ import annotations

from array import array
from random import Random

from router.drafting.drafter import NOTHING, Guess, SuffixDrafter
from router.drafting.earlier_answers import LARGEST_SHARE, MOST_TOKENS, SHORTEST, EarlierAnswers, most_frequent

OURS = ("key", "salt")
ANSWER = [5, 6, 7, 8, 9, 10, 11, 12]


def answered(answers: EarlierAnswers, owner: tuple[str, str], prompt: list[int], answer: list[int]) -> None:
    drafter = SuffixDrafter(prompt, answers, owner)
    drafter.extend(answer)
    drafter.end()


def guessed(answers: EarlierAnswers, owner: tuple[str, str], text: list[int], most: int = 20) -> tuple[int, ...]:
    return SuffixDrafter(text, answers, owner).guess(most).token_ids


def test_an_answer_is_guessed_from_an_earlier_one_up_to_its_end() -> None:
    answers = EarlierAnswers()
    answered(answers, OURS, [1, 2, 3], ANSWER)
    assert tuple(ANSWER[2:]) == guessed(answers, OURS, [40, 41, 5, 6])
    assert tuple(ANSWER) == guessed(answers, OURS, [40, 2, 3])  # its beginning, behind the same end of a prompt


def test_no_key_and_no_salt_is_guessed_from_another() -> None:
    answers = EarlierAnswers()
    answered(answers, OURS, [1, 2, 3], ANSWER)
    for owner in [("key", ""), ("key", "other"), ("", "salt"), ("other", "salt"), ("", "")]:
        assert NOTHING == SuffixDrafter([1, 2, 3], answers, owner).guess(8)


def test_the_longer_match_counts_and_of_equal_ones_the_texts_own() -> None:
    answers = EarlierAnswers()
    answered(answers, OURS, [1, 2, 3], ANSWER)
    assert (20,) == guessed(answers, OURS, [5, 6, 7, 20, 30, 5, 6, 7], 1)
    assert (8,) == guessed(answers, OURS, [6, 7, 20, 30, 5, 6, 7], 1)


def test_the_most_frequent_continuation_is_guessed() -> None:
    answers = EarlierAnswers()
    for last in (1, 2, 1, 3, 1, 2):
        answered(answers, OURS, [], [5, 6, 7, last, last])
    guess = SuffixDrafter([6, 7], answers, OURS).guess(9)
    assert Guess((1, 1), 2, 0.5) == guess
    assert ((4, 4), 0.5) == most_frequent(array("i", [4, 4, 9, 8, -1]), [0, 2], 2)


def test_the_answers_that_were_not_used_for_longest_leave_whoever_they_belong_to() -> None:
    answers = EarlierAnswers(most_tokens=160)
    texts = {name: [base + offset for offset in range(15)] for base, name in ((100, "a"), (200, "b"), (300, "c"))}
    for name, text in texts.items():
        for part in range(3):
            answered(answers, (name, ""), [], [1000 * part + id for id in text])
    assert texts["a"][10] == guessed(answers, ("a", ""), texts["a"][:10], 1)[0]
    for part in range(5, 8):
        answered(answers, ("d", ""), [], [1000 * part + id for id in range(15)])
    assert guessed(answers, ("a", ""), texts["a"][:10])  # it was used
    assert not guessed(answers, ("a", ""), [1000 + id for id in texts["a"][:10]])
    assert guessed(answers, ("b", ""), texts["b"][:10])


def test_tokens_are_bounded_and_what_is_kept_is_found() -> None:
    random, answers, most = Random(3), EarlierAnswers(most_tokens=4000), 4000
    for _ in range(400):
        owner, said = (random.choice("xyz"), ""), [random.randrange(10**6) for _ in range(random.randrange(2, 900))]
        answers.add(owner, said)
        shelves = answers._shelves.values()
        assert answers.num_tokens == sum(shelf.num_tokens for shelf in shelves) <= most
        assert sum(len(shelf.index.token_ids) for shelf in shelves) <= 2 * most + 3 * most // LARGEST_SHARE
        assert tuple(said[2:6]) == guessed(answers, owner, said[:2], len(said[2:6]))
    assert len(answers._used) > 10
    for answer in answers._used:
        tokens = answers._shelves[answer.owner].index.token_ids[answer.start : answer.start + answer.length]
        assert tokens[-1] == -1 and -1 not in tokens[:-1]


def test_short_answers_are_bounded_in_number_since_each_may_have_an_owner() -> None:
    answers = EarlierAnswers()
    for number in range(MOST_TOKENS // 3):
        answers.add(("", f"salt {number}"), [1, 2])
    assert MOST_TOKENS // SHORTEST == len(answers._used) == len(answers._shelves)
    for _ in range(LARGEST_SHARE):
        answers.add(OURS, range(MOST_TOKENS))
    assert len(answers._shelves) <= 2
