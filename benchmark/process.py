"""Commands of any program, each in a group of processes of its own, and for so many seconds at most.

Whatever a command does, it costs no more than its time and leaves no process. What it prints goes to a descriptor as it
comes. Only Python's own library is imported here (`benchmark/commands/gpu_first.py`).
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmark.result import ROOT
from host.process import end_with_parent

GRACE_S = 5.0  # for what is cut to end by itself
DONE, CUT = "done", "cut"
TAIL_BYTES = 65536  # of a log, in which its last line is


@contextmanager
def started(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: int,
    grace_s: float = GRACE_S,
    folder: Path = ROOT,
) -> Iterator[subprocess.Popen[bytes]]:
    """A command that runs within the block; after it, neither it nor what it has started does. Raises OSError.

    environment: variables beside those of this process. output: a descriptor for all that it prints. folder: where it
    runs, and leaves files that it was not asked for.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=_prepared(environment),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            _signal(process, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        _signal(process, signal.SIGKILL)
        process.wait()


def run_limited(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: int,
    seconds: float,
    grace_s: float = GRACE_S,
    folder: Path = ROOT,
) -> str:
    """Run a command as `started` does; what became of it, in a word or two."""
    try:
        with started(command, environment, output, grace_s, folder) as process:
            code = process.wait(seconds)
    except OSError as error:
        return f"not started: {error.filename}: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"{CUT} after {seconds:.0f} s"
    if code < 0:
        return f"crashed by {_signal_name(-code)}"
    return f"failed with {code}" if code else DONE


def _prepared(environment: Mapping[str, str]) -> Callable[[], None]:
    """What a child runs before its command: it sets its variables, and will end with this process."""
    guard = end_with_parent()

    def prepare() -> None:
        for name, value in environment.items():
            os.putenv(name, value)
        if guard is not None:
            guard()

    return prepare


def _signal_name(number: int) -> str:
    """Those of real time have none."""
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """To the command and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def last_line(log: Path, start: int) -> str:
    """The last line that says something, behind so many bytes; at most 160 characters of it."""
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip()[:160] for line in reversed(lines) if line.strip()), "")
