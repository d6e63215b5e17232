"""What drafters guess, against searches of the whole text."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from router.drafting.drafter import NgramDrafter
from router.drafting.token_index import LEAST_MATCH, MOST_LOOKED_AT, MOST_MATCH

TEXTS = st.integers(1, 4).flatmap(lambda most: st.lists(st.integers(0, most), max_size=40))


def longest_match(text: Sequence[int]) -> tuple[int, int]:
    """How many of the text's last tokens occurred before, and the latest place behind them; (0, 0) if too few did."""
    places = [
        place
        for place in range(LEAST_MATCH, len(text))
        if text[place - LEAST_MATCH : place] == text[len(text) - LEAST_MATCH :]
    ][-MOST_LOOKED_AT:]

    def match(place: int) -> int:
        return max(n for n in range(min(place, MOST_MATCH) + 1) if text[place - n : place] == text[len(text) - n :])

    return max(((match(place), place) for place in places), default=(0, 0))


def continued(text: Sequence[int], place: int, most: int) -> tuple[int, ...]:
    """What followed the place, and follows it again where that is the end of the text."""
    longer = list(text)
    for offset in range(most):
        longer.append(longer[place + offset])
    return tuple(longer[len(text) :])


@given(TEXTS, st.lists(st.lists(st.integers(0, 4), max_size=5), max_size=10), st.integers(1, 9))
def test_the_latest_longest_match_goes_on(prompt: list[int], pieces: list[list[int]], most: int) -> None:
    drafter, text = NgramDrafter(prompt), list(prompt)
    for piece in [[], *pieces]:
        drafter.extend(piece)
        text += piece
        match, place = longest_match(text)
        guess = drafter.guess(most)
        assert match == guess.match
        assert (continued(text, place, most) if match else ()) == guess.token_ids


def test_a_period_is_guessed_as_far_as_is_asked_for() -> None:
    drafter = NgramDrafter([9, 1, 2, 3, 1, 2, 3, 1, 2])
    assert (3, 1, 2, 3, 1, 2, 3, 1) == drafter.guess(8).token_ids
