"""What is expected of an answer: nothing but the request's word at first, and then what others did."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from router.scheduling.answer_lengths import MOST_HISTORIES, AnswerLengths, History


def learnt(lengths: list[int], most: int) -> History:
    """The history of answers that became so long, of which those of `most` tokens were cut off."""
    history = History()
    for length in lengths:
        history.began()
        history.came(0, length)
        if length < most:
            history.ended(length)
    return history


def test_the_first_request_is_expected_to_need_about_half_of_what_it_asks_for() -> None:
    assert 900 <= History().expected(0, 2000) <= 1100
    assert 1900 <= History().expected(1000, 3000) <= 2100


def test_what_others_asked_for_does_not_matter_once_they_have_answered() -> None:
    random = Random(1)
    history = learnt([random.randint(200, 400) for _ in range(60)], 32_000)
    assert 270 <= history.expected(0, 32_000) <= 340
    assert 310 <= history.expected(300, 32_000) <= 400


def test_answers_that_were_cut_off_say_that_others_become_longer() -> None:
    history = learnt([500] * 60, 500)
    assert 500 == history.expected(0, 500)
    assert 2000 < history.expected(0, 8000)


def test_running_answers_that_pass_all_lengths_known_are_learnt_from_before_they_end() -> None:
    history = learnt([100] * 60, 4000)
    assert 140 >= history.expected(0, 4000)
    for _ in range(80):
        history.began()
        history.came(0, 1000)
    assert 1000 < history.expected(0, 4000)


def test_too_short_expectations_raise_the_level_and_it_falls_again() -> None:
    history = learnt([*range(100, 400, 5)], 4000)
    before = history.expected(0, 4000)
    for _ in range(40):
        history.judged(was_outgrown=True)
    raised = history.expected(0, 4000)
    for _ in range(40):
        history.judged(was_outgrown=False)
    assert before < raised and before == history.expected(0, 4000)


@given(
    st.lists(st.integers(1, 5000), max_size=80),
    st.integers(0, 4999),
    st.integers(1, 5000),
    st.lists(st.booleans(), max_size=80),
)
def test_more_is_expected_than_there_is_and_no_more_than_may_be(
    lengths: list[int], written: int, more: int, judged: list[bool]
) -> None:
    history = learnt(lengths, 5000)
    for one in judged:
        history.judged(was_outgrown=one)
    assert written < history.expected(written, written + more) <= written + more
    assert written == history.expected(written, written)


def test_keys_and_routes_learn_apart_and_the_oldest_are_forgotten() -> None:
    lengths = AnswerLengths()
    first = lengths.of("a", "/generate")
    assert first is lengths.of("a", "/generate") is not lengths.of("a", "/v1") is not lengths.of("b", "/generate")
    for number in range(MOST_HISTORIES):
        lengths.of(str(number), "")
    assert first is not lengths.of("a", "/generate")
