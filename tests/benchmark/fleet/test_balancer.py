"""The balancer of the measurements: it passes on what it is sent, to whom the policy says."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.benchmark.fleet.balancer import Proxy


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + await reader.readexactly(length))
    await writer.drain()
    writer.close()


async def _ask(port: int, text: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"inputs": text, "parameters": {"max_new_tokens": 5}}).encode()
    writer.write(b"POST /generate HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(("policy", "expected"), [("round-robin", [2, 2]), ("prefix-affine", [0, 4])])
async def test_it_passes_on_what_it_is_sent(policy: str, expected: list[int]) -> None:
    servers = [await asyncio.start_server(_echo, "127.0.0.1", 0) for _ in range(2)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    proxy = Proxy([f"http://127.0.0.1:{port}" for port in ports], policy)
    front = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    for _ in range(4):
        assert b'"inputs": "the same"' in await _ask(front.sockets[0].getsockname()[1], "the same")
    assert expected == sorted(proxy.sent)
    for server in (*servers, front):
        server.close()
