"""Threads for what would hold up the event loop: long prompts on their way in, and long answers on their way out.

A gate before them (`turns.py`) lets API keys in by turns, and as many pieces of work as there are threads: whoever is
cancelled at the gate leaves nothing in the threads' queue. What never ends is not for them (`aside/`): a thread cannot
be ended.

A gate with few places inside, which owners enter in turn.

Each of those who wait is served once before any is served twice (round robin; Nagle 1985, "On Packet Switches with
Infinite Storage", RFC 970), and first in, first out within one. So who sends one request beside someone's hundred waits
for one of the hundred. Weights are left out: what is inside is short.

Who is cancelled while waiting leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar


class Turns:
    """At most `num_places` inside. Of one event loop."""

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}  # by owner; the next owner and waiter first

    @property
    def num_waiting(self) -> int:
        """How many wait for a place."""
        return sum(map(len, self._waiting.values()))

    async def enter(self, owner: str) -> None:
        """Wait for a place, which `leave` gives back."""
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, {})[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(owner, turn)
            else:
                self.leave()  # the place came first
            raise

    def leave(self) -> None:
        """Give a place to who is next."""
        while self._waiting:
            owner = next(iter(self._waiting))
            turn = next(iter(self._waiting[owner]))
            self._forget(owner, turn)
            if others := self._waiting.pop(owner, None):
                self._waiting[owner] = others  # behind all other owners
            if not turn.cancelled():
                return turn.set_result(None)
        self._num_free += 1

    def _forget(self, owner: str, turn: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(owner, {})
        waiting.pop(turn, None)
        if not waiting:
            self._waiting.pop(owner, None)


Result = TypeVar("Result")


class Workers:
    """At most so many threads."""

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="worker")
        self._turns = Turns(num_threads)

    async def do(self, work: Callable[[], Result], owner: str = "") -> Result:
        """What comes of `work`, which is done for `owner`.

        Who is cancelled goes at once, but what a thread has begun it ends, and only then its place is free.
        """
        await self._turns.enter(owner)
        try:
            running = asyncio.get_running_loop().run_in_executor(self._pool, work)
        except RuntimeError:  # the server ends, or there are no more threads
            self._turns.leave()
            raise
        running.add_done_callback(self._ended)
        await asyncio.wait((running,))  # does not cancel what it waits for
        return running.result()

    def close(self) -> None:
        """Let the threads end."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ended(self, running: asyncio.Future[Any]) -> None:
        self._turns.leave()
        if not running.cancelled():
            running.exception()  # looked at: there may be nobody else any more
