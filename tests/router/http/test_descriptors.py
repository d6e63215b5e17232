"""Few descriptors and many connections: who makes room for whom, and probes that cost next to nothing."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Iterable

import pytest

from router.__main__ import SPARE_FILES, listener_descriptors, max_connections
from router.config import RouterConfig
from router.shards.client import ShardError, ShardHealth
from tests.router.http.raw_clients import (
    PATIENCE_S,
    POST,
    PROBE,
    SCRIPT,
    Client,
    assert_refused,
    short_site,
    stream,
    unread,
)
from tests.router.site import Site, serving

# --------------------------------------------------------------------------------------------------------- descriptors


IN_HEADERS = POST
IN_BODY = POST + b"content-length: 9\r\n\r\n{"


async def hung_up(clients: Iterable[Client]) -> None:
    """All of them are closed, and the server has had time to see it: its end is closed before its loop is."""
    for client in clients:
        client.writer.close()
    await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    "held, first", [([IN_HEADERS] * 3, 0), ([IN_BODY] * 3, 0), ([IN_BODY, stream(1000), IN_HEADERS], 2)]
)
async def test_where_none_is_idle_who_owes_headers_or_a_body_makes_room(held: list[bytes], first: int) -> None:
    async with short_site() as it:
        settings = RouterConfig("a", "b", ("c",))
        async with serving(it.app, settings, max_connections=3) as it.port:
            clients = []
            for begun in held:
                clients.append(await Client.to(it, begun))
                await asyncio.sleep(0.05)
            probe = await Client.to(it, PROBE)
            assert 200 == (await probe.answer())[0]
            assert 429 == (await clients[first].answer())[0]
            await hung_up((*clients, probe))


async def test_the_peer_with_the_most_connections_makes_room() -> None:
    """Whoever came first: one that opens hundreds takes no place of others'."""
    async with short_site() as it:
        settings = RouterConfig("a", "b", ("c",))
        async with serving(it.app, settings, max_connections=4) as it.port:
            first = await Client.to(it, IN_BODY, local_addr=("127.0.0.2", 0))
            await asyncio.sleep(0.05)
            crowd = [await Client.to(it, IN_HEADERS) for _ in range(3)]
            await asyncio.sleep(0.05)
            probe = await Client.to(it, PROBE)
            assert 200 == (await probe.answer())[0]
            assert 429 == (await crowd[0].answer())[0]
            first.writer.write(b" " * 9)
            await asyncio.sleep(0.05)
            assert not first.reader.at_eof()
            await hung_up((first, *crowd, probe))


async def test_who_has_been_answered_and_does_not_read_makes_room_at_once() -> None:
    """Closed once all is sent, it would keep its descriptor for as long as it likes to read nothing."""
    async with short_site() as it:
        settings = RouterConfig("a", "b", ("c",), send_buffer_bytes=4096)
        last = SCRIPT.replace(b"host: x", b"host: x\r\nconnection: close")
        async with serving(it.app, settings, max_connections=2) as it.port:
            answered = await unread(it, last)
            head = b"".join([await answered.reader.readexactly(1) for _ in range(400)])
            size = int(head.lower().split(b"content-length: ")[1].split()[0])
            await answered.reader.readexactly(size - 18_000)  # the rest is written, though not sent
            await asyncio.sleep(0.1)
            idle = await Client.to(it, PROBE)
            assert 200 == (await idle.answer())[0]
            probe = await Client.to(it, PROBE)
            assert 200 == (await probe.answer())[0]
            async with asyncio.timeout(settings.unread_timeout / 4):
                assert b"reset" == await answered.rest()
            idle.writer.write(PROBE)
            assert 200 == (await idle.answer())[0]
            await hung_up((idle, probe))


async def test_where_none_is_idle_who_does_not_read_makes_room() -> None:
    async with short_site() as it:
        settings = RouterConfig("a", "b", ("c",), send_buffer_bytes=4096)
        async with serving(it.app, settings, max_connections=3) as it.port:
            clients = []
            for _ in range(3):
                clients.append(await unread(it, SCRIPT))
                assert b"H" == await clients[-1].reader.readexactly(1)
            await asyncio.sleep(0.05)
            probe = await Client.to(it, PROBE)
            assert 200 == (await probe.answer())[0]
            assert b"reset" == await clients[0].rest()
            await hung_up((*clients, probe))


async def test_many_connections_are_accepted_in_one_turn_of_the_event_loop() -> None:
    """The loop accepts one a turn at each descriptor, and turns are long while many bodies arrive."""
    async with asyncio.timeout(PATIENCE_S):
        loop, accepted = asyncio.get_running_loop(), 0

        class Counting(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                nonlocal accepted
                accepted += 1

        listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        clients = [socket.create_connection(listener.getsockname()) for _ in range(64)]
        servers = [await loop.create_server(Counting, sock=door) for door in listener_descriptors(listener)]
        num_turns = 0
        while accepted < len(clients):
            await asyncio.sleep(0)
            num_turns += 1
        assert num_turns < len(clients) / 2
        for end in (*clients, *servers):
            end.close()


async def test_the_connection_that_is_idle_the_longest_makes_room() -> None:
    async with short_site() as it:
        settings = RouterConfig("a", "b", ("c",))
        async with serving(it.app, settings, max_connections=3) as port:
            it.port = port
            clients = []
            for _ in range(3):
                clients.append(await Client.to(it, PROBE))
                await clients[-1].answer()
            clients[0].writer.write(PROBE)
            await clients[0].answer()
            clients.append(await Client.to(it, PROBE))
            await clients[-1].answer()
            assert b"" == await clients.pop(1).rest()
            for client in clients:
                client.writer.write(stream(1000))
                await client.reader.readuntil(b"data: ")
            assert_refused(await (await Client.to(it)).rest(), 429, "overloaded")
            await hung_up(clients)


def test_the_limit_of_descriptors_is_raised_and_leaves_some() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 300), hard))
        found = max_connections()
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert hard == raised or raised == 2**20
    assert raised - SPARE_FILES - 500 < found < raised - SPARE_FILES


# -------------------------------------------------------------------------------------------------------------- probes


async def test_many_probes_ask_the_shards_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone() -> ShardHealth:
        raise ShardError(0, "gone")

    async def probe(it: Site) -> int:
        client = await Client.to(it, PROBE)
        try:
            return (await client.answer())[0]
        finally:
            client.writer.close()

    async with short_site() as it:
        asked = 0
        health = it.shards.health

        async def counted() -> ShardHealth:
            nonlocal asked
            asked += 1
            await asyncio.sleep(0.05)
            return await health()

        monkeypatch.setattr(it.shards, "health", counted)
        monkeypatch.setattr("router.shards.client.REUSED_S", 3600.0)
        assert [200] * 50 == await asyncio.gather(*(probe(it) for _ in range(50)))
        assert 1 == asked
        monkeypatch.setattr(it.shards, "health", gone)
        monkeypatch.setattr("router.shards.client.REUSED_S", 0.0)
        assert [503] * 50 == await asyncio.gather(*(probe(it) for _ in range(50)))
