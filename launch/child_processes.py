"""The child processes of one launcher: started, read and reaped by one loop.

One selector watches their pipes and all else that the loop waits for. Shards are forks of the fork server, which is
started when it is first needed.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from launch.fork_server import ForkServer, reap_orphans
from launch.logs import Log
from launch.processes import Child, ChildCommand, start
from launch.timers import TICK_S

PENDING_S, QUIET_S = 0.05, 60.0  # between two looks, while output waits for its reader and else


class Pool:
    """All children of this process."""

    def __init__(self, environment: Mapping[str, str], log: Log) -> None:
        self.fork_server: ForkServer | None = None
        self.gone: list[Child] = []  # ended or killed, and replaced
        self.apart: list[Child] = []  # children that the caller polls itself
        self.selector = selectors.DefaultSelector()
        self._environment = environment
        self._log = log

    def spawn(self, command: ChildCommand, on_fork_server_end: Callable[[Child], None]) -> Child:
        """Start a command. on_fork_server_end: called with a fork server that has ended. Raises OSError."""
        if not command.fork_server:
            return self.listen(start(command, self._environment, self._log))
        if self.fork_server is not None and self.fork_server.process.poll() is not None:
            on_fork_server_end(self.fork_server)
        if self.fork_server is None:
            self.fork_server = ForkServer(command.fork_server, self._environment, self._log)
            self.listen(self.fork_server)
        return self.listen(self.fork_server.fork(command))

    def listen(self, child: Child) -> Child:
        """Read from a child's pipes."""
        for pipe in child.pipes:
            self.selector.register(pipe, selectors.EVENT_READ, child)
        return child

    def wait(self, wakeup: int, seconds: float) -> bytes:
        """Wait until something can be read, so long at most, and read it. Returns the signals that came."""
        patience = PENDING_S if self._log.output.pending else QUIET_S
        if self.fork_server is not None and self.fork_server.is_forking:
            patience = min(patience, TICK_S)
        events = self.selector.select(max(0.0, min(patience, seconds)))
        self._log.flush()
        signals = b""
        for key, _ in events:
            if key.data is None:
                signals += os.read(wakeup, 4096)
            elif not key.data.read(key.fd):
                with suppress(KeyError):  # it is unregistered already
                    self.selector.unregister(key.fd)
        return signals

    def look(self, children: Sequence[Child]) -> Iterator[tuple[Child, bool]]:
        """Each child, and whether it has ended since the last call; then its output is read to the end."""
        if self.fork_server is not None:
            self.fork_server.look()
        for child in children:
            has_ended = child.is_running and child.process.poll() is not None
            if has_ended:
                child.drain()
            yield child, has_ended
        self._forget_gone()
        reap_orphans([*(child.process.pid for child in children), *(child.process.pid for child in self.apart)])

    def _forget_gone(self) -> None:
        """Close the pipes of replaced processes that have ended."""
        for child in self.gone:
            if not child.is_running:
                child.drain()
                for pipe in child.pipes:
                    with suppress(KeyError):
                        self.selector.unregister(pipe)
                child.close()
        self.gone = [child for child in self.gone if child.is_running]

    def close(self, children: Sequence[Child]) -> None:
        """Wait for all processes, which have been killed, and write what is left of their output."""
        for child in children:
            child.process.wait()
            child.drain()
            child.close()
        self.selector.close()
        limit = time.monotonic() + 1.0
        self._log.flush()  # also reports drops, where the last record emptied the backlog
        while self._log.output.pending and time.monotonic() < limit:
            time.sleep(0.01)
            self._log.flush()
