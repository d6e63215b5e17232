"""The allocator: every block has one owner or none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.blocks import BlockAllocator


def test_blocks_go_out_once_and_come_back() -> None:
    allocator = BlockAllocator(4)
    first, second = allocator.allocate(3), allocator.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    allocator.free(first)
    assert allocator.num_free == 3


def test_more_than_is_free_takes_nothing() -> None:
    allocator = BlockAllocator(2)
    with pytest.raises(RuntimeError, match="3 blocks asked for, 2 free"):
        allocator.allocate(3)
    assert allocator.num_free == 2


def test_block_freed_twice_is_refused() -> None:
    allocator = BlockAllocator(2)
    blocks = allocator.allocate(1)
    allocator.free(blocks)
    with pytest.raises(RuntimeError, match="freed twice"):
        allocator.free(blocks)


def test_nothing_asked_for_is_nothing_taken() -> None:
    allocator = BlockAllocator(2)
    assert allocator.allocate(0) == []
    assert allocator.num_free == 2


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60))
def test_no_block_is_ever_out_twice(actions: list[tuple[bool, int]]) -> None:
    allocator = BlockAllocator(12)
    out: list[list[int]] = []
    for is_allocation, number in actions:
        if is_allocation and number <= allocator.num_free:
            out.append(allocator.allocate(number))
        elif not is_allocation and out:
            allocator.free(out.pop(number % len(out)))
        taken = [block for blocks in out for block in blocks]
        assert len(taken) == len(set(taken)) == 12 - allocator.num_free
    for blocks in out:
        allocator.free(blocks)
    assert sorted(allocator.allocate(12)) == list(range(12))
