"""What all APIs share, on Anthropic's messages and OpenAI's responses too: clients that leave or do not read, silence,
deadlines, limits of keys, bodies that are too large."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from router.http.guard import ClientConnection
from tests.router.apis.anthropic.test_routes import template_in
from tests.router.doubles import fake_shards, make_limits
from tests.router.site import PROMPT, Site, site

LIMITS: dict[str, Any] = {"max_total_tokens": 8192, "max_batch_total_tokens": 10 * 8192}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0},
    "/v1/responses": {"input": PROMPT, "temperature": 0},
}
COUNTS = {"/v1/messages/count_tokens": BODIES["/v1/messages"], "/v1/responses/input_tokens": BODIES["/v1/responses"]}


async def left_in_the_middle(it: Site, path: str, body: dict[str, Any]) -> None:
    """A client that goes away once its request runs."""
    num_steps = len(it.shards.requests)
    asking = asyncio.ensure_future(it.http.post(path, json=body))
    while len(it.shards.requests) < num_steps + 5:
        await asyncio.sleep(0.001)
    asking.cancel()
    await asyncio.wait((asking,))
    await it.all_free()
    assert it.app.state.services.permits._left == it.batcher.limits.max_concurrent_requests


def test_clients_that_leave_free_their_places(tmp_path: Path) -> None:
    async def story() -> None:
        shards = fake_shards(make_limits(**LIMITS), step_delay_s=0.001)
        async with site(shards, config={"chat_template": template_in(tmp_path)}, **LIMITS) as it:
            it.http.timeout = 60
            for path, body in BODIES.items():
                for is_stream in (False, True):
                    await left_in_the_middle(it, path, {**body, "stream": is_stream})

    asyncio.run(asyncio.wait_for(story(), 120))


def test_counts_of_clients_that_leave_are_given_up(tmp_path: Path) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"

    async def story() -> None:
        async with site(config={"chat_template": template_in(tmp_path, endless)}) as it:
            it.http.timeout = 1000
            services = it.app.state.services
            services.aside._seconds = 1000  # so that nothing else ends it
            for path, body in COUNTS.items():
                asking = asyncio.ensure_future(it.http.post(path, json=body))
                while services.permits._left == it.batcher.limits.max_concurrent_requests:
                    await asyncio.sleep(0.001)
                asking.cancel()
                await asyncio.wait((asking,))
                while services.permits._left < it.batcher.limits.max_concurrent_requests:
                    await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(story(), 120))


def test_streams_that_are_not_read_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unread: list[int] = []
    write_chunk = ClientConnection.write_chunk

    def noting(connection: ClientConnection, data: bytes) -> int:
        unread.append(write_chunk(connection, data))
        return unread[-1]

    monkeypatch.setattr("router.http.event_stream.MAX_UNREAD_BYTES", 8192)
    monkeypatch.setattr(ClientConnection, "write_chunk", noting)

    async def story() -> None:
        loop = asyncio.get_running_loop()
        settings = {"chat_template": template_in(tmp_path), "send_buffer_bytes": 4096}
        async with site(fake_shards(make_limits(**LIMITS)), config=settings, **LIMITS) as it:
            for number, (path, asked) in enumerate(BODIES.items()):
                body = json.dumps({**asked, "stream": True})
                head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                with socket.socket() as client:
                    client.setblocking(False)
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    await loop.sock_connect(client, ("127.0.0.1", it.port))
                    await loop.sock_sendall(client, f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
                    cut = f'tgi_request_failure{{err="slow_client"}} {number + 1}.0'
                    while cut not in (await it.http.get("/metrics")).text:
                        await asyncio.sleep(0.01)
                    await it.all_free()

    asyncio.run(asyncio.wait_for(story(), 120))
    assert 8192 < max(unread) < 8192 + 1000


def test_silence_and_deadlines_are_told_in_each_api_s_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.http.event_stream.KEEP_ALIVE_S", 0.1)

    async def story() -> None:
        shards = fake_shards(make_limits(**LIMITS), step_delay_s=0.4)
        async with site(shards, config={"chat_template": template_in(tmp_path)}, **LIMITS) as it:
            it.http.timeout = 60
            for path, body in BODIES.items():
                short = {**body, "max_tokens": 1, "max_output_tokens": 1}
                await it.http.post(path, json=short)  # has a process for templates started
                late = {"x-request-timeout-ms": "2000"}
                text = (await it.http.post(path, json={**body, "stream": True}, headers=late)).text
                *_, last = (frame for frame in text.split("\n\n") if frame)
                event = json.loads(last.partition("data: ")[2])
                if path == "/v1/messages":
                    assert 'event: ping\ndata: {"type":"ping"}\n\n' in text
                    assert ("error", "timeout_error", "timeout") == (
                        event["type"],
                        event["error"]["type"],
                        event["error_type"],
                    )
                else:
                    assert ": ping\n\n" in text and "event: error\n" in text
                    assert ("response.failed", "failed") == (event["type"], event["response"]["status"])
                await it.all_free()

    asyncio.run(asyncio.wait_for(story(), 120))


def test_limits_of_keys_and_bodies_hold(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.touch(mode=0o600)
    limited: list[dict[str, Any]] = [{"name": f"k{n}", "key": f"k{n}", "requests_per_minute": 1} for n in range(4)]
    keys.write_text(json.dumps({"keys": [*limited, {"name": "free", "key": "free"}]}))
    settings = {"chat_template": template_in(tmp_path), "api_keys_file": str(keys), "payload_limit": 2000}

    async def story() -> None:
        async with site(config=settings) as it:
            it.http.timeout = 60
            for number, (path, body) in enumerate({**BODIES, **COUNTS}.items()):
                headers = {"authorization": f"Bearer k{number}"}
                body = {**body, "max_tokens": 2, "max_output_tokens": 2}
                assert 401 == (await it.http.post(path, json=body)).status_code
                assert 200 == (await it.http.post(path, json=body, headers=headers)).status_code
                refused = await it.http.post(path, json=body, headers=headers)
                assert (429, "overloaded") == (refused.status_code, refused.json()["error_type"])
                assert int(refused.headers["retry-after"]) > 0
                large = {**body, "user": "x" * 2000}
                refused = await it.http.post(path, json=large, headers={"authorization": "Bearer free"})
                assert (413, "validation") == (refused.status_code, refused.json()["error_type"])

    asyncio.run(asyncio.wait_for(story(), 120))
