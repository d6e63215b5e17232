"""Whole launches with real processes: ports, sockets, private folders, signals; stand-ins serve."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from launch.errors import Refusal
from launch.machine import bind
from tests.launch.stand_ins import (
    HTTP_ROUTER,
    LAUNCH,
    PRELUDE,
    SHARD,
    Start,
    after,
    end,
    eventually,
    is_alive,
    wait_for,
)
from tests.running import children_of


def connect(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=50) as client:
        return client.recv(16)


def ready(process: subprocess.Popen[str]) -> tuple[int, str]:
    """(port, log so far) of a launch that is ready."""
    log = wait_for(process, "Lockstep is ready at ")
    return int(log.split("Lockstep is ready at http://127.0.0.1:")[1].split()[0]), log


def test_launch_serves_and_stops_and_cleans_up(launch: Start) -> None:
    process = launch("--hostname=127.0.0.1", "--port=0", "--num-shard=2")
    port, log = ready(process)
    folder = Path(log.split("folder=")[1].split()[0])
    assert b"hello" == connect(port)
    assert folder.is_dir() and 0o700 == folder.stat().st_mode & 0o777
    process.terminate()
    assert (0, "") == end(process, within=5)[::2]
    assert not folder.exists()


def folder_of(log: str) -> Path:
    """The private folder of a launch that is ready."""
    return Path(log.split("folder=")[1].split()[0])


def test_the_next_launch_removes_what_a_killed_one_left_and_nothing_else(launch: Start) -> None:
    argv = ("--hostname=127.0.0.1", "--port=0")
    killed, living = launch(*argv), launch(*argv)
    left, kept = folder_of(ready(killed)[1]), folder_of(ready(living)[1])
    foreign = left.with_name("lockstep-foreign")
    foreign.mkdir()  # no launch made it: it has no lock
    killed.kill()
    killed.wait()
    assert left.is_dir()
    ready(launch(*argv))
    assert not left.exists()
    assert kept.is_dir() and foreign.is_dir()


def test_a_launch_that_is_killed_before_it_is_ready_leaves_no_key(launch: Start, temporary: Path) -> None:
    loading = PRELUDE + "say('loading', key=json.load(open(sys.argv[-1]))['api_key'], pid=os.getpid())\ntime.sleep(60)"
    process = launch("--port=0", "--api-key=hunter2", "--json-output", router=loading)
    record = json.loads(wait_for(process, "loading").splitlines()[-1])
    assert "hunter2" == record["key"]
    process.kill()
    process.wait()
    eventually(lambda: not is_alive(record["pid"]))
    (folder,) = temporary.glob("lockstep-*")
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert "shard-0.json" in {path.name for path in files}
    assert not [path for path in files if b"hunter2" in path.read_bytes()]


def test_sigquit_leaves_no_folder(launch: Start) -> None:
    process = launch("--hostname=127.0.0.1", "--port=0")
    folder = folder_of(ready(process)[1])
    process.send_signal(signal.SIGQUIT)
    assert 131 == end(process, within=5)[0]
    assert not folder.exists()


@pytest.mark.parametrize(
    ("argv", "is_warned"),
    [([], False), (["--hostname=0.0.0.0"], True), (["--hostname=0.0.0.0", "--api-key=key"], False)],
)
def test_server_that_anyone_can_use_says_so(launch: Start, argv: list[str], is_warned: bool) -> None:
    """Only who asks for it has such a server: by default it listens on this machine alone."""
    process = launch("--port=0", *argv)
    log = wait_for(process, "Lockstep is ready at ")
    warning = "other machines can reach 0.0.0.0 and there is no API key: set API_KEY, or use --hostname 127.0.0.1"
    assert is_warned is (warning in log)
    assert argv or "ready at http://127.0.0.1:" in log
    process.terminate()
    assert 0 == end(process, within=5)[0]


def test_two_launches_do_not_meet(launch: Start) -> None:
    first, second = (launch("--hostname=127.0.0.1", "--port=0") for _ in range(2))
    (port_a, log_a), (port_b, log_b) = ready(first), ready(second)
    assert port_a != port_b
    assert log_a.split("sockets=")[1].split()[0] != log_b.split("sockets=")[1].split()[0]


def test_taken_port_is_refused_before_anything_loads(launch: Start) -> None:
    with bind("127.0.0.1", 0) as other:
        port = other.getsockname()[1]
        process = launch("--hostname=127.0.0.1", f"--port={port}", resolve="1/0")
        code, log, error = end(process, within=2)
    assert (1, "") == (code, log)
    assert (
        error
        == f"error: port {port} is taken: stop the server that has it, or give another --port (0 takes a free one)\n"
    )


def test_port_closes_while_the_router_drains(launch: Start) -> None:
    closing = HTTP_ROUTER.replace('leave("router drained")', '(listener.close(), say("closed"), time.sleep(30))')
    process = launch("--hostname=127.0.0.1", "--port=0", router=closing)
    port, _ = ready(process)
    process.terminate()
    wait_for(process, "closed")
    with pytest.raises(ConnectionRefusedError):
        connect(port)


def test_nobody_can_take_the_port_while_no_router_lives(launch: Start, tmp_path: Path) -> None:
    go = tmp_path / "go"
    waiting = HTTP_ROUTER.replace("listener.listen()\n", f"{after(go)}listener.listen()\n")
    router = waiting.replace("event=", "pid=os.getpid(), event=")
    go.touch()
    process = launch("--hostname=127.0.0.1", "--port=0", router=router)
    port, log = ready(process)
    for delay in ("", " in 1 s"):
        go.unlink()
        os.kill(int(log.split("pid=")[-1].split()[0]), signal.SIGKILL)
        wait_for(process, f"it is started again{delay},")
        with pytest.raises(Refusal, match="is taken"):
            bind("127.0.0.1", port)
        with pytest.raises(OSError, match="in use"), socket.socket() as squatter:
            squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            squatter.bind(("0.0.0.0", port))
        with pytest.raises(ConnectionRefusedError):
            connect(port)
        go.touch()
        log = wait_for(process, "Lockstep is ready at ")
        assert b"hello" == connect(port)
    process.terminate()
    assert (0, "") == end(process, within=5)[::2]
    bind("127.0.0.1", port).close()


def test_a_second_launch_of_the_same_user_does_not_share_the_port(launch: Start) -> None:
    port, _ = ready(launch("--hostname=127.0.0.1", "--port=0"))
    code, log, error = end(launch("--hostname=127.0.0.1", f"--port={port}", resolve="1/0"), within=2)
    assert (1, "") == (code, log)
    assert f"port {port} is taken" in error


def test_launch_again_at_once_on_the_same_port(launch: Start) -> None:
    first = launch("--hostname=127.0.0.1", "--port=0")
    port, _ = ready(first)
    assert b"hello" == connect(port)
    children = children_of(first.pid)
    first.kill()
    eventually(lambda: first.poll() is not None and not any(is_alive(child) for child in children))
    assert children
    assert port == ready(launch("--hostname=127.0.0.1", f"--port={port}"))[0]


def test_chosen_socket_path_has_one_user_at_a_time(launch: Start, tmp_path: Path) -> None:
    prefix = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(f"{prefix}-0")  # left by a launch that was killed
    argv = ("--hostname=127.0.0.1", "--port=0", f"--shard-uds-path={prefix}")
    first = launch(*argv)
    assert f'sockets=["{prefix}-0"]' in ready(first)[1]
    assert not Path(f"{prefix}-0").exists()
    assert (1, f"error: --shard-uds-path {prefix} is in use by another launch: choose another\n") == end(
        launch(*argv), within=5
    )[::2]
    first.terminate()
    assert 0 == end(first, within=5)[0]
    ready(launch(*argv))


def test_file_at_a_chosen_socket_path_is_not_removed(launch: Start, tmp_path: Path) -> None:
    (tmp_path / "s-0").write_text("precious")
    error = end(launch("--port=0", f"--shard-uds-path={tmp_path}/s"), within=5)[2]
    assert f"error: --shard-uds-path: {tmp_path}/s-0 exists and is no socket; move it away\n" == error
    assert "precious" == (tmp_path / "s-0").read_text()


def test_socket_path_that_is_too_long_is_refused(launch: Start, tmp_path: Path) -> None:
    error = end(launch("--port=0", f"--shard-uds-path={tmp_path}/{'x' * 107}"), within=5)[2]
    assert error.endswith("is too long: a socket's path may have 107 bytes\n")


def test_signal_during_download_stops_at_once(launch: Start) -> None:
    slow = "(print('downloading', flush=True), __import__('time').sleep(60))"
    process = launch("--port=0", resolve=slow)
    wait_for(process, "downloading")
    process.terminate()
    code, log, error = end(process, within=3)
    assert (0, "") == (code, error)
    assert "SIGTERM: stopped before the model was there" in log


# The launch as above, but to report a failure takes its time.
SLOW_TO_REPORT = LAUNCH.replace(
    "sys.exit(", "launcher._report = lambda *_: print('unwinds', flush=True) or __import__('time').sleep(60)\nsys.exit("
)


@pytest.mark.parametrize("failing", [{"server": "raise ValueError('no')"}, {"resolve": "open('/nothing/there')"}])
def test_signal_while_a_failed_launch_unwinds_is_no_success(start: Start, failing: dict[str, str]) -> None:
    scripts = {"server": SHARD, "router": HTTP_ROUTER, **failing}
    process = start(SLOW_TO_REPORT, json.dumps(scripts), "--device=cpu", "--port=0")
    wait_for(process, "unwinds")
    process.terminate()
    assert 143 == end(process, within=5)[0]


def test_sigquit_during_download_is_no_success(launch: Start) -> None:
    process = launch("--port=0", resolve="(print('downloading', flush=True), __import__('time').sleep(60))")
    wait_for(process, "downloading")
    process.send_signal(signal.SIGQUIT)
    assert 131 == end(process, within=3)[0]


def test_closed_standard_streams_are_replaced(start: Start) -> None:
    shown = "os.write(2, os.readlink('/proc/self/fd/1').encode())"
    code = f"import os, launcher; os.close(1); launcher.open_standard_streams(); {shown}"
    assert "/dev/null" == end(start(code), within=5)[2]
