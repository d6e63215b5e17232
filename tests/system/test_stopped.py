"""Processes that are stopped (SIGSTOP), alone and in pairs, and deaths while a router loads: the server recovers."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.running import Server
from tests.system.test_survival import again, answer, read_log

FLAGS = ("--model-id", "null", "--num-shard", "2", "--graceful-termination-timeout", "300")


@pytest.fixture
def server() -> Iterator[Server]:
    """Two ranks of the null model, whose log is kept."""
    with Server(*FLAGS) as server, logged(server):
        yield server


@contextmanager
def logged(server: Server) -> Iterator[None]:
    """Keep its log, and end it."""
    reader = threading.Thread(target=read_log, args=(server,), daemon=True)
    reader.start()
    try:
        yield
    finally:
        server.stop(signal.SIGKILL)
        reader.join()


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def log_has(server: Server, sentence: str, within: float = 120) -> None:
    """Wait for it; the time is a bound of liveness."""
    limit = time.monotonic() + within
    while not any(sentence in line for line in server.lines):
        assert time.monotonic() < limit, "".join(server.lines)
        time.sleep(0.02)


def gone(pid: int) -> None:
    limit = time.monotonic() + 120
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < limit
        time.sleep(0.02)


def next_router(server: Server, before: int) -> int:
    """Process id of the router that takes the place of one that is gone."""
    limit = time.monotonic() + 120
    while True:
        try:
            pid = server.router()
        except (StopIteration, FileNotFoundError):
            pid = before
        if pid != before:
            return pid
        assert time.monotonic() < limit
        time.sleep(0.01)


SILENT = "router stopped: it gave no sign of life for 10 s and was killed"


def test_a_router_that_is_stopped_is_replaced_beside_the_same_shards(server: Server) -> None:
    expected, shards, router = answer(server), server.shards(), server.router()
    os.kill(router, signal.SIGSTOP)
    log_has(server, SILENT)
    gone(router)
    again(server)
    assert (expected, shards) == (answer(server), server.shards())


@pytest.mark.rest
def test_a_launcher_that_was_stopped_blames_nobody(server: Server) -> None:
    """Its own silence is not the router's: as where the machine was suspended."""
    router = server.router()
    os.kill(server.process.pid, signal.SIGSTOP)
    os.kill(router, signal.SIGSTOP)
    time.sleep(12)
    os.kill(server.process.pid, signal.SIGCONT)
    time.sleep(1)
    os.kill(router, signal.SIGCONT)
    again(server)
    assert router == server.router()
    assert not any(SILENT in line for line in server.lines)


@pytest.mark.rest
def test_a_fork_server_that_is_stopped_is_replaced() -> None:
    """A fork is waited for as long as any sign of life, and not as long as loading may take."""
    with Server("--num-shard", "2") as server, logged(server):
        expected = answer(server)
        fork_server = next(pid for pid in server.children() if name_of(pid) == "fork-server")
        os.kill(fork_server, signal.SIGSTOP)
        os.kill(server.shards()[0], signal.SIGKILL)
        log_has(
            server, "fork server stopped: it had not forked a shard after 10 s and was killed; all shards are started"
        )
        again(server)
        assert expected == answer(server)


def test_a_shard_that_dies_while_a_router_loads_is_a_recovery(server: Server) -> None:
    expected, router = answer(server), server.router()
    os.kill(router, signal.SIGKILL)
    fresh = next_router(server, router)
    os.kill(fresh, signal.SIGSTOP)  # while it loads
    [shard, _] = server.shards()
    os.kill(shard, signal.SIGKILL)
    log_has(server, "shard 0 stopped: killed by signal 9")
    gone(shard)
    server.shards()  # those of the next group run
    os.kill(fresh, signal.SIGCONT)
    again(server)
    assert expected == answer(server)
    assert fresh == server.router()
    assert 1 == sum("router stopped" in line for line in server.lines)


# ------------------------------------------------------------------------------------------------------------- in pairs


