"""Batches under way: each a job over a file of the store (`router/jobs/`), from `validating` to its end.

    validating ── in_progress ── finalizing ── completed
        │             ├── (its time is over) ── finalizing ── expired
        │             └── cancelling ────────── finalizing ── cancelled
        ├── failed
        └── (cancelled, or its time is over) ── cancelled, expired: without outputs, as nothing was sent

A batch is a record on the disk and a task. The task may be killed at any moment and begun again from the record: the
job's journal says which lines are answered, and ids of outputs were chosen when the batch was made. The batches of one
key run one after another, those of different keys side by side. While the disk is full a batch waits, and tries again.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from functools import partial
from typing import Any

from router.accounts import Account
from router.batches.answering import Answering, Refusing
from router.batches.documents import CreateBatch
from router.batches.store import FILE_MODE, TERMINAL, Record, Store, new_id
from router.batches.under_way import UnderWay
from router.config import RouterConfig
from router.errors import ValidationError
from router.jobs.census import Census, take_census
from router.jobs.errors import JobError
from router.jobs.journal import Journal, is_disk_full
from router.jobs.lines import LineFile, Problem, Wanted
from router.jobs.results import Reply
from router.jobs.runner import Plan, Runner, Sender
from router.openai.answers import now

WINDOW_S = 24 * 3600
DISK_RETRY_S = 30.0
MOST_AT_ONCE = 16  # batches whose files are open
MOST_ENDING = 4  # beside them: of those that have to end before their turn
MOST_COUNTING = 2  # threads that count lines: not those that uploads, downloads and saves share
FOREVER_S = 10 * 365 * 86400.0  # the window ends a batch, and nothing before it
TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")

# By what is said of the lines that are refused in the end.
ENDS = {None: "completed", "batch_cancelled": "cancelled", "batch_expired": "expired"}

logger = logging.getLogger(__name__)


class NotNeeded(Exception):
    """Nobody needs to know any more what a thread counts: the server ends, or the batch does."""


class _Sender:
    """What a batch's runner sends to."""

    def __init__(self, record: Record, store: Store, answering: Answering, account: Account | None) -> None:
        self._batch, self._store, self._answering, self._account = record["id"], store, answering, account

    async def send(self, wanted: Wanted, request_id: str) -> Reply | Problem:
        """Raises OSError where outputs may not grow."""
        if self._store.is_full:
            raise OSError(errno.ENOSPC, "batch_max_bytes is reached")
        return await self._answering.answer(wanted, request_id, self._batch, self._account)


