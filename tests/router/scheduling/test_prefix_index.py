"""The index of the tiers: no slot or place is two blocks', and nothing is found before it is confirmed."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.scheduling.prefix_index import TierIndex
from router.scheduling.prefix_moves import Move, Restored, Saved, Stored, TierSizes, contents_of, moved_of
from server.pb import generate_pb2 as pb

SIZES = TierSizes(num_slots=4, num_places=6, block_bytes=10, most_restored=100)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def saved(index: TierIndex, numbers: range, sequence: int = 1, step: int = 1) -> list[Saved]:
    """Blocks computed by a sequence, and on the host as far as there is room."""
    for depth, number in enumerate(numbers):
        index.computed(key(number), number, sequence, depth)
    saves = index.save(step, 100)
    index.saved(saves, is_done=True)
    return saves


def stored(index: TierIndex) -> None:
    """All that waits for the disk is there."""
    while (move := index.next_store(100)) is not None:
        index.stored(move, [True] * len(move.keys))


def test_a_block_is_found_on_the_host_once_its_step_is_computed() -> None:
    index = TierIndex(SIZES)
    index.computed(key(1), 7, sequence=1, depth=0)
    (save,) = index.save(step=3, most=8)
    assert (key(1), 7) == save[:2]
    assert [] == index.find([key(1)])
    index.saved([save], is_done=True)
    assert [key(1)] == index.find([key(1), key(2)])


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    index = TierIndex(SIZES)
    index.computed(key(1), 7, sequence=1, depth=0)
    index.saved(index.save(1, 8), is_done=False)
    assert [] == index.find([key(1)])
    assert 4 == len(saved(index, range(10, 20)))


def test_what_the_device_gives_away_is_saved_with_the_same_step_or_dropped() -> None:
    index = TierIndex(SIZES)
    for number in range(3):
        index.computed(key(number), number, 1, number)
    index.forgotten(key(2), 2)
    index.forgotten(key(1), 1)
    assert [2] == [save.block for save in index.save(1, most=1)]
    assert 1 == index.counts.dropped
    assert [0] == [save.block for save in index.save(2, most=8)]


def test_a_long_sequence_keeps_its_beginning() -> None:
    index = TierIndex(TierSizes(4, 0, 10, 100))
    saved(index, range(10))
    assert [key(n) for n in range(4)] == index.find([key(n) for n in range(10)])


def test_the_end_of_what_was_used_least_recently_goes_first() -> None:
    index = TierIndex(TierSizes(4, 0, 10, 100))
    saved(index, range(4), sequence=1)
    saved(index, range(20, 21), sequence=2)
    assert [key(0), key(1), key(2)] == index.find([key(n) for n in range(4)])


def test_a_sequence_that_goes_on_is_not_the_least_recently_used() -> None:
    """Its second block found only its first one to go, and held up whatever was computed behind it."""
    for places in (0, 200):
        index = TierIndex(TierSizes(4, places, 10, 100))
        for sequence in range(4):
            assert 1 == len(saved(index, range(sequence, sequence + 1), sequence))
            stored(index)
        assert 1 == len(saved(index, range(10, 11), sequence=0))
        for number in range(20, 60):
            stored(index)
            assert 1 == len(saved(index, range(number, number + 1), sequence=number))
        assert (0, 0) == (index.num_unsaved, index.counts.dropped)


def test_a_sequence_that_is_larger_than_the_host_goes_on_to_the_disk() -> None:
    index = TierIndex(TierSizes(4, 200, 10, 100))
    for depth in range(20):
        index.computed(key(depth), depth, 1, depth)
    for step in range(20):
        index.saved(index.save(step, 100), is_done=True)
        stored(index)
    assert ({"host": 4, "disk": 20}, 0, 0) == (index.num_blocks, index.num_unsaved, index.counts.dropped)


def test_a_slot_that_a_step_reads_is_not_given_away() -> None:
    index = TierIndex(TierSizes(1, 0, 10, 100))
    saved(index, range(1))
    restores = index.restore([key(0)], [5], sequence=2)
    assert [] == saved(index, range(9, 10), sequence=3)
    index.restored(restores)
    assert 1 == len(index.save(2, 8))


def test_a_request_waits_for_what_comes_from_the_disk_and_finds_it_on_the_host() -> None:
    index = TierIndex(SIZES, [Stored(key(n), n, (1 << 24) + n) for n in range(3)])
    keys = [key(n) for n in range(5)]
    wait = index.coming(keys, sequence=1, block_size=16, wait=None)
    assert wait is not None and not wait.is_over
    move = index.next_fetch(8)
    assert move is not None and [0, 1, 2] == move.places
    assert [] == index.find(keys)
    index.fetched(move, [True, True, False])  # the last one is damaged
    assert keys[:2] == index.find(keys)
    assert wait is index.coming(keys, 1, 16, wait) and wait.is_over
    assert {"host": 2, "disk": 2} == index.num_blocks
    index.restore(keys[:2], [8, 9], 1)
    assert {"host": 0, "disk": 2} == index.counts.hits


def test_nobody_waits_for_a_disk_that_is_slower_than_computing_until_it_may_have_got_faster() -> None:
    index = TierIndex(SIZES, [Stored(key(0), 0, 1 << 24)])
    index.seconds_per_block = 1.1
    index.took(64, 64 / 16)  # one second for a block
    wait = index.coming([key(0)], 1, 16, None)
    assert wait is not None and wait.is_over and index.next_fetch(8) is None
    assert any(not w.is_over for n in range(9) if (w := index.coming([key(0)], n, 16, None)) is not None)


def test_a_disk_without_room_keeps_what_it_has_and_one_that_is_lost_nothing() -> None:
    index = TierIndex(TierSizes(8, 8, 10, 100))
    saved(index, range(2))
    stored(index)
    index.disk_is_full()
    saved(index, range(10, 13), sequence=2)
    move = index.next_store(1)
    assert move is not None and move.places[0] in (0, 1)  # one that held a block
    index.stored(move, [True])
    index.close_disk()
    assert not index.has_disk and index.is_idle and index.next_store(8) is None
    assert index.coming([key(0)], 5, 16, None) is None


def test_a_disk_that_is_lost_with_moves_under_way_holds_nothing_that_they_bring() -> None:
    """Two fetches and a store: the first answer tells of the loss, and the others come later."""
    index = TierIndex(TierSizes(8, 8, 10, 100), [Stored(key(n), n, 1 << 24) for n in range(2)])
    fetches = []
    for n in range(2):
        index.coming([key(n)], n, 16, None)
        fetches.append(index.next_fetch(1))
    saved(index, range(10, 12), sequence=2)
    store = index.next_store(8)
    assert store is not None and None not in fetches
    for move in fetches:
        index.fetched(move, [False]) if move else None
        index.close_disk()
    index.stored(store, [True] * len(store.keys))
    assert {"host": 2, "disk": 0} == index.num_blocks and index.is_idle
    assert index.next_store(8) is None and index.coming([key(10)], 3, 16, None) is None


def test_only_what_all_ranks_hold_is_there() -> None:
    replies = [
        pb.OpenTiersReply(num_slots=3, num_places=9, block_bytes=5, places=[0, 1], keys=key(1) + key(2), stamps=[7, 8]),
        pb.OpenTiersReply(num_slots=4, num_places=8, block_bytes=6, places=[1, 0], keys=key(2) + key(3), stamps=[8, 7]),
    ]
    contents = contents_of(replies)
    assert [Stored(key(2), 1, 8)] == contents.stored
    assert (3, 8, 11) == (contents.sizes.num_slots, contents.sizes.num_places, contents.sizes.block_bytes)
    moved = moved_of([pb.MoveBlocksReply(is_moved=[True, True]), pb.MoveBlocksReply(is_moved=[True, False])], 2)
    assert [True, False] == moved.is_moved


class Machine:
    """An index under any order of what happens to it, and what the shards then hold."""

    def __init__(self) -> None:
        self.index = TierIndex(SIZES)
        self.slots: dict[int, bytes] = {}
        self.places: dict[int, bytes] = {}
        self.saves: list[list[Saved]] = []
        self.restores: list[list[Restored]] = []
        self.moves: list[Move] = []
        self.step = 0

    def act(self, action: int, number: int) -> None:
        index = self.index
        match action:
            case 0:
                index.computed(key(number), number, number % 3, number)
            case 1:
                self.step += 1
                self.saves.append(index.save(self.step, 3))
            case 2 if self.saves:
                saves, is_done = self.saves.pop(0), number % 4 > 0
                self.slots |= {save.slot: save.key for save in saves} if is_done else {}
                index.saved(saves, is_done=is_done)
            case 3 if found := index.find([key(number)]):
                self.restores.append(index.restore(found, [number], number % 3))
            case 4 if self.restores:
                index.restored(self.restores.pop(0))
            case 5:
                index.coming([key(number), key(number + 1)], number % 3, 16, None)
                self.begin(index.next_fetch(2))
            case 6:
                self.begin(index.next_store(2))
            case 7 if self.moves:
                self.end(self.moves.pop(number % len(self.moves)), number)

    def begin(self, move: Move | None) -> None:
        self.moves += [move] if move is not None else []

    def end(self, move: Move, number: int) -> None:
        is_moved = [(number + n) % 3 > 0 for n in range(len(move.keys))]
        for name, slot, place, has_moved in zip(move.keys, move.slots, move.places, is_moved, strict=True):
            if has_moved and move.is_fetch:
                assert self.places[place] == name
                self.slots[slot] = name
            elif has_moved:
                assert self.slots[slot] == name
                self.places[place] = name
        (self.index.fetched if move.is_fetch else self.index.stored)(move, is_moved)

    def check(self) -> None:
        under_way: list[Any] = [save for saves in self.saves for save in saves]
        written = [save.slot for save in under_way] + [s for move in self.moves if move.is_fetch for s in move.slots]
        read = [r.slot for restores in self.restores for r in restores]
        read += [slot for move in self.moves if not move.is_fetch for slot in move.slots]
        assert len(written) == len(set(written)) and not set(written) & set(read)
        for number in range(12):
            if self.index.find([key(number)]):
                slot = self.index.restore([key(number)], [0], 0)
                assert self.slots[slot[0].slot] == key(number) and slot[0].slot not in written
                self.index.restored(slot)
        for restores in self.restores:
            assert all(self.slots[r.slot] == r.key for r in restores)

    def finish(self) -> None:
        """All that is under way ends well, and what waits has its turn."""
        for _ in range(20):
            while self.saves:
                self.act(2, 1)
            while self.restores:
                self.act(4, 0)
            while self.moves:
                self.end(self.moves.pop(), 1)
            for action in (1, 6):
                self.act(action, 0)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9)), max_size=80))
def test_no_slot_is_two_blocks_and_what_is_found_is_there(actions: list[tuple[int, int]]) -> None:
    machine = Machine()
    for action, number in actions:
        machine.act(action, number)
        machine.check()
    machine.finish()
    assert 0 == machine.index.num_unsaved
