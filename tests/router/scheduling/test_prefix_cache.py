"""The pool: blocks that are written to have one holder, and what they contain is found only when it is computed."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.scheduling import checkpoints
from router.scheduling.prefix_cache import BlockPool
from router.scheduling.prefix_index import TierIndex
from router.scheduling.prefix_moves import TierSizes
from router.scheduling.request import PrefixKeys, Scheduled, ValidRequest
from router.scheduling.scheduler import Scheduler
from tests.router.doubles import make_limits, with_states


def test_blocks_go_out_once_and_come_back() -> None:
    allocator = BlockPool(4)
    first, second = allocator.allocate(3), allocator.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    allocator.free(first)
    assert allocator.num_free == 3


def test_more_than_is_free_takes_nothing() -> None:
    allocator = BlockPool(2)
    with pytest.raises(RuntimeError, match="3 blocks asked for, 2 free"):
        allocator.allocate(3)
    assert allocator.num_free == 2


def test_block_freed_twice_is_refused() -> None:
    allocator = BlockPool(2)
    blocks = allocator.allocate(1)
    allocator.free(blocks)
    with pytest.raises(RuntimeError, match="freed twice"):
        allocator.free(blocks)


def test_nothing_asked_for_is_nothing_taken() -> None:
    allocator = BlockPool(2)
    assert allocator.allocate(0) == []
    assert allocator.num_free == 2


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60))
def test_no_block_is_ever_out_twice(actions: list[tuple[bool, int]]) -> None:
    allocator = BlockPool(12)
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


# ------------------------------------------------------------------------------------------------------- prefixes


def keys_of(token_ids: list[int]) -> list[bytes]:
    return PrefixKeys(token_ids, 4).keys


def filled(pool: BlockPool, keys: list[bytes]) -> list[int]:
    """Blocks with confirmed content that somebody holds."""
    blocks = pool.allocate(len(keys))
    for key, block in zip(keys, blocks, strict=True):
        pool.announce(key, block)
        pool.confirm(key, block)
    return blocks


def test_content_is_found_while_held_and_after() -> None:
    pool, keys = BlockPool(4), keys_of([*range(12)])
    blocks = filled(pool, keys)
    assert blocks == pool.find(keys)
    assert blocks[:2] == pool.find([*keys[:2], b"another"])
    pool.free(blocks)
    assert blocks == pool.find(keys)
    assert 4 == pool.num_free


def test_a_block_in_the_middle_is_of_no_use_without_those_before_it() -> None:
    pool, keys = BlockPool(4), keys_of([*range(12)])
    filled(pool, keys)
    assert [] == pool.find([b"another", *keys[1:]])


def test_what_is_shared_comes_back_with_its_last_holder() -> None:
    pool, keys = BlockPool(4), keys_of([*range(8)])
    blocks = filled(pool, keys)
    pool.hold(pool.find(keys))
    pool.free(blocks)
    assert 2 == pool.num_free
    pool.free(blocks)
    assert 4 == pool.num_free


def test_the_least_recently_used_goes_first_and_ends_before_beginnings() -> None:
    pool, old, new = BlockPool(4), keys_of([1] * 8), keys_of([2] * 8)
    for keys in (old, new):
        pool.free(filled(pool, keys))
    pool.free(pool.allocate(1))
    assert [1, 2] == [len(pool.find(keys)) for keys in (old, new)]
    pool.hold(pool.find(old))  # used again: the other is older now
    pool.free(pool.find(old))
    pool.allocate(2)
    assert [1, 1] == [len(pool.find(keys)) for keys in (old, new)]


def test_what_is_not_confirmed_is_not_found_and_what_is_retracted_never_is() -> None:
    pool, (key, *_) = BlockPool(2), keys_of([1, 2, 3, 4])
    (block,) = pool.allocate(1)
    pool.announce(key, block)
    assert [] == pool.find([key])
    pool.free([block])
    pool.confirm(key, block)  # its request was over before the step was
    assert [block] == pool.find([key])
    (other,) = pool.allocate(1)
    pool.announce(b"key", other)
    pool.retract(b"key", other)
    pool.confirm(b"key", other)
    assert [] == pool.find([b"key"])


def test_a_block_that_was_given_away_is_not_confirmed_for_its_last_holder() -> None:
    pool, (key, *_) = BlockPool(1), keys_of([1, 2, 3, 4])
    (block,) = pool.allocate(1)
    pool.announce(key, block)
    pool.free([block])
    assert [block] == pool.allocate(1)
    pool.confirm(key, block)
    assert [] == pool.find([key])


def test_keys_tell_beginnings_apart_and_grow_with_their_sequence() -> None:
    assert keys_of([1, 2, 3, 4, 5, 6, 7, 8])[1] != keys_of([0, 2, 3, 4, 5, 6, 7, 8])[1]
    grown = PrefixKeys([1, 2, 3], 4)
    assert [] == grown.keys
    for token in (4, 5, 6, 7, 8, 9):
        grown.extend([token])
    assert keys_of([*range(1, 10)]) == grown.keys
    assert 2 == len(grown.keys)


# --------------------------------------------------------------------------------------------------------- states


def test_what_is_saved_is_what_was_computed_though_states_are_kept_over_it() -> None:
    limits = make_limits(max_batch_total_tokens=64, prefix_caching=True, checkpoint_tokens=16, checkpoint_blocks=1)
    tiers = TierIndex(TierSizes(num_slots=8, block_bytes=1, most_restored=8))
    scheduler, content, saved = Scheduler[Scheduled](limits, tiers), dict[int, bytes](), list[bytes]()
    for prompt in ([1] * 17, [2] * 40):
        entry = Scheduled(scheduler.new_id(), ValidRequest(prompt, 4))
        scheduler.add(entry)
        while entry.num_prompt_left or not entry.blocks:
            plan = scheduler.plan()
            assert plan is not None
            assert [one.key for one in plan.saves] == [content[one.block] for one in plan.saves]
            saved += [one.key for one in plan.saves]
            content |= {filled.block: filled.key for filled in plan.filled}
            scheduler.computed(plan)
        entry.is_over = True
    assert len(saved) >= 2  # the first prompt's block, and the states behind it


def test_places_without_states_cost_one_name_each(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []

    def counted(data: bytes, **settings: Any) -> Any:
        made.append(data)
        return blake2b(data, **settings)

    monkeypatch.setattr(checkpoints, "blake2b", counted)
    keys = [place.to_bytes(16, "little") for place in range(1024)]
    assert 0 == checkpoints.States(distance=4, size=200).deepest(keys, len(keys), lambda key: False)
    assert len(made) == 1024 // 4


# -------------------------------------------------------------------------------------------------------- windows


def test_nothing_is_copied_of_a_sequence_that_a_step_has_lost() -> None:
    windows = with_states((1, 1, 1, 64), 16)
    scheduler = Scheduler[Scheduled](make_limits(max_batch_total_tokens=256, prefix_caching=True, **windows))
    entry = Scheduled(scheduler.new_id(), ValidRequest([1] * 40, 4))
    scheduler.add(entry)
    plan = scheduler.plan()
    assert plan is not None
    scheduler.add_again(scheduler.failed(plan))
    plan = scheduler.plan()
    assert plan is not None and plan.admitted and not plan.copies
    scheduler.computed(plan)
    plan = scheduler.plan()
    assert plan is not None and {entry.id} == {copy.sequence for copy in plan.copies}
