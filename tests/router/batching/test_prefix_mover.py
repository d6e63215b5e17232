"""What moves blocks of the prefix cache between host and disk, where a move fails."""

from __future__ import annotations

import asyncio

import pytest

from router.batching.prefix_mover import Mover
from router.scheduling.prefix_index import DEPTH_BITS, TierIndex
from router.scheduling.prefix_moves import Move, Moved, Stored, TierContents, TierSizes
from router.shards.client import ShardError
from tests.router.scheduling.test_prefix_index import SIZES, key, saved


class Shards:
    """Whose moves end with an error: by default one that nobody expected."""

    def __init__(self, stored: int = 0, error: Exception | None = None) -> None:
        self._stored = [Stored(key(n), n, 1 << 24) for n in range(stored)]
        self._error = error or RuntimeError("a bug")

    async def open_tiers(self, session: int) -> TierContents:
        return TierContents(SIZES, self._stored, 10)

    async def move_blocks(self, session: int, move: Move) -> Moved:
        raise self._error


def test_what_nobody_expected_of_a_move_costs_the_disk_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        mover, woken = Mover(Shards()), asyncio.Event()
        mover.wake = woken.set
        index = await mover.open()
        assert index.has_disk
        saved(index, range(2))
        mover.pump()
        await asyncio.wait_for(woken.wait(), 60)
        assert not index.has_disk
        assert 1 == len(index.find([b"\0" * 16]))  # on the host
        await mover.close()

    asyncio.run(story())
    assert "RuntimeError: a bug" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ShardError(0, "late"), ValueError("no such reply")])
@pytest.mark.parametrize("is_fetch", [False, True])
async def test_a_move_that_fails_gives_back_all_that_it_had(error: Exception, is_fetch: bool) -> None:
    """Its blocks are not pinned and its slots are free: the host has as much room as before."""

    mover, woken = Mover(Shards(2 if is_fetch else 0, error)), asyncio.Event()
    mover.wake = woken.set
    index = await mover.open()
    if is_fetch:
        assert index.coming([key(0), key(1)], 1, 16, None) is not None
    else:
        saved(index, range(4))
    mover.pump()
    await asyncio.wait_for(woken.wait(), 60)
    assert not index.has_disk and index.is_idle
    assert SIZES.num_slots == len(saved(index, range(10, 14), sequence=2, step=2))
    assert [key(n) for n in range(10, 14)] == index.find(key(n) for n in range(10, 14))
    await mover.close()


async def test_who_waits_for_blocks_that_have_no_room_computes_them() -> None:
    """The host is full of what the same prefix begins with, and the disk takes no more."""
    mover, woken = Mover(Shards()), list[bool]()
    await mover.open()
    mover.wake = lambda: woken.append(True)
    stored = [Stored(key(n), n - 2, (1 << DEPTH_BITS) + n - 2) for n in (2, 3)]
    index = mover.index = TierIndex(TierSizes(2, 8, 100, 8), stored)
    for n in (0, 1):
        index.computed(key(n), n, 1, n)
    saves = index.save(1, 8)
    index.saved(saves, is_done=True)
    index._is_storing = False
    index._unstored.clear()
    wait = index.coming([key(n) for n in range(4)], 5, 16, None)
    assert wait is not None and not wait.is_over
    mover.pump()
    assert woken
    index.coming([key(n) for n in range(4)], 5, 16, wait)
    assert wait.is_over
    await mover.close()
