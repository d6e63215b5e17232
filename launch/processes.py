"""One process of a launch: how it is started, what it says, and why it ended."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, Protocol

from host.process import end_with_parent
from launch.config import ROOT, TOKEN_VARIABLES
from launch.files import nameless_file
from launch.logs import Log

SECRET_VARIABLES = ("API_KEY", "CONTINUATION_KEY")  # which the router is told in a file without a name
# How torch's allocator is configured; the first is the name of all devices, from torch 2.9 on.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def child_environment(environ: Mapping[str, str], local_rendezvous: bool) -> dict[str, str]:
    """The launcher's environment without its secrets, and nothing left for a child to look up on the network."""
    child = {name: value for name, value in environ.items() if name not in (*TOKEN_VARIABLES, *SECRET_VARIABLES)}
    path = os.pathsep.join(part for part in (str(ROOT), environ.get("PYTHONPATH", "")) if part)
    child |= {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    child |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if not any(name in child for name in ALLOCATOR_VARIABLES):
        # Pieces of a GPU's memory grow in place: what one step left behind suffices for a larger one.
        child[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    # Such memory can be mapped anew at an address that NCCL has registered for a graph, or torch for all ranks.
    child.setdefault("NCCL_GRAPH_REGISTER", "0")
    child.setdefault("TORCH_SYMMMEM_IMPLICIT_POOL", "0")
    child.setdefault("OPENBLAS_NUM_THREADS", "1")  # of numpy, which are not needed: a fork has no threads of its parent
    child.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # the router's children run other programs; no warning at each
    if local_rendezvous and sys.platform == "linux":
        child.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return child


@dataclass(frozen=True)
class ChildCommand:
    """One process to run: "router", or "shard-0" and so on."""

    name: str
    argv: tuple[str, ...]
    pass_fds: tuple[int, ...] = ()
    has_stdin: bool = False  # a pipe, for `Child.tell`
    secret: str | None = None  # passed in a file without a name, at the path that `--config` names
    node: int | None = None  # the other node that starts it, which knows its `argv`
    fork_server: tuple[str, ...] | None = None  # the command of its fork server; `argv` are the arguments of the fork


class Process(Protocol):
    """What a Child needs of its process, as `subprocess.Popen` has it."""

    returncode: int | None
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    @property
    def pid(self) -> int | None:
        """Its process id, if it has one already."""

    def poll(self) -> int | None:
        """The return code, once it has ended."""

    def wait(self) -> int:
        """Wait for the end."""

    def send_signal(self, number: int) -> None:
        """Send it to the process, unless it has ended."""

    def kill_group(self) -> None:
        """SIGKILL to it and to the processes that it started."""

    def ends_within(self, seconds: float) -> bool:
        """Wait so long at most for its end, which `poll` then notices; whether it came."""


class OwnProcess(subprocess.Popen[bytes]):
    """A command that this process starts. Raises OSError."""

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        stdin: int = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
    ) -> None:
        super().__init__(
            argv,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            pass_fds=pass_fds,
            start_new_session=True,  # a terminal's Ctrl-C reaches the launcher alone
            preexec_fn=end_with_parent(),
        )

    def ends_within(self, seconds: float) -> bool:
        """Wait so long at most for its end, which `poll` then notices. Linux only."""
        if self.returncode is not None:
            return True
        descriptor = os.pidfd_open(self.pid)
        try:
            return bool(select.select([descriptor], [], [], seconds)[0])
        finally:
            os.close(descriptor)

    def kill_group(self) -> None:
        """SIGKILL to it and to the processes that it started. Its end is left for `poll` to notice."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def start(command: ChildCommand, environment: Mapping[str, str], log: Log) -> Child:
    """Start a command. Raises OSError."""
    stdin = subprocess.PIPE if command.has_stdin else subprocess.DEVNULL
    with nameless_file(command.secret or "") as secret:
        argv, descriptors = command.argv, command.pass_fds
        if command.secret is not None:
            argv, descriptors = (*argv, "--config", f"/dev/fd/{secret}"), (*descriptors, secret)
        return Child(command.name, OwnProcess(argv, environment, stdin, descriptors), log)


class Child:
    """A running process: its pipes, the unfinished lines in them, and what it reported about its end."""

    LINE_BYTES = 1 << 20  # a longer line is cut

    def __init__(self, name: str, process: Process, log: Log) -> None:
        self.name = name
        self.process = process
        self.critical: str | None = None
        self.is_consequence = False
        self.num_records = 0  # that have come from it
        self.events: deque[dict[str, Any]] = deque()  # records that the supervisor has to act on
        self._log = log
        self._errors: deque[str] = deque(maxlen=50)
        outputs = (self.process.stdout, self.process.stderr)  # a process of another node has none here
        self.pipes = {output.fileno(): bytearray() for output in outputs if output is not None}
        for pipe in self.pipes:
            os.set_blocking(pipe, False)
        if self.process.stdin is not None:
            os.set_blocking(self.process.stdin.fileno(), False)

    @property
    def title(self) -> str:
        """Its name for people: "shard 0"."""
        return self.name.replace("-", " ")

    @property
    def is_running(self) -> bool:
        """Whether its end has not been noticed yet; `process.poll()` notices it."""
        return self.process.returncode is None

    def read(self, pipe: int) -> bool:
        """Forward what is in one pipe now; False at its end."""
        try:
            data = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return True
        buffer = self.pipes[pipe]
        buffer += data
        *lines, rest = buffer.split(b"\n")
        if rest and (not data or len(rest) > self.LINE_BYTES):
            lines, rest = [*lines, rest], bytearray()
        buffer[:] = rest
        for line in lines:
            self._forward(pipe, line.decode(errors="replace").rstrip("\r"))
        return bool(data)

    def drain(self) -> None:
        """Forward what a finished process left in its pipes; not until their end: a grandchild may hold them open."""
        for pipe in self.pipes:
            while select.select([pipe], [], [], 0)[0] and self.read(pipe):
                pass

    def close(self) -> None:
        """Close our ends of its pipes."""
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream:
                stream.close()

    def tell(self, news: Mapping[str, Any]) -> None:
        """Write one line of JSON to its standard input, as `write` does."""
        self.write(json.dumps(news))

    def write(self, line: str) -> None:
        """Write a line to its standard input, if it has one; a process that has ended or hangs misses it."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            with suppress(OSError):
                os.write(self.process.stdin.fileno(), line.encode() + b"\n")

    def signal(self, number: int) -> None:
        """Send to the process alone; SIGKILL also to the processes that it started."""
        if number == signal.SIGKILL:
            self.process.kill_group()
        elif self.is_running:
            self.process.send_signal(number)

    def _forward(self, pipe: int, line: str) -> None:
        is_error = self.process.stderr is not None and pipe == self.process.stderr.fileno()
        record = None if is_error else _parse_record(line)
        if record is None:
            if is_error:
                self._errors.append(line)
            if line.strip():
                self._log.record(self.name, {"level": "WARN", "message": line})
            return
        self.num_records += 1
        if record.get("level") == "CRITICAL" and self.critical is None:
            self.critical = str(record.get("message", ""))
            self.is_consequence = record.get("consequence") is True
        if "event" in record:
            self.events.append(record)
        if record.get("is_silent") is not True:
            self._log.record(self.name, record)

    @property
    def has_cause(self) -> bool:
        """Whether it ended for a reason of its own that is known, and not because another process did."""
        if self.critical is not None:
            return not self.is_consequence
        return (self.process.returncode or 0) < 0

    @property
    def cause(self) -> str:
        """Why it ended, in one sentence."""
        code = self.process.returncode or 0
        last = self._last_error()
        if self.critical is not None:
            return self.critical
        if code == -signal.SIGKILL and self.name == "router":
            return "killed by signal 9 (SIGKILL), by the system's out-of-memory killer or by hand"
        if code == -signal.SIGKILL:
            return (
                "killed by signal 9 (SIGKILL), by hand or by the system's out-of-memory killer: against that, use a "
                "smaller model, --quantize int8, a lower --max-batch-total-tokens, or a machine with more memory"
            )
        if code == 0:
            return last or "it exited with code 0 without saying why, as after a SIGTERM that was not the launcher's"
        if code < 0:
            return f"killed by signal {-code} ({signal.strsignal(-code)})" + (f": {last}" if last else "")
        return last or f"it exited with code {code} without saying why"

    def _last_error(self) -> str:
        lines = [line.strip() for line in self._errors if line.strip()]
        exceptions = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b", line)]
        return (exceptions or lines or [""])[-1][:500]


def _parse_record(line: str) -> dict[str, Any] | None:
    """The log record in one line of a child's output, if it is one."""
    if not line.startswith("{"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and "message" in record else None
