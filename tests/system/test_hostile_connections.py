"""Hundreds of connections, a fifth of them hostile, beside streams: the honest are served, the hostile are ended."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
import uvloop

from tests.running import Server
from tests.system.hostile_connections import KINDS, CrowdProcess, Timeouts, gaps, held, outlived

TIMEOUTS = Timeouts(header=1.0, body=2.0, keep_alive=10.0, unread=2.0)
pytestmark = pytest.mark.alone
PROBE_INTERVAL_S = 1.0  # much shorter than keep_alive: these stay, even where they are late
TOKENS = 100


def test_a_crowd_of_connections_is_served_or_ended() -> None:
    with Server("--model-id", "null", *TIMEOUTS.flags()) as server:
        router = Path(f"/proc/{server.router()}")
        uvloop.run(gaps(server, num_streams=8, seconds=0.1, num_tokens=TOKENS))
        before = held(router)["descriptors"]
        with CrowdProcess(server, num_idle=200, num_hostile=48, interval=PROBE_INTERVAL_S) as crowd:
            assert held(router)["descriptors"] > 200
            found = uvloop.run(gaps(server, num_streams=8, seconds=2, num_tokens=TOKENS))
            ends = crowd.end(timeout=60)
        assert 0 == len(found) % (TOKENS - 1)  # every stream came to its end
        assert {"200"} == ends["probes"].keys()
        assert KINDS.keys() == ends["lifetimes"].keys()
        assert {} == outlived(ends["lifetimes"], TIMEOUTS)
        deadline = time.monotonic() + 30
        while held(router)["descriptors"] > before and time.monotonic() < deadline:
            time.sleep(0.1)
        assert held(router)["descriptors"] <= before


def cpu_seconds(process: Path) -> float:
    fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_more_connections_than_descriptors_cost_nothing_and_leave_room_for_probes() -> None:
    few = ("sh", "-c", 'ulimit -n 256; exec "$0" launcher.py "$@"', sys.executable)
    with Server("--model-id", "null", command=few) as server:
        router = Path(f"/proc/{server.router()}")
        address = urlsplit(server.url)
        connections = []
        for _ in range(600):
            connection = socket.create_connection((address.hostname, address.port or 0), timeout=10)
            connection.setblocking(False)
            connections.append(connection)
        assert 200 == httpx2.get(f"{server.url}/health", timeout=10).status_code
        assert held(router)["descriptors"] < 256
        before, started = cpu_seconds(router), time.monotonic()
        time.sleep(1)
        assert cpu_seconds(router) - before < (time.monotonic() - started) / 2  # it does not spin
        for connection in connections:
            connection.close()
