"""Launches, and the supervisor alone, over stand-ins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.stand_ins import FORK_SERVER, HTTP_ROUTER, LAUNCH, SHARD, SUPERVISE, Start
from tests.running import ROOT


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Where launches make their private folders: short, for the sockets; tmp_path is not."""
    with tempfile.TemporaryDirectory(prefix="ls-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def start(temporary: Path) -> Iterator[Start]:
    """Start Python code in a process of its own, which is gone after the test."""
    processes = []

    def run(code: str, *argv: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *argv],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def supervise(start: Start) -> Start:
    # Shards are forks, as those of servers are, and the router is a process of its own. Nothing is waited for longer
    # than a test waits: what ends, ends before these limits. Whoever might have caused a failure has `blame` seconds.
    def run(
        as_json: bool = False, drain: float = 100, stop: float = 100, blame: float = 0.1, **scripts: str
    ) -> subprocess.Popen[str]:
        named = {name.replace("_", "-"): code for name, code in scripts.items()}
        limits = {"as_json": as_json, "drain": drain, "stop": stop, "blame": blame}
        return start(SUPERVISE, json.dumps({"scripts": named, "fork_server": FORK_SERVER, **limits}))

    return run


@pytest.fixture
def launch(start: Start) -> Start:
    def run(*argv: str, **scripts: str) -> subprocess.Popen[str]:
        return start(LAUNCH, json.dumps({"server": SHARD, "router": HTTP_ROUTER, **scripts}), "--device=cpu", *argv)

    return run
