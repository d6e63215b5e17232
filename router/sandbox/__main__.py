"""The fork server of the sandbox: `python -m router.sandbox NICENESS MEMORY_MB MODULE ARGUMENT`, started by `pool.py`.

It imports what tasks need. Then it reads messages from standard input, a socket: each brings a connection, for which it
forks a child. A child sends {"pid": …} once it is ready. Then it reads one line of JSON for each task and answers with
one: its number, and {"result": …} or {"error": "…"}. All have the given memory limit. Children alone have the given
priority: what is imported is no client's, and at a low one it would take minutes where the cores are busy.

When a child ends, the fork server sends {"ended": STATUS} on the child's connection: an exit code or the negative
number of a signal. It does not reap the child before the pool has closed its end of the connection, so that a kill that
comes late cannot hit another process with the same id.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from host.process import end_with_parent, lower_priority
from router.sandbox import MOST_ANSWER_BYTES, STACK_BYTES, Task, TaskError

MEGABYTE = 2**20


def main() -> int:
    """Fork children until the pool closes its end. Returns the exit code."""
    niceness, memory_mb, module, argument = sys.argv[1:]
    most = int(memory_mb) * MEGABYTE
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    _, most_stack = resource.getrlimit(resource.RLIMIT_STACK)
    if most_stack == resource.RLIM_INFINITY or most_stack > STACK_BYTES:
        resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    sys.stdout = sys.stderr  # what a library prints
    tasks = importlib.import_module(module).tasks(argument)
    connection = ForkServer().run()
    if connection is None:
        return 0
    lower_priority(int(niceness))
    serve(tasks, connection)
    os._exit(0)


class ForkServer:
    """Forks children, each with a connection."""

    def __init__(self) -> None:
        self._orders = socket.socket(fileno=os.dup(0))
        self._wakeup, writing = os.pipe()  # has a byte whenever a child has ended
        for end in (self._wakeup, writing):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._poll = select.poll()
        self._poll.register(self._orders, select.POLLIN)
        self._poll.register(self._wakeup, select.POLLIN)
        self._connections: dict[int, tuple[int, socket.socket]] = {}  # by descriptor: a child, and its connection
        self._reported: set[int] = set()  # children whose end was reported

    def run(self) -> socket.socket | None:
        """Returns the connection in a child, and None in the fork server once the pool has closed its end."""
        end_with_this = end_with_parent()
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._wakeup:
                    os.read(self._wakeup, 4096)
                    self._report_ends()
                elif descriptor in self._connections:
                    self._reap(descriptor)
                elif descriptor == self._orders.fileno():
                    order, descriptors, _, _ = socket.recv_fds(self._orders, 1, 1)
                    if not order:
                        return None
                    connection = socket.socket(fileno=descriptors[0])
                    try:
                        child = os.fork()
                    except OSError:  # which the pool notices by the connection's end
                        connection.close()
                        continue
                    if not child:
                        if end_with_this is not None:
                            end_with_this()
                        self._close_all()
                        return connection
                    self._connections[connection.fileno()] = child, connection
                    self._poll.register(connection, 0)  # for its hang-up alone

    def _report_ends(self) -> None:
        """Report how children have ended, without reaping them."""
        for child, connection in self._connections.values():
            ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None and child not in self._reported:
                self._reported.add(child)
                status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                with suppress(OSError):  # the buffer may be full of an answer's first part
                    connection.send(f"\n{json.dumps({'ended': status})}\n".encode(), socket.MSG_DONTWAIT)
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)

    def _reap(self, descriptor: int) -> None:
        """The pool has closed its end: kill the child, if it still runs, and reap it."""
        child, connection = self._connections.pop(descriptor)
        self._poll.unregister(descriptor)
        connection.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        self._reported.discard(child)

    def _close_all(self) -> None:
        """In a child: close what belongs to the fork server and to other children."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for _, connection in self._connections.values():
            connection.close()
        self._orders.close()
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)


def serve(tasks: Mapping[str, Task], connection: socket.socket) -> None:
    """Do tasks until the connection ends. An incomplete line is ignored."""
    with connection, connection.makefile("r", encoding="utf-8") as orders, suppress(ConnectionError):
        _say(connection, {"pid": os.getpid()})
        for line in orders:
            if line.endswith("\n"):
                order = json.loads(line)
                _say(connection, {"number": order.pop("number"), **_answer(tasks, order)})


def _say(connection: socket.socket, answer: dict[str, Any]) -> None:
    line = json.dumps(answer)
    if len(line) >= MOST_ANSWER_BYTES:
        line = json.dumps({"number": answer["number"], "error": "its result is too long"})
    connection.sendall(line.encode() + b"\n")


def _answer(tasks: Mapping[str, Task], order: dict[str, Any]) -> dict[str, Any]:
    task = tasks[order.pop("task")]
    try:
        return {"result": task(**order)}
    except TaskError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": "it takes too much memory", "is_too_large": True}


if __name__ == "__main__":
    sys.exit(main())
