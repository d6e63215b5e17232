"""Runs a job: so many requests at once, each with its retries, and a checkpoint every second.

Requests are sent through a Sender (over HTTP: `launch/commands/batch.py`). Only requests under way and their answers
are in memory, whatever the size of the input.

* 429, 503 and a connection that could not be made mean that the request was not taken: it is sent again without limit,
  when `Retry-After` says or after waits that double.
* A connection that is lost after the request was sent, 408, 424 and other 5xx may be caused by the request: it is tried
  `max_tries` times in all. Its last answer or error is then its line.
* An adapter whose content is another than that of earlier answers stops the job: no output has answers of both.
* 401 concerns all requests and stops the job, as does the lack of any answer for `give_up_s`. A job that has stopped
  can be resumed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from router.jobs.input_index import InputIndex
from router.jobs.journal import Journal
from router.jobs.lines import (
    URLS,
    BatchRequest,
    JobError,
    Line,
    LineFile,
    Problem,
    Reply,
    ServerGone,
    answered,
    problem_line,
    read_request,
)

TRY_LATER = frozenset({429, 503})  # the request was not taken
TRY_AGAIN = frozenset({408, 424, *range(500, 600)}) - TRY_LATER
FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 10.0
CHECKPOINT_S = 1.0
MOST_CAUSE = 200  # characters of an unexpected error

logger = logging.getLogger(__name__)


class NoAnswer(Exception):
    """There is no answer, in one sentence. was_sent: whether the server may have seen the request."""

    def __init__(self, sentence: str, *, was_sent: bool) -> None:
        super().__init__(sentence)
        self.was_sent = was_sent


class Sender(Protocol):
    """Has requests answered by a server."""

    async def send(self, wanted: BatchRequest, request_id: str) -> Reply | Problem:
        """The answer, or why there can be none. Raises NoAnswer after a time-out of its own."""


@dataclass(frozen=True)
class Plan:
    """How a job is run. Times are in seconds; urls: that lines may name; checkpoint_s: between two checkpoints."""

    concurrency: int
    urls: tuple[str, ...] = URLS
    max_tries: int = 5
    give_up_s: float = 3600.0
    checkpoint_s: float = CHECKPOINT_S


class Runner:
    """One job, from where its journal is to its end."""

    def __init__(self, index: InputIndex, lines: LineFile, journal: Journal, sender: Sender, plan: Plan) -> None:
        self._index = index
        self._lines = lines
        self._journal = journal
        self._sender = sender
        self._plan = plan
        self._begun_before = iter(sorted(journal.state.under_way.items()))
        self._reading = asyncio.Lock()
        self._holding = asyncio.Lock()
        self._silent_since: float | None = None
        self.trouble = ""  # why requests are being tried again, for the progress line

    async def run(self) -> None:
        """Answer every line that is left. Raises JobError and OSError, after an attempt to save a checkpoint."""
        try:
            async with asyncio.TaskGroup() as group:  # the first that raises ends the others
                saving = group.create_task(self._save_often())
                await asyncio.wait([group.create_task(self._work()) for _ in range(self._plan.concurrency)])
                saving.cancel()
        except BaseException as error:
            with suppress(OSError):  # the outputs have all that it would
                await asyncio.to_thread(self._journal.save, self._journal.snapshot())
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        self._index.check_unchanged()
        await asyncio.to_thread(self._journal.save, self._journal.snapshot(is_complete=True))

    async def _save_often(self) -> None:
        """Save checkpoints; one that a thread is writing when this is cancelled is written to its end."""
        while True:
            await asyncio.sleep(self._plan.checkpoint_s)
            self._index.check_unchanged()
            await asyncio.to_thread(self._journal.save, self._journal.snapshot())

    async def _work(self) -> None:
        while (line := await self._next()) is not None:
            if line.is_blank or line.number in self._journal.state.answered:
                self._journal.passed(line.number)
                continue
            text, is_failure = await self._answer(line)
            self._journal.write(line.number, text, is_failure=is_failure)

    async def _next(self) -> Line | None:
        """The next line to answer: first those that an earlier run had begun."""
        async with self._reading:
            number, offset = next(self._begun_before, (0, 0))
            if not number:
                number, offset = self._journal.state.next_line, self._journal.state.next_offset
            line = await asyncio.to_thread(self._lines.read, number, offset)
            if line is not None:
                self._journal.begun(line.number, line.offset, line.end)
            return line

    async def _answer(self, line: Line) -> tuple[bytes, bool]:
        """The output line, and whether it says that the request failed. Raises JobError.

        Any other exception becomes the error of this line alone.
        """
        job, custom_id = self._journal.state.job, None
        try:
            found = read_request(line, self._plan.urls, self._lines.most_bytes, self._index.ids.first_line)
            custom_id = found.custom_id
            if isinstance(found, BatchRequest):
                reply = await self._reply(found, f"{job}-{line.number}")
                if isinstance(reply, Reply):
                    await self._hold_to(reply.adapters)
                    return answered(job, line.number, found.custom_id, reply), reply.status != 200
                found = reply
        except JobError:
            raise
        except Exception as error:
            logger.exception("line %d could not be answered", line.number)
            cause = f"{type(error).__name__}: {error}"[:MOST_CAUSE]
            found = Problem(custom_id, "internal_error", f"line {line.number} could not be answered: {cause}")
        return problem_line(job, line.number, found), True

    async def _hold_to(self, adapters: Mapping[str, str]) -> None:
        """Refuse answers of an adapter that is another than it was. Raises JobError.

        What it was is on the disk before the first answer is, so that a job that goes on knows.
        """
        if not adapters:
            return
        async with self._holding:
            are_new = [self._journal.hold_to(name, key) for name, key in adapters.items()]
            if any(are_new):
                await asyncio.to_thread(self._journal.save, self._journal.snapshot())

    async def _reply(self, wanted: BatchRequest, request_id: str) -> Reply | Problem:
        waits, num_tries = _waits(), 0
        while True:
            retry_after = None
            try:
                found = await self._sender.send(wanted, request_id)
            except NoAnswer as lost:
                self.trouble, num_tries = str(lost), num_tries + lost.was_sent
                if num_tries >= self._plan.max_tries:
                    sentence = f"there was no answer in {num_tries} tries, at last: {lost}"
                    return Problem(wanted.custom_id, "no_answer", sentence)
            else:
                if isinstance(found, Problem) or self._is_last(found, num_tries):
                    self.trouble = ""
                    return found
                retry_after = found.retry_after_s
                num_tries += found.status in TRY_AGAIN
            self._check_patience()
            await asyncio.sleep(max(next(waits), retry_after or 0))

    def _is_last(self, reply: Reply, num_tries: int) -> bool:
        """Whether this answer is final. Raises ServerGone."""
        if reply.status == 401:
            raise ServerGone("the server says that the API key is missing or wrong: give --api-key, then start again")
        if reply.status in TRY_LATER:
            self.trouble = f"the server answers {reply.status}"
            if reply.status == 429:
                self._silent_since = None
            return False
        self._silent_since = None
        return reply.status not in TRY_AGAIN or num_tries + 1 >= self._plan.max_tries

    def _check_patience(self) -> None:
        now = time.monotonic()
        self._silent_since = self._silent_since or now
        if now - self._silent_since > self._plan.give_up_s:
            raise ServerGone(f"{self.trouble}, for {self._plan.give_up_s:g} s: see to the server, then start again")


def _waits() -> Iterator[float]:
    """Seconds that double, each a little less or more, so that not all requests come back at once."""
    wait = FIRST_WAIT_S
    while True:
        yield wait * random.uniform(0.5, 1)
        wait = min(2 * wait, LONGEST_WAIT_S)
