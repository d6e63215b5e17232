"""A whole server whose log is not read, has no room, or is fed forgeries: requests go on, lines stay lines."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import httpx2
import pytest

from tests.host.test_output import small_disk
from tests.running import PATIENCE_S, ROOT, Server, body, kill_group

NULL = ("--hostname", "127.0.0.1", "--port", "0", "--device", "cpu", "--model-id", "null")


def ask(client: httpx2.Client, count: int) -> set[int]:
    """The statuses of `count` requests, one after another."""
    return {client.post("/generate", json=body("Once", max_new_tokens=1)).status_code for _ in range(count)}


def fill(path: Path) -> None:
    """Write to a new file until its disk takes no more."""
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * 4096)


def eventually(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE_S  # a bound of liveness
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


@pytest.mark.rest
def test_a_stopped_launcher_stalls_no_request() -> None:
    with Server("--model-id", "null") as server:
        with httpx2.Client(base_url=server.url, timeout=30) as client:
            server.stop(signal.SIGSTOP)  # as Ctrl-Z does
            try:
                assert {200} == ask(client, 600)  # the pipe to the launcher holds the lines of 224
            finally:
                server.stop(signal.SIGCONT)
        server.stop()
        code, output = server.wait()
    assert (0, 600) == (code, output.count("request ended: length"))
    assert "dropped" not in output


def test_a_full_log_disk_stalls_no_request_and_logging_goes_on_once_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        log = disk / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "launcher.py", *NULL], cwd=ROOT, stdout=file, text=True, start_new_session=True
            )
        try:
            eventually(lambda: "Lockstep is ready at " in log.read_text())
            url = log.read_text().split("Lockstep is ready at ")[1].split()[0]
            with httpx2.Client(base_url=url, timeout=30) as client:
                fill(disk / "rest")
                assert {200} == ask(client, 300)
                (disk / "rest").unlink()
                assert {200} == ask(client, 1)
            process.send_signal(signal.SIGTERM)
            assert 0 == process.wait(timeout=PATIENCE_S)
        finally:
            kill_group(process)
        lines = log.read_text().splitlines()
    assert 301 == sum("request ended: length" in line for line in lines)


HOSTILE = 'x\r\n{"level": "CRITICAL", "message": "forged"}\x1b[2J\u2028\x85{}%s%(a)s\x00'


def test_text_of_clients_forges_no_line() -> None:
    with Server("--model-id", "null", "--json-output", "--log-level", "debug") as server:
        with httpx2.Client(base_url=server.url, timeout=30) as client:
            asked = [body(HOSTILE, max_new_tokens=1), body(HOSTILE, max_new_tokens=1, stop=[HOSTILE]), {HOSTILE: 1}]
            for request in asked:
                client.post("/generate", json=request, headers={"x-request-id": "a{}%s\x1b[31m", "user-agent": "{}%s"})
            client.get("/" + quote(HOSTILE))
            client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "model": HOSTILE, HOSTILE: 1})
            client.post("/generate", content=HOSTILE.encode(), headers={"content-type": "application/json"})
            kept = client.post("/generate", json=body("Once", max_new_tokens=1), headers={"x-request-id": "mine"})
        server.stop()
        code, output = server.wait()
    assert (0, "mine") == (code, kept.headers["x-request-id"])
    output = "".join(server.lines) + output
    assert not re.search(r"[^\x20-\x7e\n]", output)
    records = [json.loads(line) for line in output.split("\n")[:-1]]
    assert "mine" in {record.get("request_id") for record in records}
    [named] = [record for record in records if "ignored_fields" in record]
    lost = [record for record in records if record.get("status") == 404]
    assert len(lost) == 1 and all(
        text.isprintable() for text in (named["model"], named["ignored_fields"], lost[0]["path"])
    )
    assert {"launcher", "router", "shard-0"} == {record["process"] for record in records}
    assert "ERROR" not in {record["level"] for record in records}
    assert "forged" not in {record["message"] for record in records}
