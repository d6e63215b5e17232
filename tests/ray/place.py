"""Commands of a page, typed into a shell of one trial: a home, a folder of Ray and ports of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.ports import free_port
from tests.running import ROOT, children_of

PATIENCE_S = 600  # a bound of liveness: Ray starts a dozen processes for each node


class Place:
    """A user's home and Ray's folder of one trial, which shares no cluster with another, and its app.yaml."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.port = free_port()
        self.app = self.folder / "app.yaml"
        self.yaml = (ROOT / "deploy/ray/app.yaml").read_text().replace("port: 3000", f"port: {self.port}")
        self.app.write_text(self.yaml)
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.env |= {"HOME": folder, "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_COLOR_PREFIX": "0"}
        self.env["PYTHONPATH"] = f"{ROOT}:{ROOT}/deploy/ray"

    def line(self, command: str, instead: dict[str, str] | None = None) -> str:
        """The command with this trial's environment, file and port in place of the page's."""
        changes = {
            ".venv/bin/": f"{Path(sys.executable).parent}/",
            "deploy/ray/app.yaml": str(self.app),
            "127.0.0.1:3000": f"127.0.0.1:{self.port}",
            **(instead or {}),
        }
        for what, other in changes.items():
            assert what in command or what in (".venv/bin/", "deploy/ray/app.yaml", "127.0.0.1:3000"), what
            command = command.replace(what, other)
        return command

    def type(self, command: str, instead: dict[str, str] | None = None, code: int = 0) -> str:
        """What a command prints, which is to end with this code."""
        line = ["bash", "-c", self.line(command, instead)]
        done = subprocess.run(
            line, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def until_status(self, command: str, words: str, seconds: float = PATIENCE_S) -> str:
        """What `serve status` shows, once these words are in it."""
        until = time.monotonic() + seconds
        while not re.search(words, said := self.type(command)):
            assert time.monotonic() < until, f"no {words!r} in {said}"
        return said


class Running:
    """A command in the foreground, and what it has written."""

    def __init__(self, place: Place, line: str) -> None:
        self._log = place.folder / f"log-{time.monotonic_ns()}"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", f"exec {line}"],
                cwd=ROOT,
                env=place.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_for(self, words: str, seconds: float = PATIENCE_S) -> str:
        """All that it has written, once these words are in it."""
        until = time.monotonic() + seconds
        while not re.search(words, said := self._log.read_text(errors="replace")):
            assert time.monotonic() < until and self.process.poll() is None, f"no {words!r} in {said}"
            time.sleep(0.05)
        return said

    def close(self) -> None:
        """Ctrl-C; whoever is still there after a while is killed, and nobody else."""
        family = [self.process.pid, *below(self.process.pid)]
        self.process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def below(pid: int) -> list[int]:
    """Process ids of all that a process has started."""
    return [one for child in children_of(pid) for one in (child, *below(child))]


@contextmanager
def trial() -> Iterator[Place]:
    """A place of its own, with a short name: Ray's sockets lie in it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Place(folder)


@contextmanager
def running(place: Place, command: str, instead: dict[str, str] | None = None) -> Iterator[Running]:
    """What stays in the foreground; Ctrl-C in the end."""
    started = Running(place, place.line(command, instead))
    try:
        yield started
    finally:
        started.close()
