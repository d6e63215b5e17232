"""The HTTP side over fake shards, served on loopback as the router serves it, for many test modules."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import httpx2
import uvicorn
from fastapi import FastAPI
from fastapi.utils import create_model_field

from router.apis.app import create_app
from router.apis.document import api_document
from router.batching.adapter_mover import AdapterMover
from router.batching.batcher import Batcher
from router.config import RouterConfig
from router.http.guard import GuardedHttpProtocol
from router.http.transport import Connections
from router.scheduling.adapters import AdapterRows
from router.scheduling.grammar import Matching
from router.telemetry.metrics import Metrics
from router.telemetry.tracing import NoTracer, Tracer
from router.text.tokenizer import ModelTokenizer
from tests.router.doubles import EOS, byte_tokenizer, fake_shards, make_limits
from tests.router.fake_shards import FakeShardedClient

PROMPT = "hello"
ADAPTER_ROOM = {"adapter_rows": 3, "adapter_bytes": 100}


@dataclass
class Site:
    """A served application and its parts."""

    app: FastAPI
    http: httpx2.AsyncClient
    port: int
    batcher: Batcher
    shards: FakeShardedClient
    metrics: Metrics
    settings: RouterConfig

    async def post(self, path: str, inputs: str = PROMPT, *, stream: bool | None = None, **parameters: Any) -> Any:
        body: dict[str, Any] = {"inputs": inputs, "parameters": parameters}
        return await self.http.post(path, json=body if stream is None else {**body, "stream": stream})

    async def all_free(self) -> None:
        """Wait until no request has left anything behind."""
        async with asyncio.timeout(60):  # a bound of liveness
            while self.shards.live_ids or self.batcher.num_free_blocks < self.batcher.limits.num_blocks:
                await asyncio.sleep(0.001)


@asynccontextmanager
async def site(shards: FakeShardedClient | None = None, **options: Any) -> AsyncIterator[Site]:
    """What `unserved` makes, on a loopback port, through the guarded protocol."""
    async with unserved(shards, **options) as it:
        async with serving(it.app, it.settings) as it.port:
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{it.port}", timeout=60, verify=False) as it.http:
                yield it


DOCUMENTS: dict[tuple[bool, ...], bytes] = {}


def document_once(app: FastAPI, *, has_keys: bool, is_on_loopback: bool) -> bytes:
    """The API's document, which takes longer to make than the rest of an application and is always the same."""
    if (key := (has_keys, is_on_loopback)) not in DOCUMENTS:
        DOCUMENTS[key] = api_document(app, has_keys=has_keys, is_on_loopback=is_on_loopback)
    return DOCUMENTS[key]


@cache
def schema_of(shape: Any, mode: Any) -> Any:
    return create_model_field(name="", type_=shape, mode=mode)


def schema_once(name: str, type_: Any, mode: str = "validation") -> Any:
    """What the framework makes of an answer's shape, for every application anew."""
    field = copy(schema_of(type_, mode))
    field.name = name
    return field


@asynccontextmanager
async def unserved(
    shards: FakeShardedClient | None = None,
    *,
    config: dict[str, Any] | None = None,
    tokenizer: ModelTokenizer | None = None,
    tracer: Tracer | None = None,
    matching: Matching | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **limits: Any,
) -> AsyncIterator[Site]:
    """Without a port. tokenizer: None stands for one token for each byte; matching: None for no grammars.

    clock: the batcher's.
    """
    tokenizer = tokenizer or byte_tokenizer()
    given = {"model_id": "a/model", "model_path": "/nowhere", "shard_sockets": ("x",), **(config or {})}
    settings = RouterConfig(**given)
    wanted = make_limits(**(ADAPTER_ROOM if settings.has_adapters else {}) | limits)
    shards = shards or fake_shards(wanted)
    metrics = Metrics(wanted)
    rows = AdapterRows(wanted.adapter_rows, wanted.adapter_bytes, None)
    adapters = AdapterMover(shards if wanted.adapter_rows else None, rows)
    batcher = Batcher(shards, tokenizer, wanted, metrics, matching=matching, adapters=adapters, clock=clock)
    with patch("router.apis.app.api_document", document_once), patch("fastapi.routing.create_model_field", schema_once):
        app = create_app(
            settings,
            limits=wanted,
            model=await shards.info(),
            cache=await shards.warmup(),
            tokenizer=tokenizer,
            shards=shards,
            batcher=batcher,
            metrics=metrics,
            tracer=tracer or NoTracer(),
            shelf=adapters if wanted.adapter_rows else None,
        )
    task = asyncio.create_task(batcher.run())
    async with in_process(app) as http:
        yield Site(app, http, 0, batcher, shards, metrics, settings)
    task.cancel()
    await asyncio.wait({task})
    await adapters.close()


