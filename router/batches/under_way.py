"""One batch between its beginning and its end: why it has to end early, and how much room it takes.

What it takes of `batch_max_bytes` is more than its outputs: an error for each line without an answer is set aside when
it begins, so that a batch that is cancelled, or is too late, can always be written to its end.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from router.batches.store import Record
from router.jobs.census import Census
from router.jobs.journal import Journal


@dataclass(eq=False)
class UnderWay:
    """To be made on the event loop. left_s: until its window is over; on_disk: bytes of what an earlier server wrote.

    ending: done once it has to end before its last answer, with the code for the lines that are left.
    """

    record: Record
    left_s: float
    on_disk: int
    ending: asyncio.Future[str] = field(init=False)
    task: asyncio.Task[None] | None = None
    journal: Journal | None = None
    _census: Census | None = None

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.ending = loop.create_future()
        self._timer = loop.call_later(max(0.0, self.left_s), self.end, "batch_expired")

    def close(self) -> None:
        """It is over."""
        self._timer.cancel()

    def end(self, code: str) -> None:
        """It has to end; the first reason counts."""
        if not self.ending.done():
            self.ending.set_result(code)

    @property
    def has_begun(self) -> bool:
        """Whether a line may have been sent."""
        return self.record["in_progress_at"] is not None

    @property
    def ends_unbegun(self) -> bool:
        """Whether it has to end, and there is nothing to tell of its lines. May be asked in a thread."""
        return self.ending.done() and not self.has_begun

    async def ends_before(self, task: asyncio.Task[Any]) -> str | None:
        """Wait for a task, or for why the batch has to end before it; then the code of that."""
        await asyncio.wait((task, self.ending), return_when=asyncio.FIRST_COMPLETED)
        return None if task.done() else self.ending.result()

    async def pause(self, seconds: float) -> None:
        """Wait so long, or until it has to end if that is news."""
        if self.ending.done():
            await asyncio.sleep(seconds)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.shield(self.ending)

    def looked_at(self, census: Census) -> None:
        """Its lines are counted."""
        self._census = census

    def num_bytes(self) -> int:
        """What it takes of `batch_max_bytes`, once it has begun."""
        if self.journal is None or self._census is None:
            room: int = self.record["_room"]
            return self.on_disk + room
        state = self.journal.state
        refusals = self.journal.num_left * self._census.most_refusal_bytes
        return state.output_bytes + (state.errors_bytes or 0) + refusals + self._census.ids.num_bytes
