"""A whole server as a user starts it: the launcher, its shards and its router, on loopback, in the test's hands."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx2

ROOT = Path(__file__).parents[1]
PATIENCE_S = 300  # a bound of liveness: a busy machine takes long for what an idle one does at once
SETTINGS_PREFIXES = ("MAX_", "PORT", "NUM_SHARD", "MODEL_ID", "DTYPE", "DEVICE", "HF_", "CUDA_VISIBLE_DEVICES", "LOG_")


class Server:
    """`python launcher.py` with `flags`, ready when the `with` block begins and gone when it ends."""

    def __init__(
        self,
        *flags: str,
        env: dict[str, str] | None = None,
        command: Sequence[str] = (sys.executable, "launcher.py"),
        folder: Path = ROOT,
        ready_within: float = PATIENCE_S,
    ) -> None:
        self.flags = ("--hostname", "127.0.0.1", "--port", "0", "--device", "cpu", *flags)
        self.process = start_launcher(*self.flags, env=env, command=command, folder=folder)
        self.lines: list[str] = []
        self._ready_within = ready_within
        self.url = ""

    def __enter__(self) -> Server:
        assert self.process.stdout is not None
        too_late = threading.Timer(self._ready_within, signal_group, (self.process,))
        too_late.start()
        try:
            for line in self.process.stdout:
                self.lines.append(line)
                if match := re.search(r"Lockstep is ready at (http://\S+) after", line):
                    self.url = match.group(1)
                    return self
        except BaseException:
            kill_group(self.process)
            raise
        finally:
            too_late.cancel()
        kill_group(self.process)
        raise AssertionError(f"not ready: {''.join(self.lines)}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.communicate(timeout=PATIENCE_S)
        finally:
            kill_group(self.process)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to the launcher alone."""
        self.process.send_signal(number)

    def wait(self, timeout: float = PATIENCE_S) -> tuple[int, str]:
        """Exit code and everything that was printed since the server was ready."""
        output, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, output

    def children(self) -> list[int]:
        """Process ids that the launcher started."""
        return children_of(self.process.pid)

    def router(self) -> int:
        """Process id of the router that runs now."""
        return next(pid for pid in self.children() if b"\0router\0" in Path(f"/proc/{pid}/cmdline").read_bytes())

    def shards(self) -> list[int]:
        """Process ids of the shards by rank, as soon as every one runs: a lost one is started again meanwhile."""
        wanted = self._number_of("--num-shard") * self._number_of("--pipeline-parallel")
        deadline = time.monotonic() + PATIENCE_S
        while sorted(found := self.running_shards()) != list(range(wanted)):
            assert time.monotonic() < deadline, f"of {wanted} shards {sorted(found)} run"
            time.sleep(0.02)
        return [found[rank] for rank in range(wanted)]

    def _number_of(self, flag: str) -> int:
        return int(self.flags[self.flags.index(flag) + 1]) if flag in self.flags else 1

    def running_shards(self) -> dict[int, int]:
        """Process ids by rank of the shards that run now."""
        found = {}
        for pid in self.children():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                _, name, state = re.split(r" ?[()] ?", Path(f"/proc/{pid}/stat").read_text())
                if name.startswith("shard-") and state[0] not in "ZX":
                    found[int(name.removeprefix("shard-"))] = pid
        return found

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name and labels."""
        text = httpx2.get(f"{self.url}/metrics", timeout=PATIENCE_S).text
        rows = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in rows}


def start_launcher(
    *flags: str,
    env: dict[str, str] | None = None,
    command: Sequence[str] = (sys.executable, "launcher.py"),
    folder: Path = ROOT,
) -> subprocess.Popen[str]:
    """The launcher with nothing but `env` from its settings' environment; output merged into one pipe.

    It leads a session of its own, so that `kill_group` reaches it and nothing else.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS_PREFIXES)}
    return subprocess.Popen(
        [*command, *flags],
        cwd=folder,
        env=clean | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def kill_group(process: subprocess.Popen[str]) -> None:
    """End the process, whatever it does, and the others of its group; the launcher's children die with the launcher."""
    signal_group(process)
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def signal_group(process: subprocess.Popen[str]) -> None:
    """SIGKILL to the group that the process leads, if there is one still."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    """Direct children of a process, from /proc."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid:
            found.append(int(status.parent.name))
    return found


def open_files(pid: int) -> list[str]:
    """What a process holds, by the kernel's names. What it closes meanwhile is left out."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(descriptor))
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def generate_all(server: Server, requests: list[dict[str, Any]]) -> list[httpx2.Response]:
    """Every request at once."""
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(timeout=300, limits=limits) as client:
        return list(await asyncio.gather(*(client.post(f"{server.url}/generate", json=r) for r in requests)))


def body(inputs: str, **parameters: Any) -> dict[str, Any]:
    """A request body of /generate."""
    return {"inputs": inputs, "parameters": parameters}


def tokens_of(answer: dict[str, Any]) -> list[int]:
    """Token ids of an answer with details."""
    return [token["id"] for token in answer["details"]["tokens"]]


def events_of(lines: Sequence[str]) -> list[dict[str, Any]]:
    """The JSON of every SSE data line."""
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