@asynccontextmanager
async def serving(app: FastAPI, settings: RouterConfig, max_connections: int = 1000) -> AsyncIterator[int]:
    """The application on the port that this gives."""
    listener = socket.create_server(("127.0.0.1", 0))
    shared, protocols = Connections(settings, max_connections), list[Any]()

    def protocol(*args: Any, **options: Any) -> Any:
        protocols.append(GuardedHttpProtocol(*args, **options, shared=shared))
        return protocols[-1]

    fixed: dict[str, Any] = {"ws": "none", "log_config": None, "access_log": False}
    # A story that fails leaves connections behind: its server ends all the same.
    server = uvicorn.Server(uvicorn.Config(app, http=protocol, timeout_graceful_shutdown=5, **fixed))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup([listener])
    await server.on_tick(0)  # which would come every 0.1 s: what waits for it here is the end alone
    port: int = listener.getsockname()[1]
    try:
        yield port
    finally:
        for _ in range(5):  # in which it sees that clients have closed
            await asyncio.sleep(0)
        if server.server_state.connections or server.server_state.tasks:
            await server.shutdown([listener])
        else:  # the same without its tenth of a second
            for accepting in server.servers:
                accepting.close()
            listener.close()
            await server.lifespan.shutdown()
        for connection in protocols:  # also those that it counts no more, or has not closed within its 5 s
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.sleep(0)  # in which transports that close let their sockets go


def in_process(app: FastAPI) -> httpx2.AsyncClient:
    """Straight to the ASGI application, with headers that no client library would send."""
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://test")


@asynccontextmanager
async def answering_site(
    template: str, answer: str = "one two", limits: Mapping[str, int] | None = None, **config: Any
) -> AsyncIterator[Site]:
    """A site for chats whose shards give this answer. At its end no request has left anything behind."""
    shards = fake_shards(make_limits(), **answering(answer))
    async with site(shards, config={"chat_template": template, **config}, **(limits or {})) as it:
        it.http.timeout = 60  # the first chat may wait for a process
        yield it
        await it.all_free()


def events_in(text: str) -> list[dict[str, Any]]:
    frames = [frame for frame in text.split("\n\n") if frame and not frame.startswith(":")]
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def answering(text: str | bytes) -> dict[str, Any]:
    """Shards that answer PROMPT with this text and then EOS."""
    ids = [*(text.encode() if isinstance(text, str) else text), EOS]

    def next_token(token_ids: Any, *_: Any) -> int:
        return ids[min(len(token_ids) - len(PROMPT), len(ids) - 1)]

    return {"vocab_size": 257, "next_token": next_token}


def assert_is_error(answer: httpx2.Response, status: int, error_type: str) -> None:
    assert (answer.status_code, answer.json()["error_type"]) == (status, error_type)
    assert set(answer.json()) == {"error", "error_type"}
    assert answer.headers["content-type"] == "application/json"


async def raw(port: int, data: bytes) -> bytes:
    """Everything that the server says to these bytes until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        async with asyncio.timeout(60):  # a bound of liveness
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
