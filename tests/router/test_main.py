"""The router as a process: start, serve, drain, and one critical sentence when it cannot."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import httpx2
import pytest

from router.config import RouterConfig
from router.shards.client import CHANNEL_OPTIONS
from server.pb.generate_pb2_grpc import add_ShardServicer_to_server
from tests.adapter_folders import adapter_folder
from tests.router.doubles import byte_tokenizer
from tests.router.fake_shards import FakeShardedClient
from tests.router.shards.test_client import StubShard
from tests.running import ROOT


@dataclass
class Process:
    """A router under test and the records it has printed."""

    process: asyncio.subprocess.Process
    port: int
    records: list[dict[str, Any]]

    async def record(self, **fields: Any) -> dict[str, Any]:
        """Read on until a record has these fields."""
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.records.append(json.loads(line))
            if fields.items() <= self.records[-1].items():
                return self.records[-1]
        raise AssertionError(f"no record with {fields}: {self.records}")

    async def exit_status(self) -> int:
        """Read the rest and wait for the end."""
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.records.append(json.loads(line))
        return await self.process.wait()


@asynccontextmanager
async def router(folder: Path, **fields: Any) -> AsyncIterator[Process]:
    byte_tokenizer().tokenizer.save(str(folder / "tokenizer.json"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        values: dict[str, Any] = {
            "model_id": "a/model",
            "model_path": str(folder),
            "shard_sockets": (str(folder / "rank-0"),),
            "hostname": "127.0.0.1",
            "listen_fd": listener.fileno(),
        }
        RouterConfig(**{**values, **fields}).save(folder / "router.json")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "router", "--config", str(folder / "router.json")),
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            pass_fds=[listener.fileno()],
            stdout=asyncio.subprocess.PIPE,
        )
    try:
        async with asyncio.timeout(120):  # a bound of liveness
            yield Process(process, port, [])
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def shard(
    folder: Path, step_delay_s: float = 0.0, **fields: Any
) -> AsyncIterator[tuple[grpc.aio.Server, FakeShardedClient]]:
    """A rank on its socket, and its arithmetic, whose steps the test may slow down."""
    stub = StubShard(0, {})
    stub.fake = FakeShardedClient(step_delay_s=step_delay_s, adapter_rows=3, **fields)
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    add_ShardServicer_to_server(stub, server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"unix://{folder / 'rank-0'}")
    await server.start()
    yield server, stub.fake
    await server.stop(None)


def body(max_new_tokens: int) -> dict[str, Any]:
    return {"inputs": "hello", "parameters": {"max_new_tokens": max_new_tokens}}


def client(it: Process) -> httpx2.AsyncClient:
    """One that waits as long as a busy machine takes."""
    return httpx2.AsyncClient(base_url=f"http://127.0.0.1:{it.port}", timeout=60, verify=False)


async def generating(http: httpx2.AsyncClient) -> None:
    """Wait until a request is in the batch."""
    while "tgi_batch_current_size 1.0" not in (await http.get("/metrics")).text:
        await asyncio.sleep(0.01)


async def test_port_opens_when_the_shards_are_there_and_sigterm_drains(tmp_path: Path) -> None:
    async with router(tmp_path, log_level="debug") as it, client(it) as http:
        await asyncio.sleep(0.5)
        try:
            await http.get("/health")
            raise AssertionError("the port is open before the shards are")
        except httpx2.ConnectError:
            pass
        async with shard(tmp_path, step_delay_s=0.2) as (_, steps):
            table = await it.record(raw=True)
            assert "max_total_tokens" in table["message"]
            await it.record(event="ready")
            assert (await http.get("/health")).status_code == 200
            running = asyncio.create_task(http.post("/generate", json=body(30)))
            await generating(http)
            it.process.send_signal(signal.SIGTERM)
            await it.record(event="draining")
            assert (await http.post("/generate", json=body(3))).status_code == 503
            steps.step_delay_s = 0  # it would go on for six seconds
            assert (await running).status_code == 200
            assert await it.exit_status() == 0
    ended = [record for record in it.records if record["message"].startswith("request ended")]
    assert [record["reason"] for record in ended] == ["unavailable", "length"]
    assert all({"timestamp", "level", "target", "message"} <= record.keys() for record in it.records)
    for beginning in ("waiting for", "model ", "ready at", "step planned"):
        assert any(record["message"].startswith(beginning) for record in it.records)


async def test_second_signal_aborts(tmp_path: Path) -> None:
    async with shard(tmp_path, step_delay_s=0.2), router(tmp_path) as it:
        await it.record(event="ready")
        async with client(it) as http:
            running = asyncio.create_task(http.post("/generate", json=body(500)))
            await generating(http)
            it.process.send_signal(signal.SIGTERM)
            await it.record(event="draining")
            it.process.send_signal(signal.SIGINT)
            assert await it.exit_status() == 1
            assert isinstance((await asyncio.gather(running, return_exceptions=True))[0], httpx2.TransportError)


async def test_signal_while_the_shards_load_ends_at_once(tmp_path: Path) -> None:
    async with router(tmp_path) as it:
        await it.record(message="waiting for 1 model shard")
        it.process.send_signal(signal.SIGTERM)
        assert await it.exit_status() == 0


async def test_lost_shard_ends_the_router_with_its_cause(tmp_path: Path) -> None:
    """And the launcher learns of what it acts on at every log level."""
    async with shard(tmp_path, step_delay_s=0.2) as (server, _), router(tmp_path, log_level="error") as it:
        await it.record(event="ready")
        async with client(it) as http:
            running = asyncio.create_task(http.post("/generate", json=body(500)))
            await generating(http)
            await server.stop(None)
            assert (await running).status_code == 424
            assert await it.exit_status() == 1
        assert it.records[-1]["level"] == "CRITICAL"
        assert it.records[-1]["message"].startswith("shard 0: ")
    assert all("event" in record or record["level"] in ("ERROR", "CRITICAL") for record in it.records)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_total_tokens": 5000}, "--max-total-tokens is 5000 but the KV cache that fits into memory is 4096"),
        ({"max_batch_total_tokens": 99_999}, "only 4096 tokens fit"),
    ],
)
async def test_what_cannot_be_is_one_critical_sentence(tmp_path: Path, fields: dict[str, Any], sentence: str) -> None:
    async with shard(tmp_path), router(tmp_path, **fields) as it:
        assert await it.exit_status() == 1
    [critical] = [record for record in it.records if record["level"] == "CRITICAL"]
    assert sentence in critical["message"]


@pytest.mark.parametrize("is_warm", [False, True])
async def test_a_named_adapter_that_cannot_be_served_ends_the_first_start_and_no_later_one(
    tmp_path: Path, is_warm: bool
) -> None:
    folders = {name: str(adapter_folder(tmp_path / name, name)) for name in ("whole", "broken")}
    named = {"adapters": tuple(folders.items()), "is_warm": is_warm}
    problems = {"adapter_problems": {folders["broken"]: "its weights are NaN"}}
    async with shard(tmp_path, **problems), router(tmp_path, **named) as it:
        if not is_warm:
            assert 1 == await it.exit_status()
            [critical] = [record for record in it.records if record["level"] == "CRITICAL"]
            assert "adapter broken: its weights are NaN" in critical["message"]
            return
        await it.record(event="ready")
        async with client(it) as http:
            asked = [body(3) | {"parameters": {"adapter_id": name, "max_new_tokens": 3}} for name in folders]
            whole, broken = [await http.post("/generate", json=one) for one in asked]
        assert (200, 422) == (whole.status_code, broken.status_code)
        assert "the adapter broken cannot be served: its weights are NaN" in broken.json()["error"]
