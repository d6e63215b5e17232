"""What moves blocks of the prefix cache between host and disk, where a move fails."""

from __future__ import annotations

import asyncio

import pytest

from router.tiers.contents import Moved, TierContents
from router.tiers.mover import Mover
from router.tiers.moving import Move
from tests.router.tiers.test_index import SIZES, saved


class Shards:
    """Whose moves end with an error that nobody expected."""

    async def open_tiers(self, session: int) -> TierContents:
        return TierContents(SIZES, [], 10)

    async def move_blocks(self, session: int, move: Move) -> Moved:
        raise RuntimeError("a bug")


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