@pytest.mark.rest
def test_a_router_that_is_stopped_and_a_shard_that_dies(server: Server) -> None:
    expected, router = answer(server), server.router()
    os.kill(router, signal.SIGSTOP)
    os.kill(server.shards()[0], signal.SIGKILL)
    log_has(server, "shard 0 stopped: killed by signal 9")
    log_has(server, SILENT)
    gone(router)
    again(server)
    assert expected == answer(server)


@pytest.mark.rest
def test_a_router_and_a_shard_that_are_stopped_at_once(server: Server) -> None:
    """The router that comes then asks the shards for a sign of life, and waits for none that gives none."""
    expected, router = answer(server), server.router()
    for pid in (router, server.shards()[1]):
        os.kill(pid, signal.SIGSTOP)
    log_has(server, SILENT)
    log_has(server, "shard 1 stopped: it does not answer; all shards are started again")
    gone(router)
    again(server)
    assert expected == answer(server)


@pytest.mark.rest
def test_a_router_that_is_stopped_while_it_makes_room_for_another(server: Server) -> None:
    expected, shards, router = answer(server), server.shards(), server.router()
    os.kill(router, signal.SIGSTOP)
    server.stop(signal.SIGUSR1)
    log_has(server, f"{SILENT}; another takes its place")
    gone(router)
    again(server)
    assert (expected, shards) == (answer(server), server.shards())


@pytest.mark.rest
def test_a_router_that_is_stopped_holds_up_no_end(server: Server) -> None:
    """Its requests would have minutes to finish."""
    os.kill(server.router(), signal.SIGSTOP)
    server.stop(signal.SIGTERM)
    assert 1 == server.process.wait(timeout=120)
    log_has(server, f"error: {SILENT}")


@pytest.mark.rest
def test_a_server_that_is_stopped_while_its_router_leaves_lets_requests_finish() -> None:
    request = {"inputs": "a", "parameters": {"max_new_tokens": 4000, "do_sample": False}}
    with Server(*FLAGS, "--null-step-ms", "2") as server, logged(server):  # the stream outlasts both signals
        url = f"{server.url}/generate_stream"
        with httpx2.stream("POST", url, json=request, timeout=120) as response:
            lines = response.iter_lines()
            next(lines)
            server.stop(signal.SIGUSR1)
            log_has(server, "SIGUSR1: the router is restarted")
            server.stop(signal.SIGTERM)
            log_has(server, "SIGTERM: running requests may finish")
            *_, last = (line for line in lines if line)
        assert json.loads(last.removeprefix("data:"))["generated_text"]
        assert 0 == server.process.wait(timeout=120)


@pytest.mark.rest
def test_a_server_that_is_stopped_while_its_router_loads_ends_orderly(server: Server) -> None:
    before = server.router()
    os.kill(before, signal.SIGKILL)
    next_router(server, before)
    server.stop(signal.SIGTERM)
    assert 0 == server.process.wait(timeout=120)
    log_has(server, "stopping before the server is ready")


@pytest.mark.rest
def test_a_router_that_could_not_start_is_not_asked_for(tmp_path: Path) -> None:
    """Keys that somebody edits: who serves stays, and who has died waits until they can be read again."""
    keys = tmp_path / "keys.json"
    whole = json.dumps({"keys": [{"name": "alice", "key": "secret"}]})
    keys.write_text(whole)
    keys.chmod(0o600)
    with Server("--model-id", "null", "--api-keys-file", str(keys), "--max-deaths", "2") as server, logged(server):
        before = server.router()
        keys.write_text(whole[:-5])
        server.stop(signal.SIGUSR1)
        log_has(server, "SIGUSR1: the router stays, as another could not start: --api-keys-file")
        assert before == server.router()
        os.kill(before, signal.SIGKILL)
        log_has(server, f"the router waits until this is mended: --api-keys-file {keys} is not JSON")
        time.sleep(2)
        keys.write_text(whole)
        next_router(server, before)
        again(server)
        asked = {"inputs": "a", "parameters": {"max_new_tokens": 2}}
        authorised = {"authorization": "Bearer secret"}
        assert 200 == httpx2.post(f"{server.url}/generate", json=asked, headers=authorised, timeout=60).status_code
