"""A launcher as a child of this process, in a thread: Serve's event loop has no support for asyncio's subprocesses.

It dies with this process, whatever kills that, and its processes with it. The kernel sends the death signal when the
thread ends that has started it: so that is the one that reads its log to the end.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from host.process import end_with_parent
from launch.commands.batch import READY, RESERVED_FLAGS, STOP_S, server_command

MOST_LINES = 20  # of its log that a ChildError quotes
# The variables that a launcher gets: others may be settings, and were set for the process that started Ray.
KEPT = re.compile(
    r"PATH|HOME|USER|LANG|LC_.*|TZ|TMPDIR|LD_.*|CUDA_.*|NVIDIA_.*|NCCL_.*|HF_.*|PYTHON.*|OMP_.*|VIRTUAL_ENV"
)


class ChildError(RuntimeError):
    """The server has ended, or never was ready."""


class Child:
    """A launcher on a free port of loopback, with a key that only this process knows.

    flags: of the launcher; environment: beside variables of ours that are no settings; say: takes the lines of its log.
    Raises ChildError for reserved flags.
    """

    def __init__(self, flags: Sequence[str], environment: Mapping[str, str], say: Callable[[str], None]) -> None:
        taken = [flag for flag in flags if flag.partition("=")[0].replace("_", "-") in RESERVED_FLAGS]
        if taken:
            raise ChildError(f"{', '.join(taken)}: the replica chooses these itself: leave them out of `flags`")
        self.api_key = secrets.token_urlsafe(24)
        self.url = ""
        self._say = say
        self._lines: list[str] = []
        self._is_settled = threading.Event()
        kept = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
        self._argv, self._environ = server_command(flags, {**kept, **environment}, self.api_key)
        self._process: subprocess.Popen[bytes] | None = None
        self._has_begun = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()
        self._has_begun.wait()

    @property
    def pid(self) -> int:
        """Of the launcher."""
        return self._begun().pid

    def _begun(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ChildError(f"{self._argv[0]} cannot be started")
        return self._process

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._begun().poll()

    def wait_ready(self) -> None:
        """Wait until it serves. Raises ChildError with the end of its log."""
        self._is_settled.wait()
        if not self.url:
            code, log = self._begun().wait(), "\n".join(self._lines[-MOST_LINES:])
            raise ChildError(f"the server ended with code {code} before it was ready:\n{log}")

    def _run(self) -> None:
        """Start it, and read its log to the end: a thread of its own, which lasts as long as the child."""
        try:
            self._process = subprocess.Popen(
                self._argv,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=end_with_parent(),
            )
        finally:
            self._has_begun.set()
            if self._process is None:
                self._is_settled.set()
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            if not self.url:
                self._lines.append(line)
                if (found := READY.search(line)) is not None:
                    self.url = found[1]
                    self._is_settled.set()
            self._say(line)
        self._process.wait()
        self._is_settled.set()

    def end(self, patience_s: float = STOP_S) -> None:
        """Let it end by itself, or kill it with its processes."""
        process = self._begun()
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
