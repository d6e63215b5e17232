"""The processes of one node that a loop watches: how they are started, heard, and buried.

One selector over their pipes and whatever else the loop waits for. A shard is a fork of the nursery, which is started
when it is first needed.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from launch.fork_server import Nursery, reap_strangers
from launch.logs import Log
from launch.processes import Child, ChildCommand, start
from launch.timers import TICK_S

PENDING_S, QUIET_S = 0.05, 60.0  # between two looks, while output waits for its reader and else


class Pool:
    """All children of this process."""

    def __init__(self, environment: Mapping[str, str], log: Log) -> None:
        self.nursery: Nursery | None = None
        self.gone: list[Child] = []  # ended, or killed, and in nobody's place any more
        self.apart: list[Child] = []  # children that somebody else looks after
        self.selector = selectors.DefaultSelector()
        self._environment = environment
        self._log = log

    def spawn(self, command: ChildCommand, lose_nursery: Callable[[Child], None]) -> Child:
        """Start a command. lose_nursery: told of a nursery that has ended before. Raises OSError."""
        if not command.nursery:
            return self.listen(start(command, self._environment, self._log))
        if self.nursery is not None and self.nursery.process.poll() is not None:
            lose_nursery(self.nursery)
        if self.nursery is None:
            self.nursery = Nursery(command.nursery, self._environment, self._log)
            self.listen(self.nursery)
        return self.listen(self.nursery.fork(command))

    def listen(self, child: Child) -> Child:
        """Hear what a child says."""
        for pipe in child.pipes:
            self.selector.register(pipe, selectors.EVENT_READ, child)
        return child

    def wait(self, wakeup: int, seconds: float) -> bytes:
        """Wait until something has come, so long at most, and read it; what came through the pipe of signals."""
        patience = PENDING_S if self._log.output.pending else QUIET_S
        if self.nursery is not None and self.nursery.is_expecting:
            patience = min(patience, TICK_S)
        events = self.selector.select(max(0.0, min(patience, seconds)))
        self._log.flush()
        signals = b""
        for key, _ in events:
            if key.data is None:
                signals += os.read(wakeup, 4096)
            elif not key.data.read(key.fd):
                with suppress(KeyError):  # it saw to that itself
                    self.selector.unregister(key.fd)
        return signals

    def look(self, children: Sequence[Child]) -> Iterator[tuple[Child, bool]]:
        """Each child, and whether it has ended since the last look; then all that it said is there."""
        if self.nursery is not None:
            self.nursery.look()
        for child in children:
            has_ended = child.is_running and child.process.poll() is not None
            if has_ended:
                child.drain()
            yield child, has_ended
        self._forget_gone()
        reap_strangers([*(child.process.pid for child in children), *(child.process.pid for child in self.apart)])

    def _forget_gone(self) -> None:
        """Give back the pipes of processes that have ended and been replaced."""
        for child in self.gone:
            if not child.is_running:
                child.drain()
                for pipe in child.pipes:
                    with suppress(KeyError):
                        self.selector.unregister(pipe)
                child.close()
        self.gone = [child for child in self.gone if child.is_running]

    def close(self, children: Sequence[Child]) -> None:
        """Wait for all processes, which were killed by now, and write what is left of their output."""
        for child in children:
            child.process.wait()
            child.drain()
            child.close()
        self.selector.close()
        limit = time.monotonic() + 1.0
        self._log.flush()  # says what was dropped, too, where the last record took the rest of the backlog with it
        while self._log.output.pending and time.monotonic() < limit:
            time.sleep(0.01)
            self._log.flush()
