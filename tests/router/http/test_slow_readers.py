"""Clients that do not read: they cost others nothing, they are cut before they cost much memory, and they are counted.

What counts as unread is what waits in this process; the kernel's buffers on both ends come before it and are bounded
too. They are made small here, so that little has to be generated to fill them.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router.http.guard import ClientConnection
from tests.router.doubles import fake_shards, make_limits
from tests.router.site import PROMPT, Site, site

LONG: dict[str, Any] = {"max_total_tokens": 8192, "max_batch_total_tokens": 100 * 8192, "max_concurrent_requests": 100}
DROPPED = 'tgi_request_failure{err="dropped"}'
SMALL = {"send_buffer_bytes": 4096}
CUT = 'tgi_request_failure{err="slow_client"}'
STEP_S = 0.025
FEW_BYTES = 4096  # that the kernel takes in for a client which does not read
STREAM_END = b"0\r\n\r\n"

Read = Callable[[int], Coroutine[Any, Any, bytes]]


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Buffers of some kilobytes, and what every write to a stream has left waiting."""
    unread: list[int] = []
    write_chunk = ClientConnection.write_chunk

    def noting(connection: ClientConnection, data: bytes) -> int:
        unread.append(write_chunk(connection, data))
        return unread[-1]

    monkeypatch.setattr("router.http.responses.MAX_UNREAD_BYTES", 8192)
    monkeypatch.setattr(ClientConnection, "write_chunk", noting)
    return unread


@asynccontextmanager
async def sent_request(
    it: Site, path: str, *, receive_buffer: int | None = None, **parameters: Any
) -> AsyncIterator[Read]:
    """A request that was sent, and how to read from its answer."""
    loop = asyncio.get_running_loop()
    body = json.dumps({"inputs": PROMPT, "parameters": parameters})
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.socket() as client:
        client.setblocking(False)
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await loop.sock_connect(client, ("127.0.0.1", it.port))
        await loop.sock_sendall(client, (head + body).encode())
        yield lambda num_bytes: loop.sock_recv(client, num_bytes)


async def count(it: Site, name: str) -> float:
    lines = (await it.http.get("/metrics")).text.splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


async def test_stream_that_is_not_read_is_cut_counted_and_cancelled(small_buffers: list[int]) -> None:
    async with asyncio.timeout(60):
        async with site(fake_shards(make_limits(**LONG)), config=SMALL, **LONG) as it:
            asked = {"max_new_tokens": 8000, "top_n_tokens": 5}
            async with sent_request(it, "/generate_stream", receive_buffer=FEW_BYTES, **asked):
                while not await count(it, CUT):
                    await asyncio.sleep(0.01)
                await it.all_free()
            assert await count(it, "tgi_request_success") == 0
            last_step = it.shards.requests[-1].step
            assert last_step < 8000
    frame = 1000  # at most, with five candidates
    assert 8192 < max(small_buffers) < 8192 + frame


async def test_stream_that_is_read_slowly_but_fits_is_not_cut(small_buffers: list[int]) -> None:
    async with asyncio.timeout(60):
        async with site(config=SMALL) as it:
            async with sent_request(it, "/generate_stream", receive_buffer=FEW_BYTES, max_new_tokens=60) as read:
                while not await count(it, "tgi_request_success"):
                    await asyncio.sleep(0.01)
                text = b""
                while not text.endswith(STREAM_END):
                    text += await read(512)
            assert text.count(b"data: ") == 60
            assert await count(it, CUT) == 0


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_rest_of_an_answer_is_not_kept_for_ever(
    path: str, small_buffers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not fit into the kernel's buffers: its place becomes free, and so do its bytes, complete or not."""
    monkeypatch.setattr("router.http.responses.MAX_UNREAD_BYTES", 2**20)
    async with asyncio.timeout(60):
        async with site(config={**SMALL, "unread_timeout": 0.2}, **LONG) as it:
            asked = {"max_new_tokens": 1000, "details": True, "top_n_tokens": 5}
            async with sent_request(it, path, receive_buffer=FEW_BYTES, **asked) as read:
                while not await count(it, "tgi_request_success") + await count(it, DROPPED):
                    await asyncio.sleep(0.01)
                await it.all_free()
                await asyncio.sleep(0.5)
                with pytest.raises(ConnectionResetError):
                    while await read(65536):
                        pass


# ------------------------------------------------------------------------------------------------- the others


async def read_to_the_end(it: Site, num_tokens: int) -> int:
    """How many events a stream had that is read at once."""
    data = b""
    async with sent_request(it, "/generate_stream", max_new_tokens=num_tokens) as read:
        while not data.endswith(STREAM_END):
            data += await read(65536)
    return data.count(b"data: ")


async def read_a_byte_a_second(it: Site) -> None:
    async with sent_request(it, "/generate_stream", receive_buffer=FEW_BYTES, max_new_tokens=8000) as read:
        while await read(1):
            await asyncio.sleep(1)


async def test_others_are_served_beside_fifty_slow_readers() -> None:
    """Every stream that is read comes to its end while the slow ones hold their places and are cut by nothing."""
    num_slow, num_others, num_tokens = 50, 32, 40
    async with asyncio.timeout(60):
        shards = fake_shards(make_limits(**LONG), step_delay_s=STEP_S, keep_requests=False)
        async with site(shards, **LONG) as it:
            readers = [asyncio.create_task(read_a_byte_a_second(it)) for _ in range(num_slow)]
            while len(it.shards.live_ids) < num_slow:
                await asyncio.sleep(0.01)
            others = await asyncio.gather(*(read_to_the_end(it, num_tokens) for _ in range(num_others)))
            assert [num_tokens] * num_others == others
            assert num_slow == len(it.shards.live_ids), "a slow reader was cut before the end"
            for reader in readers:
                reader.cancel()
            await asyncio.wait(readers)
            await it.all_free()
