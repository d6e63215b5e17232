"""Two servers are restarted one after the other under load that goes to whichever is healthy, and no request is lost.

A server promises to take requests for `--shutdown-delay` after it last said that it is healthy, on new connections and
on those that are kept open. Who asks on a busy machine may learn later than that of its end: what is refused then is
lost to nobody and is sent to the other. A refusal within the delay is a loss, and so is a new connection that is cut.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field

import httpx2
import pytest

from tests.running import Server, body

DELAY_S = 5
FLAGS = ("--model-id", "null", "--shutdown-delay", str(DELAY_S))
PROBE_S = 0.1
PATIENCE_S = 300  # a bound of liveness


@dataclass
class Balancer:
    """Names the servers that were healthy when they were last asked, in turns."""

    urls: list[str]
    healthy: list[str] = field(default_factory=list)
    said_at: dict[str, float] = field(default_factory=dict)  # when the last question was sent that one answered well
    used: int = 0

    @asynccontextmanager
    async def probing(self) -> AsyncIterator[None]:
        probing = asyncio.create_task(self._probe())
        try:
            yield
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)

    async def _probe(self) -> None:
        async with httpx2.AsyncClient(timeout=PATIENCE_S) as client:
            while True:
                self.healthy = [url for url in list(self.urls) if await self._is_healthy(client, url)]
                await asyncio.sleep(PROBE_S)

    async def _is_healthy(self, client: httpx2.AsyncClient, url: str) -> bool:
        asked_at = time.monotonic()
        try:
            if (await client.get(f"{url}/health")).status_code != 200:
                return False
        except httpx2.TransportError:
            return False
        self.said_at[url] = asked_at
        return True

    async def all_healthy(self) -> None:
        while set(self.healthy) != set(self.urls):
            await asyncio.sleep(PROBE_S)

    async def next(self) -> str:
        while not self.healthy:
            await asyncio.sleep(PROBE_S)
        self.used += 1
        return self.healthy[self.used % len(self.healthy)]

    def may_refuse(self, url: str) -> bool:
        """Whether a server's promise is over."""
        return time.monotonic() - self.said_at[url] >= DELAY_S


async def load(balancer: Balancer, stop: asyncio.Event, *, keeps_open: bool) -> list[str]:
    """One request after the other; the texts. keeps_open: on connections that are used again."""
    texts = []
    asked = body("Once", max_new_tokens=50)
    headers = {} if keeps_open else {"connection": "close"}
    async with httpx2.AsyncClient(timeout=PATIENCE_S) as client:
        while not stop.is_set():
            url = await balancer.next()
            try:
                answer = await client.post(f"{url}/generate", json=asked, headers=headers)
            except httpx2.TransportError as error:
                if not balancer.may_refuse(url) or not (keeps_open or isinstance(error, httpx2.ConnectError)):
                    raise
                continue
            if answer.status_code == 503 and balancer.may_refuse(url):
                continue
            assert 200 == answer.status_code, answer.text
            texts.append(answer.json()["generated_text"])
    return texts


@pytest.mark.rest
def test_no_request_is_lost() -> None:
    async def story(servers: list[Server], after: ExitStack) -> None:
        balancer = Balancer([server.url for server in servers])
        stop = asyncio.Event()
        async with balancer.probing():
            await balancer.all_healthy()
            clients = [asyncio.create_task(load(balancer, stop, keeps_open=number % 2 == 0)) for number in range(8)]
            for server in servers:
                server.stop(signal.SIGTERM)
                code, output = await asyncio.to_thread(server.wait, PATIENCE_S)
                assert 0 == code, output
                fresh = await asyncio.to_thread(after.enter_context, Server(*FLAGS))
                balancer.urls = [fresh.url if url == server.url else url for url in balancer.urls]
                await balancer.all_healthy()
            stop.set()
            answers = await asyncio.gather(*clients)
        assert all(answers)  # each client was served
        assert 1 == len({text for texts in answers for text in texts})

    with ExitStack() as stack:
        asyncio.run(story([stack.enter_context(Server(*FLAGS)) for _ in range(2)], stack))
