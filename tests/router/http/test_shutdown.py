"""The end of a server: whoever is on the way to it gets an answer, and no answer is taken back by a reset."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from router.__main__ import HttpServer, listener_descriptors
from router.http.transport import Connections
from tests.router.http.raw_clients import BODY, PATIENCE_S, POST, PROBE
from tests.router.site import Site, unserved

ASKED = POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


class Door:
    """A server as the router runs it, and clients that do not let its event loop run while they send."""

    def __init__(self, it: Site, server: HttpServer, listeners: list[socket.socket]) -> None:
        self.it, self.server = it, server
        self._listeners = listeners

    def connect(self, data: bytes = b"") -> socket.socket:
        client = socket.create_connection(self._listeners[0].getsockname())
        client.sendall(data)
        client.setblocking(False)
        return client

    async def stop(self) -> None:
        """What follows a drain, with no turn of the event loop in between."""
        await self.server.shutdown(self._listeners)


@asynccontextmanager
async def open_door() -> AsyncIterator[Door]:
    async with asyncio.timeout(PATIENCE_S), unserved() as it:
        listeners = listener_descriptors(socket.create_server(("127.0.0.1", 0)))
        server = HttpServer(it.app, Connections(it.settings, 1000), lambda: None)
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup(listeners)
        yield Door(it, server, listeners)


async def rest(client: socket.socket) -> bytes:
    """Everything until the server closes; a reset is an error."""
    found = b""
    with client:
        while data := await asyncio.get_running_loop().sock_recv(client, 65536):
            found += data
    return found


async def kept_open(door: Door) -> socket.socket:
    """A connection on which one answer has been read."""
    client = door.connect(PROBE)
    assert b" 200 OK" in await asyncio.get_running_loop().sock_recv(client, 65536)
    return client


async def test_who_has_asked_when_the_server_ends_is_answered() -> None:
    """On a new connection that nobody has accepted yet, and on one that was kept open."""
    async with open_door() as door:
        kept, busy = await kept_open(door), await kept_open(door)
        await door.it.batcher.drain(0)
        clients = [door.connect(ASKED) for _ in range(40)]
        begun = door.connect(ASKED[:20])
        for client in (kept, busy):
            client.setblocking(True)
            client.sendall(ASKED)
            client.setblocking(False)
        answers = asyncio.gather(*(rest(client) for client in (*clients, begun, kept, busy)))
        await door.stop()
        for answer in await answers:
            assert b"HTTP/1.1 503 " in answer and b"connection: close\r\n" in answer.lower()


async def test_what_crosses_the_end_of_an_idle_connection_is_no_reset() -> None:
    """The client reads the end, and knows that nobody has its request."""
    async with open_door() as door:
        kept = await kept_open(door)
        stopping = asyncio.create_task(door.stop())
        loop = asyncio.get_running_loop()
        assert b"" == await loop.sock_recv(kept, 65536)
        await loop.sock_sendall(kept, ASKED)
        assert b"" == await rest(kept)
        await stopping


async def test_an_idle_client_does_not_hold_up_the_end() -> None:
    async with open_door() as door:
        with await kept_open(door):
            await door.stop()
            assert not door.server.server_state.connections


async def test_before_a_drain_each_answer_says_that_it_is_the_last_of_its_connection() -> None:
    async with open_door() as door:
        kept = await kept_open(door)
        door.server.leave()
        await asyncio.get_running_loop().sock_sendall(kept, ASKED)
        answer = await rest(kept)
        assert b" 200 OK" in answer and b"connection: close\r\n" in answer
        await door.stop()
