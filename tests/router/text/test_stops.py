"""Stop sequences left out of a text, whatever the pieces in which it comes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.generated import StopFilter


def shown(pieces: Sequence[str], stop: Sequence[str]) -> tuple[str, str | None]:
    """The whole text and by what it was stopped."""
    search, text = StopFilter(stop), ""
    for piece in pieces:
        more, has_stopped = search.push(piece)
        text += more
        assert has_stopped == (search.found is not None)
        if has_stopped:
            return text, search.found
    return text + search.flush(), None


@given(st.lists(st.text("ab", max_size=4), max_size=20), st.lists(st.text("ab", min_size=1, max_size=5), max_size=4))
def test_the_text_ends_before_the_stop_sequence_that_is_complete_first(pieces: list[str], stop: list[str]) -> None:
    whole = "".join(pieces)
    ends = [(end, whole[:end].endswith(s), s) for end in range(len(whole) + 1) for s in stop]
    complete = [(end, s) for end, is_there, s in ends if is_there]
    if complete:
        first = min(end for end, _ in complete)
        longest = max((s for end, s in complete if end == first), key=len)
        assert (whole[: first - len(longest)], longest) == shown(pieces, stop)
    else:
        assert (whole, None) == shown(pieces, stop)


@given(st.lists(st.text("ab", max_size=4), max_size=20), st.lists(st.text("ab", min_size=1, max_size=5), max_size=4))
def test_what_is_shown_early_was_not_the_beginning_of_a_stop_sequence(pieces: list[str], stop: list[str]) -> None:
    search, whole, text = StopFilter(stop), "", ""
    for piece in pieces:
        more, has_stopped = search.push(piece)
        whole, text = whole + piece, text + more
        if has_stopped:
            break
        held = whole[len(text) :]
        assert whole == text + held
        assert not held or any(s.startswith(held) for s in stop)


def test_special_tokens_are_searched_and_not_shown() -> None:
    search = StopFilter(["<end>", "b<x>"])
    assert ("a", False) == search.push("ab")
    assert ("", False) == search.push("<", is_shown=False)
    assert ("bc", False) == search.push("c")
    assert ("", True) == search.push("<end>", is_shown=False)


@pytest.mark.parametrize("length", [1, 1000])
def test_long_stop_sequences_cost_no_more_time_than_short_ones(length: int) -> None:
    """The worst text for a search that starts again: no assertion on time, but this would take minutes."""
    assert ("a" * 200_000, None) == shown(["a" * 100] * 2000, ["a" * length + "b"])
