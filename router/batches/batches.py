"""Batches under way: each a job over a file of the store (`router/jobs/`), from `validating` to its end.

    validating ── in_progress ── finalizing ── completed
        │             ├── (its time is over) ── finalizing ── expired
        │             └── cancelling ────────── finalizing ── cancelled
        └── failed

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
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from typing import Any

from router.accounts import Account
from router.batches.answering import Answering, Refusing
from router.batches.documents import CreateBatch
from router.batches.store import FILE_MODE, TERMINAL, Record, Store, new_id
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
ENVELOPE_BYTES = 4096  # of a line around its body
FOREVER_S = 10 * 365 * 86400.0  # the window ends a batch, and nothing before it
TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")

# By what is said of the lines that are refused in the end.
ENDS = {None: "completed", "batch_cancelled": "cancelled", "batch_expired": "expired"}

logger = logging.getLogger(__name__)


class Closing(Exception):
    """The server ends; the thread that counts lines is not waited for."""


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
        self._most_line_bytes = config.payload_limit + ENVELOPE_BYTES
        self._concurrency = config.batch_concurrency
        self._saving = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: dict[str, asyncio.Event] = {}
        self._ends: dict[str, float] = {}  # of windows, by the monotonic clock
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # of owners
        self._places = asyncio.Semaphore(MOST_AT_ONCE)
        self._journals: dict[str, Journal] = {}
        self._is_closed = False

    def start(self) -> None:
        """Go on with what an earlier server has left."""
        for record in self.store.batches.values():
            if record["status"] not in TERMINAL:
                self._begin(record)

    async def close(self) -> None:
        """Stop all; the next server goes on with them."""
        self._is_closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def create(self, owner: str, asked: CreateBatch) -> Record:
        """A new one. Raises NotFound, ValidationError and OSError."""
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
        }
        self.store.add_batch(record)
        await self._save(record)
        self._begin(record)
        return record

    async def cancel(self, owner: str, id: str) -> Record:
        """Stop one; its lines without an answer say so. Raises NotFound, ValidationError and OSError."""
        record = self.store.batch(owner, id)
        if record["status"] in (*TERMINAL, "finalizing"):
            raise ValidationError(f"the batch is {record['status']}: there is nothing left of it to cancel")
        self._cancelled[id].set()
        if record["status"] != "cancelling":
            await self._enter(record, "cancelling")
        return record

    def seen(self, record: Record) -> dict[str, Any]:
        """What its owner is told of it, with the counts of this moment."""
        if (journal := self._journals.get(record["id"])) is not None:
            self._count(record, journal)
        return {name: value for name, value in record.items() if name != "owner" and not name.startswith("_")}

    # ---------------------------------------------------------------------------------------------------- one batch

    def _begin(self, record: Record) -> None:
        id = record["id"]
        self._cancelled[id] = asyncio.Event()
        # The time of day is asked once: a clock that is set meanwhile changes no window.
        self._ends[id] = time.monotonic() + record["expires_at"] - now()
        if record["status"] == "cancelling":
            self._cancelled[id].set()
        task = self._tasks[id] = asyncio.create_task(self._run(record))
        task.add_done_callback(lambda done: self._ended(record, done))

    def _ended(self, record: Record, task: asyncio.Task[None]) -> None:
        """Forget the task. What nobody expected fails the batch, and is logged."""
        id = record["id"]
        self._tasks.pop(id, None)
        self._cancelled.pop(id, None)
        self._ends.pop(id, None)
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("the batch %s failed: %s", id, error, exc_info=error)
        if record["status"] not in TERMINAL:
            record["status"] = "failed"  # where the disk is the reason, the next server tries again

    async def _run(self, record: Record) -> None:
        async with self._turn(record):
            while True:
                try:
                    await self._answer_all(record)
                    return
                except OSError as error:
                    if not is_disk_full(error):
                        await self._fail(record, "storage", f"the server's files cannot be used: {error.strerror}")
                        return
                    logger.error("the batch %s waits: %s", record["id"], error)
                except JobError as error:
                    logger.error("the batch %s failed: %s", record["id"], error)
                    await self._fail(record, "invalid_input", "the input is not what it was when the batch began")
                    return
                await asyncio.sleep(DISK_RETRY_S)

    @asynccontextmanager
    async def _turn(self, record: Record) -> AsyncIterator[None]:
        """Wait until this batch may run, or has to end, which needs no turn."""
        async with AsyncExitStack() as stack:

            async def take() -> None:
                await stack.enter_async_context(self._turns[record["owner"]])
                await stack.enter_async_context(self._places)

            taking = asyncio.create_task(take())
            try:
                await self._wait(record, taking)
            finally:
                taking.cancel()
                await asyncio.gather(taking, return_exceptions=True)
            yield

    async def _wait(self, record: Record, task: asyncio.Task[None]) -> str | None:
        """Wait for a task, or for why the batch has to end before it; then the code of that."""
        cancelled = asyncio.create_task(self._cancelled[record["id"]].wait())
        try:
            left = max(0.0, self._ends[record["id"]] - time.monotonic())
            await asyncio.wait((task, cancelled), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return None
            return "batch_cancelled" if cancelled.done() else "batch_expired"
        finally:
            cancelled.cancel()

    async def _answer_all(self, record: Record) -> None:
        """From wherever it is to its end. Raises OSError and JobError."""
        store, owner = self.store, record["owner"]
        account = self._account_of(owner) if owner else None
        if owner and account is None:
            await self._fail(record, "unknown_key", "the API key of this batch is not served any more")
            return
        source = store.data_path(record["input_file_id"])
        census = await asyncio.to_thread(take_census, source, store.folder, self._most_line_bytes, self._yield)
        with closing(census.ids):
            if not census.num_lines:
                await self._fail(record, "empty_file", "the input file has no lines: give each request one")
                return
            if record["status"] == "validating":
                await self._enter(record, "in_progress")
            if record["_code"] is None:
                sender = _Sender(record, store, self._answering, account)
                record["_code"] = await self._run_job(record, census, sender, may_end=True)
            if record["_code"] is not None:
                await self._save(record)
                await self._run_job(record, census, Refusing(record["_code"]), may_end=False)
        await self._enter(record, "finalizing")
        await asyncio.to_thread(self._publish, record)
        await self._enter(record, ENDS[record["_code"]])
        store.forget_journals(record)

    def _yield(self, share: float) -> None:
        """Between two lines of a census, which a thread counts: let the event loop go on, and end with the server."""
        if self._is_closed:
            raise Closing
        time.sleep(0)

    async def _run_job(self, record: Record, census: Census, sender: Sender, *, may_end: bool) -> str | None:
        """Answer what is left. Returns why the batch has to end before that, if it may, and does."""
        store, id = self.store, record["id"]
        output, errors = store.data_path(record["_output"]), store.data_path(record["_errors"])
        with ExitStack() as stack:
            journal = stack.enter_context(closing(Journal(output, errors, census, FILE_MODE)))
            stack.callback(self._count, record, journal)
            if journal.state.is_complete:
                return None
            lines = stack.enter_context(closing(LineFile(census.path, self._most_line_bytes)))
            plan = Plan(self._concurrency, (record["endpoint"],), give_up_s=FOREVER_S)
            running = asyncio.create_task(Runner(census, lines, journal, sender, plan).run())
            self._journals[id] = journal
            store.writing[id] = lambda: journal.state.output_bytes + (journal.state.errors_bytes or 0)
            try:
                if may_end and (code := await self._wait(record, running)) is not None:
                    return code
                await running
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                del self._journals[id], store.writing[id]
        return None

    def _publish(self, record: Record) -> None:
        """Make the outputs files of the owner, but for empty ones. In a thread."""
        for name, key, kind in (("_output", "output_file_id", "output"), ("_errors", "error_file_id", "error")):
            if self.store.data_path(record[name]).stat().st_size:
                self.store.add_file(record["owner"], record[name], f"{record['id']}_{kind}.jsonl", "batch_output")
                record[key] = record[name]

    def _count(self, record: Record, journal: Journal) -> None:
        state = journal.state
        record["request_counts"] = {"total": state.num_lines, "completed": state.completed, "failed": state.failed}

    async def _fail(self, record: Record, code: str, message: str) -> None:
        error = {"code": code, "message": message, "line": None, "param": None}
        record["errors"] = {"object": "list", "data": [error]}
        await self._enter(record, "failed")
        self.store.forget_journals(record)

    async def _enter(self, record: Record, status: str) -> None:
        """Raises OSError."""
        record["status"], record[f"{status}_at"] = status, now()
        await self._save(record)

    async def _save(self, record: Record) -> None:
        """One at a time, so that the last one stays."""
        async with self._saving:
            await asyncio.to_thread(self.store.save_batch, dict(record))
