"""The launcher's side of forks: what becomes of one that never starts."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from host.output import Output
from launch.fork_server import Fork, ForkServer
from launch.logs import Log
from launch.processes import ChildCommand, OwnProcess

LIVES = "import time; time.sleep(600)"
ENDS = "raise SystemExit(7)"


@pytest.mark.parametrize(("program", "code"), [(LIVES, 1), (ENDS, 7)])
def test_a_fork_that_never_starts_has_ended_whether_its_fork_server_lives_or_not(program: str, code: int) -> None:
    fork_server = OwnProcess((sys.executable, "-c", program), dict(os.environ))
    pipes = [os.pipe() for _ in range(3)]
    fork = Fork(fork_server, *(reader for reader, _ in pipes))
    letting_go = threading.Timer(0.2, lambda: [os.close(writer) for _, writer in pipes])  # while it is waited for
    if program == ENDS:
        assert fork_server.ends_within(60)  # its end is noticed later
    letting_go.start()
    try:
        assert code == fork.wait() == fork.poll()
    finally:
        letting_go.join()
        fork_server.kill_group()
        fork_server.wait()
        for file in (fork.stdout, fork.stderr, fork_server.stdout, fork_server.stderr):
            assert file is not None
            file.close()


FORKS_ONE = """
import os, socket
orders = socket.socket(fileno=0)
_, writers, _, _ = socket.recv_fds(orders, 1 << 16, 3)
os.write(writers[2], str(os.getppid()).encode())
"""


def test_what_a_fork_server_has_forked_is_known_once_it_has_ended() -> None:
    """Its end may be seen before the process id is read."""
    log = Log(Output(1), as_json=False)
    fork_server = ForkServer((sys.executable, "-c", FORKS_ONE), dict(os.environ), log)
    child = fork_server.fork(ChildCommand("shard-0", ("unused",)))
    try:
        assert 0 == fork_server.process.wait()
        assert child.process.pid is None
        fork_server.drain()
        assert os.getpid() == child.process.pid
    finally:
        fork_server.close()
        child.close()
