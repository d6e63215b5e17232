"""Does tasks in processes of their own, at the lowest priority and with bounds on time and memory.

A chat template that loops for ever, or a grammar whose automaton explodes, would hold the interpreter and with it every
stream; a thread can neither be bounded nor ended. A process can: one that exceeds its time is killed, and its parent,
which has imported all that is needed, forks the next. API keys are served by turns (`router/turns.py`), and who stops
waiting for a task that runs ends its process.

Left out: which tasks there are (such as those of `tasks.py`). Nothing is started before `warm_up` or the first task.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from router.aside import TaskError
from router.turns import Turns
from server.process import end_with_parent

ROOT = Path(__file__).parents[2]  # where our packages are
MOST_ANSWER_BYTES = 32 * 2**20
NICENESS = 19  # the lowest priority: at that of the shards it would make their steps twice as long
PATIENCE = 10  # times the seconds of a task that it may take where it gets no time on the cores
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
START_S = 60.0  # for a process to import what it works with, at the lowest priority


class Aside:
    """num: processes at most. seconds: for one task. memory_mb: for one process.

    tasks: the module of the tasks, and what is said to it.
    """

    def __init__(
        self, num: int, seconds: float = 1.0, memory_mb: int = 1024, tasks: tuple[str, str] = ("router.aside.tasks", "")
    ) -> None:
        self._tasks = tasks
        self._seconds = seconds
        self._memory_mb = memory_mb
        self._turns = Turns(num)
        self._idle: deque[_Worker] = deque()
        self._workers: set[_Worker] = set()
        self._ends: set[asyncio.Future[None]] = set()  # of those that are being ended
        self._renewing: set[asyncio.Future[None]] = set()  # of those whose children were killed

    async def warm_up(self) -> None:
        """Have one process ready."""
        async with self._place(""):
            self._idle.append(await self._one())

    async def do(self, task: str, owner: str = "", **arguments: Any) -> Any:
        """The task's result. Raises TaskError where it refuses, takes too long or too much, or fails.

        owner: whose task it is, where keys share the server.
        """
        async with self._place(owner):
            worker = await self._one()
            try:
                answer = await worker.ask({"task": task, **arguments}, self._seconds)
            except BaseException:
                self._renew(worker)
                raise
            self._idle.append(worker)
        if "error" in answer:
            raise TaskError(answer["error"])
        return answer["result"]

    async def close(self) -> None:
        """End all processes."""
        for renewing in tuple(self._renewing):
            renewing.cancel()
        await asyncio.gather(*self._renewing, return_exceptions=True)
        self._idle.clear()
        for worker in tuple(self._workers):
            self._end(worker)
        await asyncio.gather(*self._ends)

    @asynccontextmanager
    async def _place(self, owner: str) -> AsyncIterator[None]:
        await self._turns.enter(owner)
        try:
            yield
        finally:
            self._turns.leave()

    async def _one(self) -> _Worker:
        """A process that is ready, of those that there are or a new one. Raises TaskError."""
        if (worker := self._ready()) is None and self._renewing:
            await asyncio.wait(self._renewing, return_when=asyncio.FIRST_COMPLETED)
            worker = self._ready()
        return worker or await self._start()

    def _ready(self) -> _Worker | None:
        """An idle process, if one lives."""
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive:
                return worker
            self._end(worker)
        return None

    async def _start(self) -> _Worker:
        """A process that is ready. One that ends before, as a fork of a busy process may, is replaced once."""
        try:
            return await self._started()
        except TaskError:
            return await self._started()

    async def _started(self) -> _Worker:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "router.aside", str(NICENESS), str(self._memory_mb), *self._tasks),
            cwd=ROOT,
            stdin=PIPE,
            stdout=PIPE,
            limit=MOST_ANSWER_BYTES,
            preexec_fn=end_with_parent(),
        )
        worker = _Worker(process)
        self._workers.add(worker)
        try:
            await worker.renewed()
        except BaseException:
            self._end(worker)
            raise
        return worker

    def _renew(self, worker: _Worker) -> None:
        """Have another child do what comes; it is idle once that is there."""
        if not worker.is_ready:
            worker.kill()
        renewing = asyncio.ensure_future(self._renewed(worker))
        self._renewing.add(renewing)
        renewing.add_done_callback(self._renewing.discard)

    async def _renewed(self, worker: _Worker) -> None:
        try:
            await worker.renewed()
        except (TaskError, asyncio.CancelledError):  # the next task will have a new one, and say what is wrong
            self._end(worker)
        else:
            self._idle.append(worker)

    def _end(self, worker: _Worker) -> None:
        self._workers.discard(worker)
        end = asyncio.ensure_future(worker.end())
        self._ends.add(end)
        end.add_done_callback(self._ends.discard)


class _Worker:
    """One process and its child, which does the tasks. After a TaskError it must be killed and renewed."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._orders, self._answers = process, process.stdin, process.stdout
        self.is_ready = False  # whether its child waits for a task
        self._child = process.pid  # the child's process id, once there is one

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.returncode is None and not self._orders.is_closing()

    async def ask(self, order: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Its answer. Raises TaskError where none comes in time.

        On busy cores the lowest priority may get next to nothing. Who has not had a tenth of its time by then gets
        more: nearly all that is asked of it takes less than that, and who asks for what has no end waits not much
        longer than on idle ones.
        """
        self.is_ready = False
        try:
            self._orders.write(json.dumps(order).encode() + b"\n")
        except RuntimeError:  # uvloop's, of a pipe whose other end has just gone
            raise TaskError("the process for it has ended: send it again") from None
        reading = asyncio.ensure_future(self._line())
        begun = self.cpu_seconds()
        try:
            for quarter in range(1, 4 * PATIENCE + 1):
                await asyncio.wait((reading,), timeout=seconds / 4)
                if reading.done() or (quarter >= 4 and self.cpu_seconds() - begun > seconds / 10):
                    break
            if not reading.done():
                raise TaskError(f"it takes longer than {seconds:g} s")
            answer = reading.result()
        finally:
            reading.cancel()
        if answer is None or self.is_ready:
            raise TaskError("it takes too much memory, or its result is too long")
        return answer

    def kill(self) -> None:
        """End the child, and with it what it does."""
        if self.is_alive:  # else the child is gone, and its number may be another process's
            with suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)

    async def renewed(self) -> None:
        """Wait for the next child, or the first. Raises TaskError where none comes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                while self.is_alive and not self.is_ready:
                    await self._line()
        if not self.is_ready:
            raise TaskError("the process for it has ended: send it again")

    async def _line(self) -> dict[str, Any] | None:
        """Its next answer; None where there is none, because a child has ended."""
        try:
            line = await self._answers.readline()
        except (ConnectionError, ValueError):  # a line beyond the limit, of which nobody knows where it ends
            line = b""
        if not line:
            await self.end()
            return None
        try:
            answer: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:  # of a child that was killed
            return None
        if "pid" in answer:
            self._child, self.is_ready = answer["pid"], True
        return answer

    def cpu_seconds(self) -> float:
        """What its child has had of the cores."""
        return cpu_seconds(self._child)

    async def end(self) -> None:
        """Kill the process, which may just have gone, and wait until it is gone."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._orders.close()
        await self._process.wait()


def cpu_seconds(pid: int) -> float:
    """What a process has had of the cores; infinity where that is not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return math.inf
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND
