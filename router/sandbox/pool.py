"""A sandbox: does tasks in processes of their own, at a low priority and with bounds on time and memory.

A chat template that loops for ever, or a grammar whose automaton explodes, would hold the interpreter and with it every
stream; a thread can neither be bounded nor ended. A process can: the fork server (`__main__.py`) has imported all that
is needed and forks a child whenever one is wanted, and a child that exceeds its time is killed. Each child has a
connection of its own, which ends with it, so that no answer reaches the wrong task. API keys take turns
(`workers.py`), and a caller that is cancelled ends the child that works for it. Nobody waits longer than `WAIT_S`.

A child that ends by itself has exceeded a bound of its task. One that was killed or stopped from outside says nothing
about the task: it is done once more by a fresh child, and then refused with 503. A task that is late only because the
cores are busy gets more time, and is refused with 503 in the end, which says that it may be sent again; a fork server
that is, is left alone: another one would begin anew, and be no sooner ready.

Left out: which tasks there are (such as those of `tasks.py`). Nothing is started before `warm_up` or the first task.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from host.process import end_with_parent
from router.errors import Unavailable
from router.sandbox import MOST_ANSWER_BYTES, TaskError, TaskTooLarge
from router.sandbox.workers import FairSemaphore

ROOT = Path(__file__).parents[2]  # where our packages are
NICENESS = 19  # the lowest priority: at that of the shards it would make their steps twice as long
PATIENCE = 10  # times the seconds of a task that may pass until it has had them on the cores
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
START_S = 60.0  # for a fork server to import what its children work with
FORK_S = 10.0  # for it to fork a child once it has
BUSY_S = 60.0  # of CPU time, after which a fork server that still runs is taken for one that would for ever
WAIT_S = 120.0  # for a place, a process and an answer together
FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}  # also the OOM killer's
STOPPED = {"T", "t"}  # by a signal, by a debugger
BUSY = {"R", "D"}  # on the cores or waiting for one, waiting for a disk


class _Lost(Exception):
    """A child or the fork server is gone or stopped, for no reason of the task. The cause is one clause."""


class Sandbox:
    """num: children at most. seconds: for one task, on the cores. memory_mb: for one process.

    tasks: the module of the tasks, and the argument of its `tasks` function. niceness: the children's priority, the
    lowest unless given.
    """

    def __init__(
        self,
        num: int,
        seconds: float = 1.0,
        memory_mb: int = 1024,
        tasks: tuple[str, str] = ("router.sandbox.tasks", ""),
        niceness: int | None = None,
    ) -> None:
        self._arguments = (str(NICENESS if niceness is None else niceness), str(memory_mb), *tasks)
        self._seconds = seconds
        self._semaphore = FairSemaphore(num)
        self._fork_server: _ForkServer | None = None
        self._ended: list[_ForkServer] = []  # fork servers that were killed, until they have ended
        self._idle: list[_Child] = []
        self._children: set[_Child] = set()

    async def warm_up(self) -> None:
        """Have one child ready. Raises Unavailable."""
        async with self._place(""):
            try:
                self._idle.append(await self._new_child())
            except _Lost as lost:
                raise _unavailable(lost) from None

    async def do(self, task: str, owner: str = "", **arguments: Any) -> Any:
        """The task's result. Raises TaskError where it refuses, takes too long or too much, or fails, and Unavailable.

        owner: whose task it is, where keys share the server.
        """
        try:
            async with asyncio.timeout(WAIT_S), self._place(owner):
                answer = await self._answer({"task": task, **arguments})
        except TimeoutError:
            raise _unavailable(_Lost(f"no process had done it within {WAIT_S:g} s")) from None
        if "error" in answer:
            raise (TaskTooLarge if "is_too_large" in answer else TaskError)(answer["error"])
        return answer["result"]

    async def close(self) -> None:
        """End all processes."""
        for child in tuple(self._children):
            self._end(child)
        self._idle.clear()
        if self._fork_server is not None:
            self._end_fork_server(self._fork_server)
        for fork_server in self._ended:
            await asyncio.to_thread(fork_server.process.wait)
        self._ended.clear()

    @asynccontextmanager
    async def _place(self, owner: str) -> AsyncIterator[None]:
        await self._semaphore.enter(owner)
        try:
            yield
        finally:
            self._semaphore.leave()

    async def _answer(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """A child's answer, or that of a fresh one where the first is lost. Raises TaskError and Unavailable."""
        with suppress(_Lost):
            return await self._answer_of(self._idle.pop() if self._idle else await self._new_child(), order)
        try:
            return await self._answer_of(await self._new_child(), order)
        except _Lost as lost:
            raise _unavailable(lost) from None

    async def _answer_of(self, child: _Child, order: Mapping[str, Any]) -> dict[str, Any]:
        """The child's answer, after which it is idle; a child that did not answer is ended, whatever the reason."""
        try:
            answer = await child.ask(order, self._seconds)
        except BaseException:
            self._end(child)
            raise
        self._idle.append(child)
        return answer

    async def _new_child(self) -> _Child:
        """A child that is ready, of another fork server where the present one fails. Raises _Lost."""
        with suppress(_Lost):
            return await self._forked_by(self._living_fork_server())
        return await self._forked_by(self._living_fork_server())

    def _living_fork_server(self) -> _ForkServer:
        if self._fork_server is None or not self._fork_server.is_alive:
            if self._fork_server is not None:
                self._end_fork_server(self._fork_server)
            self._fork_server = _ForkServer(*self._arguments)
        return self._fork_server

    async def _forked_by(self, fork_server: _ForkServer) -> _Child:
        """A child that is ready. Raises _Lost, and then ends the fork server if it has failed."""
        seconds = FORK_S if fork_server.has_forked else START_S
        try:
            async with asyncio.timeout(seconds):
                child = await fork_server.fork()
        except _Lost:
            self._end_fork_server(fork_server)
            raise
        except TimeoutError:
            if not is_busy(fork_server.process.pid):
                self._end_fork_server(fork_server)
            raise _Lost(f"no process for it came within {seconds:g} s") from None
        self._children.add(child)
        return child

    def _end(self, child: _Child) -> None:
        self._children.discard(child)
        child.end()

    def _end_fork_server(self, fork_server: _ForkServer) -> None:
        fork_server.end()
        self._ended = [one for one in (*self._ended, fork_server) if one.process.poll() is None]


class _ForkServer:
    """The process that forks children, which die with it."""

    def __init__(self, *arguments: str) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.setblocking(False)
        self.has_forked = False
        with theirs:
            self.process = subprocess.Popen(
                (sys.executable, "-m", "router.sandbox", *arguments),
                cwd=ROOT,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                preexec_fn=end_with_parent(),
            )

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._orders.fileno() >= 0 and self.process.poll() is None

    async def fork(self) -> _Child:
        """A child that is ready. Raises _Lost."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._orders, [b"+"], [theirs.fileno()])
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=MOST_ANSWER_BYTES)
        except OSError as error:
            ours.close()
            raise _Lost(f"the process that forks others does not answer ({error.strerror})") from None
        except BaseException:
            ours.close()
            raise
        child = _Child(self, reader, writer)
        try:
            await child.begin()
        except BaseException:
            child.end()
            raise
        self.has_forked = True
        return child

    def end(self) -> None:
        """Kill it, and with it its children."""
        self._orders.close()
        self.process.kill()


class _Child:
    """One process that does tasks, and its connection. After anything but an answer it must be ended."""

    def __init__(self, fork_server: _ForkServer, reader: StreamReader, writer: StreamWriter) -> None:
        self._fork_server, self._reader, self._writer = fork_server, reader, writer
        self._num_orders = 0
        self.pid: int | None = None  # once it is ready

    async def begin(self) -> None:
        """Wait until it is ready. Raises _Lost."""
        try:
            self.pid = (await self._line())["pid"]
        except TaskError as error:  # no task is to blame yet
            raise _Lost(str(error)) from None

    async def ask(self, order: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Its answer. Raises TaskError where none comes within so many seconds on the cores, Unavailable, and _Lost.

        On busy cores a low priority may get next to no CPU time. What had too little of it for nearly any task is
        perhaps asked again; what had more is not, so that an endless task is not done twice.
        """
        if self._writer.is_closing():  # where uvloop would raise
            raise _Lost("the process for it has ended")
        self._num_orders += 1
        self._writer.write(json.dumps({"number": self._num_orders, **order}).encode() + b"\n")
        reading = asyncio.ensure_future(self._answer_to(self._num_orders))
        begun = self.cpu_seconds()
        try:
            for quarter in range(1, 4 * PATIENCE + 1):
                await asyncio.wait((reading,), timeout=seconds / 4)
                if reading.done():
                    return reading.result()
                if self.is_stopped():
                    raise _Lost("the process for it was stopped")
                had = self.cpu_seconds() - begun
                if quarter >= 4 and had > seconds:
                    raise TaskTooLarge(f"it takes longer than {seconds:g} s")
            lost = _Lost("the cores are busy, and the process for it got too little time on them")
            raise lost if had < seconds / 10 else _unavailable(lost)
        finally:
            if not reading.cancel() and not reading.cancelled():
                reading.exception()  # retrieved, where the caller was cancelled

    async def _answer_to(self, number: int) -> dict[str, Any]:
        while (answer := await self._line()).get("number") != number:
            pass
        return answer

    async def _line(self) -> dict[str, Any]:
        """The next line. Raises _Lost and TaskError where it has ended."""
        while True:
            try:
                line = await self._reader.readline()
            except ConnectionError:
                line = b""
            except ValueError:  # beyond the limit, which a child keeps to
                raise TaskTooLarge("its result is too long") from None
            if not line.endswith(b"\n"):
                raise _Lost("the process for it has ended")
            with suppress(json.JSONDecodeError):  # of a child that was killed within a line
                said: dict[str, Any] = json.loads(line)
                if "ended" in said:
                    raise _end_of(said["ended"])
                return said

    def end(self) -> None:
        """Kill it. The fork server, while it lives, does not reap it before this end is closed."""
        if self.pid is not None and self._fork_server.is_alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.pid = None
        self._writer.transport.abort()

    def cpu_seconds(self) -> float:
        """CPU time that it has had; infinity where that is not known."""
        return _cpu_seconds(_fields_of(self.pid))

    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal."""
        return is_stopped(self.pid)


def _end_of(status: int) -> Exception:
    """What the end of a child means for its task. status: an exit code, or the negative number of a signal."""
    if is_from_outside(status):
        return _Lost(f"the process for it was ended by {signal.Signals(-status).name}")
    return TaskTooLarge("it takes too much memory, or its result is too long")


def _unavailable(lost: _Lost) -> Unavailable:
    return Unavailable(f"This could not be computed, because {lost}: send it again")


def is_from_outside(status: int) -> bool:
    """Whether a process was ended by another one. status: an exit code, or the negative number of a signal."""
    return -status in FROM_OUTSIDE


def is_stopped(pid: int | None) -> bool:
    """Whether a process was stopped by a signal or a debugger."""
    fields = _fields_of(pid)
    return bool(fields) and fields[0] in STOPPED


def is_busy(pid: int) -> bool:
    """Whether a process that is late still works at what it was started for, or would if the cores were free."""
    fields = _fields_of(pid)
    return bool(fields) and fields[0] in BUSY and _cpu_seconds(fields) < BUSY_S


def _cpu_seconds(fields: Sequence[str]) -> float:
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND if fields else math.inf


def _fields_of(pid: int | None) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty where the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []
