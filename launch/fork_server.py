"""The launcher's side of `server/fork_server.py`: orders shards from a process that has imported torch, and owns them.

The fork server leaves each fork an orphan, and the launcher adopts orphans: so a fork is a child of the launcher like
any other, and the launcher must also reap orphans that are none of its own. The process id of a fork comes through a
pipe; where that closes without one, the fork has failed. A fork server that has forked once forks again in a moment:
where that takes SILENCE_S, it was stopped by a signal or hangs, and is killed.
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
from launch.timers import SILENCE_S, Watchdog

PID_BYTES = 32  # more than any process id has digits
END_POLL_S = 0.01
SERVER_END_S = 1.0  # for a fork server to end after a fork has failed, unless the fork alone has


class ForkServer(Child):
    """The process that forks shards."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], log: Log) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.setblocking(False)
        with theirs:
            self._own = OwnProcess(argv, environment, stdin=theirs.fileno())
        super().__init__("fork-server", self._own, log)
        self._expected: list[tuple[Child, Fork]] = []  # ordered and not started yet
        self._has_forked = False  # then it has imported its modules, and forking takes no time
        self._watchdog = Watchdog(time.monotonic())

    def fork(self, command: ChildCommand) -> Child:
        """Order a fork. Where this process has ended, the fork ends before it has started. Raises OSError."""
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
        stdout, stderr, pid_pipe = (reader for reader, _ in pipes)
        fork = Fork(self._own, pid_pipe, stdout, stderr)
        child = Child(command.name, fork, self._log)
        if not self._expected:
            self._watchdog = Watchdog(time.monotonic())
        self._expected.append((child, fork))
        return child

    @property
    def is_forking(self) -> bool:
        """Whether a fork is waited for; then `look` has to be called every TICK_S."""
        return bool(self._expected)

    def look(self) -> None:
        """Kill this process, and with it the forks that it owes, where a fork takes too long."""
        for entry in [entry for entry in self._expected if not entry[1].is_pending]:
            self._expected.remove(entry)
            self._has_forked = self._has_forked or entry[1].pid is not None
            self._watchdog.reset()
        if self._expected and self._has_forked and self._watchdog.is_silent(time.monotonic()):
            for child, _ in self._expected:
                child.critical = f"the fork server had not forked it after {SILENCE_S:g} s and was killed"
            self.critical = f"it had not forked a shard after {SILENCE_S:g} s and was killed"
            self._own.kill_group()

    def drain(self) -> None:
        """Read what is left of its output, and the process ids of its forks."""
        super().drain()
        for _, fork in self._expected:
            fork.read_pid()

    def close(self) -> None:
        """Close the socket for orders, too."""
        self._orders.close()
        super().close()


class Fork:
    """A process that a fork server forks; `pid` is None until it has started."""

    def __init__(self, fork_server: OwnProcess, pid_pipe: int, stdout: int, stderr: int) -> None:
        self.pid: int | None = None
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = os.fdopen(stdout, "rb", buffering=0)
        self.stderr: IO[bytes] | None = os.fdopen(stderr, "rb", buffering=0)
        self._pid_pipe = os.fdopen(pid_pipe, "rb", buffering=0)
        self._fork_server = fork_server
        self._is_to_be_killed = False
        self._has_failed = False

    @property
    def is_pending(self) -> bool:
        """Whether its process id may still come."""
        return not self._pid_pipe.closed

    def poll(self) -> int | None:
        """The return code, once it has ended; the fork server's, or 1, if it never started."""
        self.read_pid()
        if self._has_failed and self.returncode is None:
            self.returncode = self._fork_server.returncode  # once the fork server's end has been noticed
        if self.pid is not None and self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        """Wait for the end."""
        while self.pid is None and self.poll() is None:
            self.read_pid(patience=1)
            if self._has_failed and self.returncode is None:
                self._fork_server.wait()
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
        """Send it to the process; one that has not started has nothing to finish and is killed, whatever the signal."""
        if self.poll() is None and self.pid is not None:
            os.kill(self.pid, number)
        elif self.returncode is None:
            self.kill_group()

    def kill_group(self) -> None:
        """SIGKILL to it and what it started; before it has started to the fork server, which may hang."""
        if self.pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        elif self.returncode is None:
            self._is_to_be_killed = True
            self._fork_server.kill_group()

    def read_pid(self, patience: float = 0) -> None:
        """Wait so many seconds at most for its process id, or for the end of the pipe without one."""
        if self._pid_pipe.closed or not select.select([self._pid_pipe], [], [], patience)[0]:
            return
        digits = self._pid_pipe.read(PID_BYTES)
        self._pid_pipe.close()
        if not digits:
            self._has_failed = True
            if not self._fork_server.ends_within(SERVER_END_S):
                self.returncode = 1
            return
        self.pid = int(digits)
        if self._is_to_be_killed:
            self.kill_group()


def reap_orphans(known: Collection[int | None]) -> None:
    """Reap children that have ended and are not known, unless a fork without a known process id may be among them."""
    if None in known:
        return
    while (found := _an_ended_child()) is not None and found not in known:
        os.waitpid(found, 0)


def _an_ended_child() -> int | None:
    with suppress(ChildProcessError):
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return found.si_pid if found is not None else None
    return None
