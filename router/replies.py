"""The replies of the shards, which can be waited for beside something else that may happen before."""

from __future__ import annotations

import asyncio
from typing import Any

from router.client import Shards, StepReply


class Replies:
    """Of the shards that serve now. A reply that was waited for in vain is waited for again: nothing is lost."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._receiving: asyncio.Future[StepReply] | None = None

    async def next(self, waking: asyncio.Event | None) -> StepReply | None:
        """The reply to the oldest step, or None if `waking` is set from now on before it comes. Raises ShardError."""
        if self._receiving is None:
            if waking is None:
                return await self._shards.receive()
            self._receiving = asyncio.ensure_future(self._shards.receive())
        if waking is None:
            await asyncio.wait({self._receiving})
        else:
            await self._either(self._receiving, waking)
        if not self._receiving.done():
            return None
        receiving, self._receiving = self._receiving, None
        return receiving.result()

    @staticmethod
    async def _either(receiving: asyncio.Future[Any], waking: asyncio.Event) -> None:
        waking.clear()
        woken: asyncio.Future[Any] = asyncio.ensure_future(waking.wait())
        try:
            await asyncio.wait((receiving, woken), return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()

    def forget(self) -> None:
        """The shards are lost, or nobody will ask again."""
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving.add_done_callback(lambda receiving: receiving.cancelled() or receiving.exception())
            self._receiving = None
