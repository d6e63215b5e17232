"""Admission: budgets, order, ratio. TGI's unit cases first, then invariants over random loads."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.scheduling.queue import Budget, RequestSize, blocks_for, min_size, next_batch

ENCODED = RequestSize(input_length=17, max_new_tokens=15, is_encoded=True)
ONE = RequestSize(input_length=0, max_new_tokens=1)


def budget(prefill: int, tokens: int, *, blocks: int = 1000, places: int | None = None, **fields: int) -> Budget:
    return Budget(prefill_tokens=prefill, tokens=tokens, blocks=blocks, places=places, block_size=1, **fields)


def test_two_that_fit_are_both_admitted() -> None:
    assert len(next_batch([ONE, ONE], budget(2, 2), None)) == 2


def test_one_is_not_admitted_when_two_must_wait() -> None:
    assert next_batch([ONE], budget(2, 2), 2) == []


def test_budget_for_one_admits_the_first_and_a_larger_one_the_next_two() -> None:
    assert len(next_batch([ONE, ONE, ONE], budget(1, 1), None)) == 1
    assert len(next_batch([ONE, ONE], budget(3, 3), None)) == 2


def test_empty_queue_and_empty_budget_admit_nobody() -> None:
    assert next_batch([], budget(2, 2), None) == []
    assert next_batch([ONE], budget(0, 0), 1) == []


def test_fewer_than_min_size_fitting_admits_nobody() -> None:
    assert next_batch([ONE, ONE], budget(1, 1), 2) == []


def test_head_that_does_not_fit_blocks_smaller_ones_behind_it() -> None:
    assert next_batch([RequestSize(8, 8), RequestSize(1, 1)], budget(100, 10), None) == []


def test_prompt_beyond_the_budget_starts_with_what_is_left_and_ends_the_batch() -> None:
    assert next_batch([RequestSize(4, 1), RequestSize(10, 1), RequestSize(1, 1)], budget(6, 100), None) == [4, 2]


def test_used_up_prompt_budget_starts_no_empty_chunk() -> None:
    assert next_batch([RequestSize(6, 1), RequestSize(1, 1)], budget(6, 100), None) == [6]


def test_blocks_are_counted_whole() -> None:
    demands = [RequestSize(10, 7), RequestSize(10, 7)]
    tight = Budget(prefill_tokens=100, tokens=100, blocks=3, places=None, block_size=16)
    assert next_batch(demands, tight, None) == [10]


def test_places_bound_the_batch() -> None:
    assert len(next_batch([ONE] * 5, budget(9, 9, places=3), None)) == 3
    assert next_batch([ONE], budget(9, 9, places=0), None) == []


@pytest.mark.parametrize("minimum", [None, 0, 1, 5, 9])
@pytest.mark.parametrize("num_fitting", [0, 1, 2, 4, 5, 8, 20])
def test_of_what_the_budget_has_room_for_those_join_that_are_expected_to_fit(
    num_fitting: int, minimum: int | None
) -> None:
    asked: list[tuple[int, int]] = []

    def num_expected(known: int, num: int) -> int:
        asked.append((known, num))
        assert known <= min(num_fitting, num)
        return min(num_fitting, num)

    chunks = next_batch([ONE] * 20, budget(99, 99, places=9), minimum, num_expected)
    num = min(9, num_fitting)
    assert len(chunks) == (num if num >= (minimum or 0) else 0)
    assert len(asked) <= 5 and all(num <= 9 for _, num in asked)


def test_min_size_is_a_share_of_what_runs() -> None:
    assert min_size(running=0, steps_since_admission=1, ratio=1.2, max_waiting_tokens=20) is None
    assert min_size(running=10, steps_since_admission=1, ratio=1.2, max_waiting_tokens=20) == 12
    assert min_size(running=3, steps_since_admission=1, ratio=0.3, max_waiting_tokens=20) == 0


def test_waiting_long_enough_lets_anyone_in() -> None:
    assert min_size(running=10, steps_since_admission=19, ratio=1.2, max_waiting_tokens=20) == 12
    assert min_size(running=10, steps_since_admission=20, ratio=1.2, max_waiting_tokens=20) is None
    assert min_size(running=10, steps_since_admission=1, ratio=1.2, max_waiting_tokens=0) is None


demands = st.lists(st.builds(RequestSize, st.integers(1, 40), st.integers(1, 40)), max_size=20)
budgets = st.builds(
    Budget,
    prefill_tokens=st.integers(0, 60),
    tokens=st.integers(0, 200),
    blocks=st.integers(0, 30),
    places=st.none() | st.integers(0, 8),
    block_size=st.sampled_from([1, 7, 16]),
)


@given(demands, budgets, st.none() | st.integers(0, 6))
def test_no_limit_is_ever_exceeded(waiting: list[RequestSize], budget: Budget, minimum: int | None) -> None:
    chunks = next_batch(waiting, budget, minimum)
    admitted = waiting[: len(chunks)]  # the answer is a prefix of the queue: order is kept by construction
    assert sum(chunks) <= budget.prefill_tokens
    assert sum(demand.tokens for demand in admitted) <= budget.tokens
    assert sum(blocks_for(demand.tokens, budget.block_size) for demand in admitted) <= budget.blocks
    assert budget.places is None or len(admitted) <= budget.places
    assert all(0 < chunk <= demand.input_length for chunk, demand in zip(chunks, admitted, strict=True))
    assert all(chunk == demand.input_length for chunk, demand in zip(chunks[:-1], admitted, strict=False))
    assert not chunks or minimum is None or len(chunks) >= minimum


@given(demands, budgets)
def test_refused_request_keeps_its_place_because_it_would_not_fit(waiting: list[RequestSize], budget: Budget) -> None:
    chunks = next_batch(waiting, budget, None)
    if len(chunks) < len(waiting):
        more = waiting[: len(chunks) + 1]
        assert (
            sum(demand.input_length for demand in more[:-1]) >= budget.prefill_tokens
            or sum(demand.tokens for demand in more) > budget.tokens
            or sum(blocks_for(demand.tokens, budget.block_size) for demand in more) > budget.blocks
            or (budget.places is not None and len(more) > budget.places)
        )


@given(
    st.lists(st.builds(RequestSize, st.integers(1, 50), st.integers(1, 14)), min_size=1, max_size=30),
    st.integers(64, 200),
    st.integers(1, 40),
    st.sampled_from([1, 7, 16]),
    st.floats(0, 3),
    st.integers(0, 5),
)
def test_every_request_is_admitted_while_running_ones_finish(
    waiting: list[RequestSize], capacity: int, prefill: int, block_size: int, ratio: float, max_waiting: int
) -> None:
    """Requests of at most 64 tokens, a cache of at least 64: each step one running request ends, if any runs."""
    num_blocks = math.ceil(capacity / block_size)
    running: list[RequestSize] = []
    steps = 0
    for _ in range(len(waiting) * (max_waiting + 3)):
        steps += 1
        free = Budget(
            prefill_tokens=prefill,
            tokens=capacity - sum(demand.tokens for demand in running),
            blocks=num_blocks - sum(blocks_for(demand.tokens, block_size) for demand in running),
            places=None,
            block_size=block_size,
        )
        chunks = next_batch(waiting, free, min_size(len(running), steps, ratio, max_waiting))
        steps = 0 if chunks else steps
        running += waiting[: len(chunks)]
        waiting = waiting[len(chunks) :]
        running = running[1:]
    assert waiting == []


def test_an_encoded_prompt_is_taken_whole_and_has_its_own_blocks() -> None:
    assert (32, 3) == (ENCODED.tokens, ENCODED.blocks(16))
    assert [17] == next_batch([ENCODED, ENCODED], budget(33, 100), None)
    assert [17, 17] == next_batch([ENCODED, ENCODED], budget(34, 100), None)
    assert [] == next_batch([ENCODED], budget(16, 100), None)
