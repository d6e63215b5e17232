"""Two servers behind a balancer are restarted one after the other, under load, and no request is lost."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx2

from tests.running import Server, body

FLAGS = ("--model-id", "null", "--shutdown-delay", "5")
PROBE_S = 0.1


@dataclass
class Balancer:
    """Gives each connection to the next server that was healthy when it was last asked."""

    urls: list[str]
    healthy: list[str] = field(default_factory=list)
    used: int = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        probing = asyncio.create_task(self._probe())
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            probing.cancel()
            server.close()
            await asyncio.gather(probing, return_exceptions=True)

    async def _probe(self) -> None:
        async with httpx2.AsyncClient(timeout=5) as client:
            while True:
                self.healthy = [url for url in list(self.urls) if await self._is_healthy(client, url)]
                await asyncio.sleep(PROBE_S)

    async def _is_healthy(self, client: httpx2.AsyncClient, url: str) -> bool:
        try:
            return (await client.get(f"{url}/health")).status_code == 200
        except httpx2.TransportError:
            return False

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.used += 1
        address = urlsplit(self.healthy[self.used % len(self.healthy)])
        other_reader, other_writer = await asyncio.open_connection(address.hostname, address.port)
        await asyncio.gather(_copy(reader, other_writer), _copy(other_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(ConnectionError):
        writer.close()


async def load(url: str, stop: asyncio.Event) -> list[str]:
    """One request after the other, each on a connection of its own; the texts."""
    texts = []
    asked = body("Once", max_new_tokens=50)
    while not stop.is_set():
        async with httpx2.AsyncClient(timeout=60) as client:
            answer = await client.post(f"{url}/generate", json=asked, headers={"connection": "close"})
        assert 200 == answer.status_code, answer.text
        texts.append(answer.json()["generated_text"])
    return texts


def test_no_request_is_lost() -> None:
    async def story(servers: list[Server], after: ExitStack) -> None:
        balancer = Balancer([server.url for server in servers])
        stop = asyncio.Event()
        async with balancer.running() as url:
            while len(balancer.healthy) < 2:
                await asyncio.sleep(PROBE_S)
            clients = [asyncio.create_task(load(url, stop)) for _ in range(8)]
            for server in servers:
                server.stop(signal.SIGTERM)
                code, output = await asyncio.to_thread(server.wait)
                assert 0 == code, output
                fresh = await asyncio.to_thread(after.enter_context, Server(*FLAGS))
                balancer.urls = [fresh.url if url == server.url else url for url in balancer.urls]
                while len(balancer.healthy) < 2:
                    await asyncio.sleep(PROBE_S)
            stop.set()
            texts = [text for answers in await asyncio.gather(*clients) for text in answers]
        assert 1 == len(set(texts))
        assert len(texts) > 50

    with ExitStack() as stack:
        asyncio.run(story([stack.enter_context(Server(*FLAGS)) for _ in range(2)], stack))
