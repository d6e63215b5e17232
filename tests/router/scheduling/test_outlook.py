"""The most tokens that sequences hold at once is what a simulation of every step finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.scheduling.outlook import Outlook

sequences = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 40)), max_size=8)


def stepped(ones: list[tuple[int, int]]) -> int:
    """The most tokens at once of sequences (tokens, steps left), step by step."""
    return max((sum(tokens + t for tokens, left in ones if t <= left) for t in range(41)), default=0)


@given(sequences, sequences, st.integers(0, 100), st.sets(st.integers(0, 7)))
def test_the_peak_is_what_every_step_would_show(
    running: list[tuple[int, int]], joining: list[tuple[int, int]], now: int, leaving: set[int]
) -> None:
    outlook: Outlook[int] = Outlook()
    outlook.now = now
    for key, one in enumerate(running):
        outlook.set(key, outlook.course(*one))
    leaving &= set(range(len(running)))
    staying = [one for key, one in enumerate(running) if key not in leaving]
    assert stepped([*staying, *joining]) == outlook.peak([outlook.course(*one) for one in joining], leaving)
    assert stepped(running) == outlook.peak()
    for key in range(len(running)):
        outlook.remove(key)
    assert 0 == outlook.peak()


def test_time_passes_without_changing_the_peak_and_who_should_have_ended_is_named() -> None:
    outlook: Outlook[str] = Outlook()
    outlook.set("short", outlook.course(10, 5))
    outlook.set("long", outlook.course(10, 20))
    peak, version = outlook.peak(), outlook.version
    outlook.now += 5
    assert (peak, version) == (outlook.peak(), outlook.version)
    assert ["short"] == outlook.overdue()
