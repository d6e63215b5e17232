"""What drafters guess, against searches of the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.drafting.drafter import LONG, RESUMED, NgramDrafter
from router.drafting.token_index import LEAST_MATCH, MOST_LOOKED_AT, MOST_MATCH

TEXTS = st.integers(1, 4).flatmap(lambda most: st.lists(st.integers(0, most), max_size=40))


def match_at(text: Sequence[int], place: int) -> int:
    """How many tokens before the place are those at the text's end."""
    return max(n for n in range(min(place, MOST_MATCH) + 1) if text[place - n : place] == text[len(text) - n :])


def has_long_match(text: Sequence[int]) -> bool:
    """Whether any of the text's beginnings ends with so much that occurred before that its place is remembered."""
    beginnings = (text[:length] for length in range(len(text) + 1))
    return any(match_at(one, place) >= LONG for one in beginnings for place in range(LONG, len(one)))


def latest_places(text: Sequence[int]) -> list[int]:
    """Where the text's last LEAST_MATCH tokens occurred, latest first."""
    places = range(len(text) - 1, LEAST_MATCH - 1, -1)
    return [place for place in places if match_at(text, place) >= LEAST_MATCH][:MOST_LOOKED_AT]


def continued(text: Sequence[int], place: int, most: int) -> tuple[int, ...]:
    """What followed the place, and follows it again where that is the end of the text."""
    longer = list(text)
    for offset in range(most):
        longer.append(longer[place + offset])
    return tuple(longer[len(text) :])


@given(TEXTS, st.lists(st.lists(st.integers(0, 4), max_size=5), max_size=10), st.integers(1, 9))
@example([0, 1, 0, 1, 0, 0, 0, 0, 1, 0, 1, 0], [[0, 0, 0, 0]], 1)  # a long match comes and goes within a piece
def test_the_latest_longest_match_goes_on(prompt: list[int], pieces: list[list[int]], most: int) -> None:
    drafter, text = NgramDrafter(prompt), list(prompt)
    for piece in [[], *pieces]:
        drafter.extend(piece)
        text += piece
        places = latest_places(text)
        longest = max((match_at(text, place) for place in places), default=0)
        guess = drafter.guess(most)
        assert longest <= guess.match
        if not has_long_match(text):
            best = next((place for place in places if match_at(text, place) == longest), None)
            assert (() if best is None else continued(text, best, most)) == guess.token_ids
        elif guess.match:
            assert guess.token_ids in {continued(text, place, most) for place in range(1, len(text))}


def test_a_text_that_comes_back_to_what_it_repeats_is_followed_there() -> None:
    """Behind a changed token the last two occurred elsewhere more recently."""
    drafter = NgramDrafter([*range(100, 140), 112, 113, 1, 112, 113, 2])
    drafter.extend(range(100, 111))
    assert 111 == drafter.guess(1).token_ids[0]
    drafter.extend([50, 112, 113])
    guess = drafter.guess(3)
    assert ((114, 115, 116), 2 + RESUMED) == (guess.token_ids, guess.match)


def test_of_a_long_text_the_last_tokens_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.drafting.drafter.MOST_TOKENS", 100)
    random = Random(1)
    text = [random.randrange(12) for _ in range(250)]
    drafter = NgramDrafter(text)
    assert 100 == len(drafter.text)
    for _ in range(500):
        text.append(random.randrange(12))
        drafter.extend(text[-1:])
        known = drafter.text.tolist()
        assert known == text[-len(known) :] and 100 <= len(known) <= 200
        places = latest_places(known)
        assert max((match_at(known, place) for place in places), default=0) == drafter.guess(3).match


def test_a_period_is_guessed_as_far_as_is_asked_for() -> None:
    drafter = NgramDrafter([9, 1, 2, 3, 1, 2, 3, 1, 2])
    assert (3, 1, 2, 3, 1, 2, 3, 1) == drafter.guess(8).token_ids
