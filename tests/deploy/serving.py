"""A server in a tree of files, as a container has it: what it must do, and what it must not be able to."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tests.deploy.container import Start
from tests.deploy.dockerfile import Image
from tests.running import ROOT, Server, children_of

READY_SECONDS = 300
PROMPT = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 40, "details": True}}
REQUEST = """
import json, sys, urllib.request
body, url = sys.argv[1].encode(), "http://127.0.0.1:3000/generate"
request = urllib.request.Request(url, body, {"content-type": "application/json"})
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""
INSTALLED = "import importlib.metadata as m; print(*sorted(f'{d.name}=={d.version}' for d in m.distributions()))"
COMPILERS = ("cc", "gcc", "g++", "c++", "cpp", "clang", "tcc", "as", "ld", "make", "cmake", "pip", "pip3", "curl")


class Container:
    """The process that a tree's image starts, as number 1 of its own processes."""

    def __init__(self, tree: Path, image: Image, folder: Path):
        self.tree, self.image = tree, image
        command = (*image.entrypoint, *image.command)
        start = Start(str(tree), command, image.env, image.folder, image.user, {}, image.volumes, True, True)
        self.lines: list[str] = []
        self._is_ready, self._started = threading.Event(), time.monotonic()
        self.process = subprocess.Popen(
            start.argv(folder / "start.json"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if "Lockstep is ready" in line:
                self._is_ready.set()
        self._is_ready.set()  # it has ended

    def wait_until_ready(self) -> float:
        """Seconds since it was started. Raises AssertionError if it ends, or takes too long."""
        assert self._is_ready.wait(READY_SECONDS) and self.process.poll() is None, "".join(self.lines)
        return time.monotonic() - self._started

    @property
    def pid(self) -> int:
        """The launcher, by the host's number."""
        [pid] = children_of(self.process.pid)
        return pid

    def run(self, *command: str, user: str | None = None) -> subprocess.CompletedProcess[str]:
        """What `docker exec` does: a command beside the server, by default as its user."""
        uid, _, gid = (user or self.image.user).partition(":")
        place = ("--target", str(self.pid), "--mount", "--pid", "--net", "--ipc", "--uts", "--root", "--wd=/")
        env = ["/usr/bin/env", "-i", *(f"{name}={value}" for name, value in self.image.env.items())]
        whole = ["nsenter", *place, "--setuid", uid, "--setgid", gid, *env, *command]
        return subprocess.run(whole, capture_output=True, text=True, timeout=120)

    def stop(self) -> tuple[int, float]:
        """Its exit code after the image's signal, and the seconds that it took. Raises TimeoutExpired."""
        started = time.monotonic()
        subprocess.run(["kill", "-s", self.image.stop_signal.removeprefix("SIG"), str(self.pid)], check=True)
        code = self.process.wait(120)
        self._reader.join()
        return code, time.monotonic() - started

    def end(self) -> None:
        """End it if it runs. All processes of its namespace end with number 1; `unshare` alone would leave them,
        for what it asks of the kernel is forgotten when number 1 becomes another user."""
        for pid in children_of(self.process.pid):
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self._reader.join()


@contextmanager
def container(tree: Path, image: Image, folder: Path) -> Iterator[Container]:
    """A started one, which is ended whatever happens."""
    started = Container(tree, image, folder)
    try:
        yield started
    finally:
        started.end()


def ask(tree: Path, image: Image, folder: Path) -> None:
    """All that is asked of an image's tree; prints what it finds. Raises AssertionError with what is wrong."""
    check_contents(tree)
    with container(tree, image, folder) as server:
        print(f"ready after {server.wait_until_ready():.1f} s")
        check_installed(server)
        check_health(server)
        check_rights(server)
        check_tokens(server)
        code, seconds = server.stop()
    assert code == 0, f"exit code {code} after {image.stop_signal}: {''.join(server.lines[-5:])}"
    print(f"{image.stop_signal}: exit code 0 after {seconds:.1f} s")
    with container(tree, replace(image, command=("--model-id", "no-such-model/at-all")), folder) as refused:
        code = refused.process.wait(120)
        refused.end()
    assert code == 1 and "error: " in refused.lines[-1], refused.lines
    print(f"a model that cannot be had: exit code 1, {refused.lines[-1].strip()}")


def check_contents(tree: Path) -> None:
    """No compiler and no installer; the sizes."""
    names = [tree / folder / name for folder in ("usr/bin", "usr/local/bin", "opt/lockstep/bin") for name in COMPILERS]
    assert not (found := [str(path) for path in names if path.exists()]), f"not needed to serve: {found}"
    rows = [("the whole tree", tree), *((name, tree / name) for name in ("usr", "opt/lockstep"))]
    [packages] = (tree / "opt/lockstep/lib").glob("python3*/site-packages")
    largest = sorted(((size_of(path), path) for path in packages.iterdir()), reverse=True)[:5]
    for name, size in [*((name, size_of(path)) for name, path in rows), *((path.name, size) for size, path in largest)]:
        print(f"{size / 1e6:7.0f} MB  {name}", flush=True)
    pipe = f"tar --create --one-file-system --directory {tree} . | gzip -6 | wc --bytes"
    packed = subprocess.run(["/bin/sh", "-c", pipe], stdout=subprocess.PIPE, check=True)
    print(f"{int(packed.stdout) / 1e6:7.0f} MB  compressed, as a registry has it", flush=True)


def size_of(path: Path) -> int:
    """Bytes of the files below a path, each counted once."""
    command = ["du", "--summarize", "--bytes", "--one-file-system", str(path)]
    return int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.split()[0])


def check_installed(server: Container) -> None:
    """Every package is of the version that constraints.txt has."""
    found = server.run("python", "-c", INSTALLED).stdout.split()
    pinned = dict(re.findall(r"^([\w.-]+)==([^;\s]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pinned = {canonical(name): version for name, version in pinned.items()}
    wrong = [
        one for one in found
        for name, version in [one.split("==")]
        if canonical(name) != "lockstep" and pinned.get(canonical(name)) != version.partition("+")[0]
    ]  # fmt: skip
    assert not wrong, f"not as in constraints.txt: {wrong}"
    print(f"{len(found)} packages, all as in constraints.txt")


def canonical(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def check_health(server: Container) -> None:
    """The image's own check passes; it says no where nobody listens."""
    healthy = server.run(*server.image.health)
    assert healthy.returncode == 0, healthy
    refused = server.run("/usr/bin/env", "PORT=1", *server.image.health)
    assert refused.returncode == 1 and "no answer from port 1" in refused.stderr, refused
    print(f"healthy, by {' '.join(server.image.health)}")


def check_rights(server: Container) -> None:
    """The user is nobody special, the root cannot be written to by anyone, and the volumes can."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    user, _, _ = server.image.user.partition(":")
    assert re.search(rf"^Uid:\t{user}\t{user}\t{user}\t{user}$", status, re.MULTILINE), status
    assert "\nCapEff:\t0000000000000000\n" in status and "\nNoNewPrivs:\t1\n" in status, status
    for place in ("/file", "/opt/lockstep/file", "/usr/file", "/home/file"):
        tried = server.run("/usr/bin/touch", place, user="0:0")
        assert "Read-only file system" in tried.stderr, (place, tried)
    for volume in server.image.volumes:
        assert server.run("/usr/bin/touch", f"{volume}/file").returncode == 0, volume
    print(f"user {server.image.user}, no capabilities, nothing but {', '.join(server.image.volumes)} can be written to")


def check_tokens(server: Container) -> None:
    """The tokens of a server that this checkout starts here, by kernels that were compiled in the image."""
    [start] = [line for line in server.lines if "compiled kernels" in line]
    answered = server.run("python", "-c", REQUEST, json.dumps(PROMPT))
    assert answered.returncode == 0, answered
    with Server() as here:
        expected = _tokens(subprocess.run(
            [sys.executable, "-c", REQUEST.replace("http://127.0.0.1:3000", here.url), json.dumps(PROMPT)],
            capture_output=True, text=True, check=True,
        ).stdout)  # fmt: skip
    found = _tokens(answered.stdout)
    assert expected == found, (expected, found)
    print(f"{len(found)} tokens, those of a server outside: {json.loads(answered.stdout)['generated_text'][:60]!r}")
    print(start.strip())


def _tokens(answer: str) -> Sequence[int]:
    return [token["id"] for token in json.loads(answer)["details"]["tokens"]]
