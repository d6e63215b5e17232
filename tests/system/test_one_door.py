"""A whole server has one door that others may reach, and writes no secret anywhere."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.running import Server, body, children_of, open_files

KEY, TOKEN = "Canary-4711", "hf_Canary4712"
LISTENS = "0A"  # the state of a socket in /proc/net/tcp


def tree_of(pid: int) -> list[int]:
    """A process and all that came of it."""
    return [pid, *(below for child in children_of(pid) for below in tree_of(child))]


def inodes_of(pids: list[int]) -> set[str]:
    """Sockets that the processes hold."""
    found = (re.fullmatch(r"socket:\[(\d+)\]", name) for pid in pids for name in open_files(pid))
    return {match[1] for match in found if match}


def listeners(pids: list[int]) -> Iterator[tuple[str, str, int]]:
    """(protocol, address, port) of everything that others may send to."""
    inodes = inodes_of(pids)
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{protocol}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (fields[3] == LISTENS or protocol.startswith("udp")):
                address, port = fields[1].split(":")
                is_v4 = len(address) == 8
                raw = bytes.fromhex(address)
                text = socket.inet_ntoa(raw[::-1]) if is_v4 else raw.hex()
                yield protocol, text, int(port, 16)


def test_one_port_listens_and_no_secret_is_written() -> None:
    """Of the embedded model on two ranks, at its default address and with the most talkative log."""
    env = {"API_KEY": KEY, "HF_TOKEN": TOKEN}
    right = {"authorization": f"Bearer {KEY}"}
    with Server("--num-shard", "2", "--log-level", "debug", env=env) as server:
        port = urlsplit(server.url).port
        found = set(listeners(tree_of(server.process.pid)))
        assert ("tcp", "127.0.0.1", port) in found
        # Ranks on CPUs meet over TCP ports of their own, which are this machine's alone, and let nobody else in.
        assert {address for _, address, _ in found} == {"127.0.0.1"}
        others = {other for _, _, other in found if other != port}
        assert len(others) == 2
        for other in others:
            with pytest.raises(TimeoutError), socket.create_connection(("127.0.0.1", other), timeout=0.5):
                pass
        asked = body("Once", max_new_tokens=2)
        texts = [httpx2.post(f"{server.url}/generate", json=asked, headers=right, timeout=60).text]
        texts += [httpx2.get(f"{server.url}{path}", headers=right, timeout=60).text for path in ("/info", "/metrics")]
        assert httpx2.get(f"{server.url}/info", headers={"authorization": "Bearer x"}, timeout=60).status_code == 401
        server.stop(signal.SIGTERM)
        code, output = server.wait()
    written = "".join([*texts, *server.lines, output])
    assert 0 == code
    assert KEY not in written and TOKEN not in written


def test_a_server_that_computes_nothing_has_one_listener() -> None:
    with Server("--model-id", "null", "--num-shard", "2") as server:
        assert {("tcp", "127.0.0.1", urlsplit(server.url).port)} == set(listeners(tree_of(server.process.pid)))


@pytest.mark.rest
def test_what_the_router_starts_does_not_hold_its_port() -> None:
    """Else some connections would go to such a process, which takes its time to end, once a router was killed."""
    asked = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    with Server("--model-id", "null") as server:
        # A process for the chat has the lowest priority: it may take two minutes to come on cores that are busy.
        assert httpx2.post(f"{server.url}/v1/chat/completions", json=asked, timeout=180).status_code == 200
        router = server.router()
        beside = children_of(router)
        assert beside, "messages become a prompt in a process of its own"
        port, table = f":{urlsplit(server.url).port:04X}", Path("/proc/net/tcp").read_text().splitlines()[1:]
        doors = {fields[9] for line in table if (fields := line.split())[1].endswith(port) and fields[3] == LISTENS}
        assert doors & inodes_of([router])
        assert set() == doors & inodes_of(beside)