class Batches:
    """All batches of a server. account_of: of a key's name, None where it is not known any more."""

    def __init__(
        self, store: Store, answering: Answering, account_of: Callable[[str], Account | None], config: RouterConfig
    ) -> None:
        self.store = store
        self._answering = answering
        self._account_of = account_of
        self._concurrency = config.batch_concurrency
        self._saving = asyncio.Lock()
        self._under_way: dict[str, UnderWay] = {}
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # of owners
        self._places = asyncio.Semaphore(MOST_AT_ONCE)
        self._ending_places = asyncio.Semaphore(MOST_ENDING)
        self._counting = ThreadPoolExecutor(MOST_COUNTING, thread_name_prefix="census")
        self._is_closed = False

    def start(self) -> None:
        """Go on with what an earlier server has left."""
        for record in self.store.batches.values():
            if record["status"] not in TERMINAL:
                self._begin(record)

    async def close(self) -> None:
        """Stop all; the next server goes on with them."""
        self._is_closed = True
        while tasks := [work.task for work in self._under_way.values() if work.task is not None]:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(partial(self._counting.shutdown, cancel_futures=True))

    async def create(self, owner: str, asked: CreateBatch) -> Record:
        """A new one, which nobody knows before it is on the disk. Raises NotFound, ValidationError and OSError."""
        if self.store.file(owner, asked.input_file_id)["purpose"] != "batch":
            raise ValidationError("`input_file_id` is no input of a batch: upload a file with the purpose `batch`")
        created = now()
        record = {
            "id": new_id("batch_"),
            "object": "batch",
            "endpoint": asked.endpoint,
            "errors": None,
            "input_file_id": asked.input_file_id,
            "completion_window": asked.completion_window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": created,
            "expires_at": created + WINDOW_S,
            **{f"{name}_at": None for name in TIMES},
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": asked.metadata,
            "owner": owner,
            "_number": self.store.next_number(),
            "_code": None,  # of the lines that are refused in the end, once that is known
            "_output": new_id("file-"),
            "_errors": new_id("file-"),
            "_room": 0,  # bytes that were set aside for errors when it began
        }
        async with self._saving:
            self.store.check_one_more_batch(owner)
            await asyncio.to_thread(self.store.save_batch, record)
            self.store.add_batch(record)
        self._begin(record)
        return record

    async def cancel(self, owner: str, id: str) -> Record:
        """Stop one; its lines without an answer say so. Raises NotFound, ValidationError and OSError."""
        record = self.store.batch(owner, id)
        if record["status"] in (*TERMINAL, "finalizing"):
            raise ValidationError(f"the batch is {record['status']}: there is nothing left of it to cancel")
        if (work := self._under_way.get(id)) is not None:
            work.end("batch_cancelled")
        if record["status"] != "cancelling":
            await self._enter(record, "cancelling")
        return record

    def seen(self, record: Record) -> dict[str, Any]:
        """What its owner is told of it, with the counts of this moment."""
        if (work := self._under_way.get(record["id"])) is not None and work.journal is not None:
            self._count(record, work.journal)
        return {name: value for name, value in record.items() if name != "owner" and not name.startswith("_")}

    # ---------------------------------------------------------------------------------------------------- one batch

    def _begin(self, record: Record) -> None:
        if self._is_closed:
            return  # the next server begins it
        # The time of day is asked once: a clock that is set meanwhile changes no window.
        work = UnderWay(record, record["expires_at"] - now(), self.store.num_bytes_of_outputs(record))
        self._under_way[record["id"]] = work
        if record["status"] == "cancelling":
            work.end("batch_cancelled")
        if work.has_begun:
            self.store.writing[record["id"]] = work.num_bytes
        self._start(work, self._run(work))

    def _start(self, work: UnderWay, doing: Coroutine[Any, Any, None]) -> None:
        work.task = asyncio.create_task(doing)
        work.task.add_done_callback(partial(self._ended, work))

    def _ended(self, work: UnderWay, task: asyncio.Task[None]) -> None:
        """Forget it. What nobody expected fails the batch, and is logged."""
        id, error = work.record["id"], None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("the batch %s failed: %s", id, error, exc_info=error)
            if work.record["status"] not in TERMINAL and not self._is_closed:
                said = "the server could not go on with this batch: its log says why"
                self._start(work, self._lasting(work, partial(self._fail, work.record, "internal_error", said)))
                return
        work.close()
        del self._under_way[id]

    async def _run(self, work: UnderWay) -> None:
        async with self._turn(work):
            try:
                await self._lasting(work, partial(self._answer_all, work))
                return
            except OSError as error:
                failure = ("storage", f"the server's files cannot be used: {error.strerror}")
                logger.error("the batch %s failed: %s", work.record["id"], error)
            except JobError as error:
                failure = ("invalid_input", "the input is not what it was when the batch began")
                logger.error("the batch %s failed: %s", work.record["id"], error)
            await self._lasting(work, partial(self._fail, work.record, *failure))

    async def _lasting(self, work: UnderWay, do: Callable[[], Awaitable[None]]) -> None:
        """Do something, and again while the disk is full."""
        while True:
            try:
                await do()
                return
            except OSError as error:
                if not is_disk_full(error):
                    raise
                logger.error("the batch %s waits: %s", work.record["id"], error)
            await work.pause(DISK_RETRY_S)

    @asynccontextmanager
    async def _turn(self, work: UnderWay) -> AsyncIterator[None]:
        """Wait until this batch may run. One that has to end waits for no turn, but few of those end at a time."""
        async with AsyncExitStack() as stack:

            async def take() -> None:
                await stack.enter_async_context(self._turns[work.record["owner"]])
                await stack.enter_async_context(self._places)

            taking = asyncio.create_task(take())
            try:
                code = await work.ends_before(taking)
            finally:
                taking.cancel()
                await asyncio.gather(taking, return_exceptions=True)
            if code is not None:
                await stack.enter_async_context(self._ending_places)
            yield

    async def _answer_all(self, work: UnderWay) -> None:
        """From wherever it is to its end. Raises OSError and JobError."""
        record, owner = work.record, work.record["owner"]
        account = self._account_of(owner) if owner else None
        if owner and account is None:
            await self._fail(record, "unknown_key", "the API key of this batch is not served any more")
            return
        if work.ends_unbegun or (census := await self._census(work)) is None:
            await self._finish(record, work.ending.result())
            return
        with closing(census.ids):
            if not (work.has_begun or await self._let_begin(work, census)):
                return
            if record["_code"] is None:
                sender = _Sender(record, self.store, self._answering, account)
                record["_code"] = await self._run_job(work, census, sender, may_end=True)
            if record["_code"] is not None:
                await self._save(record)
                await self._run_job(work, census, Refusing(record["_code"]), may_end=False)
        await self._enter(record, "finalizing")
        await self._publish(record)
        await self._finish(record, record["_code"])

    async def _let_begin(self, work: UnderWay, census: Census) -> bool:
        """Let it begin; False where it ended instead. Raises OSError, also where there is no room for it."""
        record, store = work.record, self.store
        record["_room"] = census.num_lines * census.most_refusal_bytes
        room = record["_room"] + census.ids.num_bytes
        if work.ends_unbegun:
            await self._finish(record, work.ending.result())
        elif not census.num_lines:
            await self._fail(record, "empty_file", "the input file has no lines: give each request one")
        elif room > store.bounds.max_bytes // 2:
            said = f"errors of {census.num_lines} lines may need {room} bytes, more than half of `batch_max_bytes`"
            await self._fail(record, "too_many_lines", f"{said} {store.bounds.max_bytes}: split the input")
        elif not store.has_room(record["owner"], room):
            raise OSError(errno.ENOSPC, f"of batch_max_bytes {store.free} bytes are left, and it may need {room}")
        else:
            work.looked_at(census)
            store.writing[record["id"]] = work.num_bytes
            await self._enter(record, "in_progress")
            return True
        return False

    async def _census(self, work: UnderWay) -> Census | None:
        """Its lines, counted in a thread; None where it has to end before that."""
        source = self.store.data_path(work.record["input_file_id"])
        most_table_bytes = self.store.bounds.max_bytes if work.has_begun else self.store.free
        take = partial(
            take_census,
            source,
            self.store.folder,
            self._answering.bounds,
            partial(self._yield, work),
            most_table_bytes,
        )
        try:
            return await asyncio.get_running_loop().run_in_executor(self._counting, take)
        except NotNeeded:
            return None

    def _yield(self, work: UnderWay, share: float) -> None:
        """Between two lines of a census, which a thread counts: let the event loop go on."""
        if self._is_closed or work.ends_unbegun:
            raise NotNeeded
        time.sleep(0)

    async def _run_job(self, work: UnderWay, census: Census, sender: Sender, *, may_end: bool) -> str | None:
        """Answer what is left. Returns why the batch has to end before that, if it may, and does."""
        store, record = self.store, work.record
        output, errors = store.data_path(record["_output"]), store.data_path(record["_errors"])
        with ExitStack() as stack:
            journal = stack.enter_context(closing(Journal(output, errors, census, FILE_MODE)))
            stack.callback(self._count, record, journal)
            work.looked_at(census)
            work.journal = journal
            if journal.state.is_complete:
                return None
            lines = stack.enter_context(closing(LineFile(census.path, self._answering.bounds)))
            plan = Plan(self._concurrency, (record["endpoint"],), give_up_s=FOREVER_S)
            running = asyncio.create_task(Runner(census, lines, journal, sender, plan).run())
            try:
                if may_end and (code := await work.ends_before(running)) is not None:
                    return code
                await running
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
        return None

    async def _publish(self, record: Record) -> None:
        """Make the outputs files of the owner, but for empty ones. Raises OSError."""
        store = self.store
        for name, key, kind in (("_output", "output_file_id", "output"), ("_errors", "error_file_id", "error")):
            if store.data_path(record[name]).stat().st_size:
                about = (record["owner"], record[name], f"{record['id']}_{kind}.jsonl", "batch_output")
                store.add_file(await asyncio.to_thread(store.write_file, *about))
                record[key] = record[name]

    def _count(self, record: Record, journal: Journal) -> None:
        state = journal.state
        record["request_counts"] = {"total": state.num_lines, "completed": state.completed, "failed": state.failed}

    async def _fail(self, record: Record, code: str, message: str) -> None:
        error = {"code": code, "message": message, "line": None, "param": None}
        record["errors"] = {"object": "list", "data": [error]}
        await self._enter(record, "failed")
        self.store.forget_journals(record)

    async def _finish(self, record: Record, code: str | None) -> None:
        record["_code"] = code
        await self._enter(record, ENDS[code])
        self.store.forget_journals(record)

    async def _enter(self, record: Record, status: str) -> None:
        """Raises OSError."""
        record["status"], record[f"{status}_at"] = status, now()
        await self._save(record)

    async def _save(self, record: Record) -> None:
        """One at a time, so that the last one stays."""
        async with self._saving:
            await asyncio.to_thread(self.store.save_batch, dict(record))
