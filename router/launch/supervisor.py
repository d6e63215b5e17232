"""Runs the processes of a launch until a signal or a failure, and leaves none behind.

One thread: a selector over the children's pipes and a wake-up pipe for signals, so there is nothing to lock.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto

from router.launch.logs import Log
from router.launch.processes import Child, ChildCommand
from router.launch.terminal import printable


class Phase(Enum):
    """Where a launch stands."""

    STARTING = auto()
    SERVING = auto()
    FAILING = auto()  # something ended by itself; another process may still say why
    DRAINING = auto()  # the router finishes its requests
    STOPPING = auto()  # every process is told to end


class Supervisor:
    """Runs the processes until a signal or a failure, and leaves none behind.

    After a failure, `failure` is the sentence that says whose it was and why.
    """

    def __init__(
        self,
        commands: Sequence[ChildCommand],
        environment: Mapping[str, str],
        log: Log,
        *,
        drain_seconds: float,
        on_ready: Callable[[], None] = lambda: None,
        stop_seconds: float = 10.0,
    ) -> None:
        self.failure: str | None = None
        self._commands = commands
        self._environment = environment
        self._log = log
        self._drain_seconds = drain_seconds
        self._on_ready = on_ready
        self._stop_seconds = stop_seconds
        self._phase = Phase.STARTING
        self._children: list[Child] = []
        self._failed: list[Child] = []  # in the order in which they ended
        self._verb = "stopped"
        self._exit_code = 0
        self._deadline = math.inf
        self._at_deadline: Callable[[], None] = self._kill
        self._selector = selectors.DefaultSelector()

    def run(self, wakeup: int) -> int:
        """Start all processes and watch them until the last has ended; returns the exit code.

        `wakeup` is the pipe into which `signals_to_pipe` writes the number of each signal.
        """
        self._selector.register(wakeup, selectors.EVENT_READ)
        try:
            for command in self._commands:
                self._spawn(command)
            while any(child.is_running for child in self._children):
                self._turn(wakeup)
            if self._phase is Phase.FAILING:  # all of them ended before anybody was blamed
                self._fail()
        finally:
            self._kill()
            self._finish()
        return self._exit_code

    def _spawn(self, command: ChildCommand) -> None:
        child = Child(command, self._environment, self._log)
        self._children.append(child)
        for pipe in child.pipes:
            self._selector.register(pipe, selectors.EVENT_READ, child)

    def _turn(self, wakeup: int) -> None:
        """Wait for output, signals, ends of processes or the deadline, and act on what has come."""
        patience = 0.05 if self._log.output.pending else 60.0
        events = self._selector.select(max(0.0, min(patience, self._deadline - time.monotonic())))
        self._log.flush()
        for key, _ in events:
            if key.data is None:
                self._take_signals(os.read(wakeup, 4096))
            elif not key.data.read(key.fd):
                self._selector.unregister(key.fd)
        self._notice_ready()
        for child in self._children:
            if child.is_running and child.process.poll() is not None:
                self._take_exit(child)
        if time.monotonic() >= self._deadline:
            self._deadline = math.inf
            self._at_deadline()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        """Set the one deadline, in place of any other."""
        self._deadline = time.monotonic() + seconds
        self._at_deadline = action

    def _notice_ready(self) -> None:
        if self._phase is Phase.STARTING and any(c.is_ready for c in self._children if c.name == "router"):
            self._phase = Phase.SERVING
            self._on_ready()

    def _take_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGCHLD:
                continue
            if self._phase in (Phase.STARTING, Phase.SERVING) and number != signal.SIGQUIT:
                self._stop(number)
            else:
                self._exit_code = 128 + number
                self._kill()

    def _stop(self, number: int) -> None:
        """Act on the first signal: end at once while nothing can be running yet, else let the router drain."""
        name = signal.Signals(number).name
        if self._phase is Phase.STARTING:
            self._log.info(f"{name}: stopping before the model is ready")
            self._stop_all(2.0)
            return
        self._phase = Phase.DRAINING
        self._log.info(f"{name}: running requests may finish within {self._drain_seconds:g} s; once more to abort")
        for child in self._children:
            if child.name == "router":
                child.signal(signal.SIGTERM)
        self._after(self._drain_seconds + self._stop_seconds, self._kill_router)

    def _kill_router(self) -> None:
        for child in self._children:
            if child.name == "router":
                child.critical = f"it had not finished its requests after {self._drain_seconds:g} s and was killed"
                child.signal(signal.SIGKILL)

    def _stop_all(self, patience: float) -> None:
        self._phase = Phase.STOPPING
        for child in self._children:
            child.signal(signal.SIGTERM)
        self._after(patience, self._kill)

    def _kill(self) -> None:
        self._phase = Phase.STOPPING
        for child in self._children:
            child.signal(signal.SIGKILL)

    def _take_exit(self, child: Child) -> None:
        """A process has ended: as it was told to, or as the first sign of a failure."""
        child.drain()
        if self._phase is Phase.STOPPING:
            return
        if self._phase is Phase.DRAINING and child.name == "router":
            if child.process.returncode:
                self._blame(child)
            self._stop_all(self._stop_seconds)
            return
        self._failed.append(child)
        if self._phase is not Phase.FAILING:
            self._verb = "cannot start" if self._phase is Phase.STARTING else "stopped"
            self._phase = Phase.FAILING
            self._after(1.0, self._fail)  # a rank that only lost its peers may be noticed before the one that failed
        if child.has_cause:
            self._fail()

    def _fail(self) -> None:
        """Blame whoever failed for a reason of its own, else whoever failed first, and end everything."""
        culprit = next((c for c in self._failed if c.has_cause), None)
        culprit = culprit or next((c for c in self._failed if not c.is_consequence), self._failed[0])
        self._blame(culprit)
        self._kill()

    def _blame(self, child: Child) -> None:
        self.failure = f"{child.title} {self._verb}: {printable(child.cause)}"
        self._exit_code = 1

    def _finish(self) -> None:
        """Wait for all processes, which were killed by now, and write what is left of their output."""
        for child in self._children:
            child.process.wait()
            child.drain()
            child.close()
        self._selector.close()
        limit = time.monotonic() + 1.0
        while self._log.output.pending and time.monotonic() < limit:
            time.sleep(0.01)
            self._log.flush()
