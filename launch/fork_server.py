"""The launcher's side of `server/fork_server.py`: orders shards from a process that has imported torch, and owns them.

A fork is as much a child of the launcher as a process that it started itself, because the nursery leaves it an orphan
and the launcher adopts orphans; so must it reap those that others leave. Until a fork is born nobody knows its process
id: it comes through a pipe, whose end without one says that there will be none. A nursery that has borne one bears
another in a moment: where it takes `SILENCE_S`, somebody has stopped it, and it is killed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import IO

from launch.logs import Log
from launch.processes import Child, ChildCommand, OwnProcess
from launch.timers import SILENCE_S, Pulse

PID_BYTES = 32  # more than any process id has digits
END_POLL_S = 0.01
NURSERY_END_S = 1.0  # in which a nursery that let go of a fork ends, unless it was the fork alone that ended


class Nursery(Child):
    """The process that forks, and what it says."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], log: Log) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.setblocking(False)
        with theirs:
            self._own = OwnProcess(argv, environment, stdin=theirs.fileno())
        super().__init__("nursery", self._own, log)
        self._expected: list[tuple[Child, Fork]] = []  # ordered and not born yet
        self._has_borne = False  # it has imported what it has to then, and nothing else may take long
        self._pulse = Pulse(time.monotonic())

    def fork(self, command: ChildCommand) -> Child:
        """Order a fork. Where none can come, for this process has ended, it ends before it is born. Raises OSError."""
        pipes = [os.pipe() for _ in range(3)]
        try:
            with suppress(ConnectionError):
                order = json.dumps(command.argv).encode()
                socket.send_fds(self._orders, [order], [writer for _, writer in pipes])
        except OSError:
            for reader, _ in pipes:
                os.close(reader)
            raise
        finally:
            for _, writer in pipes:
                os.close(writer)
        stdout, stderr, birth = (reader for reader, _ in pipes)
        fork = Fork(self._own, birth, stdout, stderr)
        child = Child(command.name, fork, self._log)
        if not self._expected:
            self._pulse = Pulse(time.monotonic())
        self._expected.append((child, fork))
        return child

    @property
    def is_expecting(self) -> bool:
        """Whether a birth is waited for; then `look` has to be called every TICK_S."""
        return bool(self._expected)

    def look(self) -> None:
        """Kill this process, and what it has not borne, where a birth takes too long: it is stopped or stuck."""
        for birth in [birth for birth in self._expected if not birth[1].is_awaited]:
            self._expected.remove(birth)
            self._has_borne = self._has_borne or birth[1].pid is not None
            self._pulse.sign()
        if self._expected and self._has_borne and self._pulse.is_silent(time.monotonic()):
            for child, _ in self._expected:
                child.critical = f"the nursery had not forked it after {SILENCE_S:g} s and was killed"
            self.critical = f"it had not forked a shard after {SILENCE_S:g} s and was killed"
            self._own.kill_group()

    def drain(self) -> None:
        """Read what is left of its output, and which forks it has borne."""
        super().drain()
        for _, fork in self._expected:
            fork.read_birth()

    def close(self) -> None:
        """Order nothing any more."""
        self._orders.close()
        super().close()


class Fork:
    """A process that a nursery forks; `pid` is None until it is born."""

    def __init__(self, nursery: OwnProcess, birth: int, stdout: int, stderr: int) -> None:
        self.pid: int | None = None
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = os.fdopen(stdout, "rb", buffering=0)
        self.stderr: IO[bytes] | None = os.fdopen(stderr, "rb", buffering=0)
        self._birth = os.fdopen(birth, "rb", buffering=0)
        self._nursery = nursery
        self._is_doomed = False
        self._is_stillborn = False

    @property
    def is_awaited(self) -> bool:
        """Whether its birth may still come."""
        return not self._birth.closed

    def poll(self) -> int | None:
        """The return code, once it has ended; the nursery's, or 1, if it was never born."""
        self.read_birth()
        if self._is_stillborn and self.returncode is None:
            self.returncode = self._nursery.returncode  # once the nursery's end has been noticed
        if self.pid is not None and self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        """Wait for the end."""
        while self.pid is None and self.poll() is None:
            self.read_birth(patience=1)
            if self._is_stillborn and self.returncode is None:
                self._nursery.wait()
        if self.returncode is None:
            assert self.pid is not None
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def ends_within(self, seconds: float) -> bool:
        """Wait so long at most for its end; whether it came."""
        until = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < until:
            time.sleep(END_POLL_S)
        return self.returncode is not None

    def send_signal(self, number: int) -> None:
        """Send it to the process; one that is not born yet has nothing to finish and will not live."""
        if self.poll() is None and self.pid is not None:
            os.kill(self.pid, number)
        elif self.returncode is None:
            self.kill_group()

    def kill_group(self) -> None:
        """SIGKILL to it and what it started; before its birth to the nursery, which may be stuck."""
        if self.pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        elif self.returncode is None:
            self._is_doomed = True
            self._nursery.kill_group()

    def read_birth(self, patience: float = 0) -> None:
        """Wait so many seconds at most for the news of its birth, or that there will be none."""
        if self._birth.closed or not select.select([self._birth], [], [], patience)[0]:
            return
        digits = self._birth.read(PID_BYTES)
        self._birth.close()
        if not digits:
            self._is_stillborn = True
            if not self._nursery.ends_within(NURSERY_END_S):
                self.returncode = 1
            return
        self.pid = int(digits)
        if self._is_doomed:
            self.kill_group()


def reap_strangers(known: Collection[int | None]) -> None:
    """Forget children that have ended and are none of ours, unless one that is not born yet may be among them."""
    if None in known:
        return
    while (found := _an_ended_child()) is not None and found not in known:
        os.waitpid(found, 0)


def _an_ended_child() -> int | None:
    with suppress(ChildProcessError):
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return found.si_pid if found is not None else None
    return None
