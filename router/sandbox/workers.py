"""Threads for what would block the event loop: tokenising long prompts and serialising long answers.

A semaphore before them admits as much work as there are threads, and API keys in turn (round robin; Nagle 1985, "On
Packet Switches with Infinite Storage", RFC 970), first in, first out within one: a key that sends one request beside
another key's hundred waits for one of the hundred. There are no weights, because each piece of work is short. A caller
that is cancelled while it waits leaves nothing behind. Work that may never end belongs into `pool.py`: a thread cannot
be ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


class Workers:
    """A pool of so many threads."""

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="worker")
        self._semaphore = FairSemaphore(num_threads)

    async def do(self, work: Callable[[], Result], owner: str = "") -> Result:
        """The result of `work`, which is done for `owner`.

        A caller that is cancelled returns at once, but a thread finishes what it has begun, and only then is free.
        """
        await self._semaphore.enter(owner)
        try:
            running = asyncio.get_running_loop().run_in_executor(self._pool, work)
        except RuntimeError:  # the server ends, or no thread can be started
            self._semaphore.leave()
            raise
        running.add_done_callback(self._ended)
        await asyncio.wait((running,))  # does not cancel what it waits for
        return running.result()

    def close(self) -> None:
        """Let the threads end."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ended(self, running: asyncio.Future[Any]) -> None:
        self._semaphore.leave()
        if not running.cancelled():
            running.exception()  # retrieved: the caller may be gone


class FairSemaphore:
    """A semaphore of one event loop whose waiting owners take turns."""

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}  # by owner; the next owner and waiter first

    @property
    def num_waiting(self) -> int:
        """Callers that wait for a place."""
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
                self.leave()  # the place was given before the cancellation
            raise

    def leave(self) -> None:
        """Give the place to the next in turn."""
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
