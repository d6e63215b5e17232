"""Threads for what would hold up the event loop: long prompts on their way in, and long answers on their way out.

A gate before them (`turns.py`) lets API keys in by turns, and as many pieces of work as there are threads: whoever is
cancelled at the gate leaves nothing in the threads' queue. What never ends is not for them (`aside/`): a thread cannot
be ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from router.turns import Turns

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
