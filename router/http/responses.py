"""Responses that never wait for the client: JSON at once, files from memory, and streams of server-sent events.

JSON counts as unread from when it is there: behind an earlier answer that its client does not read, it waits beside the
transport, which alone would not know of it.

Sending a file from disk would hold a descriptor and a thread's time for each client, and would answer ranges that no
browser asks of a script. Sending it whole would count as unread in full; so it goes in pieces, each when the client has
taken those before it. They are views: however many clients leave them unread, the file is there once.

A stream is written to the connection itself, past ASGI. Its status line is sent only once its first event is there, so
that a refusal has its real status. A client that does not read is cut off once too much waits for it; a stream that is
silent for long gets a sign of life, because proxies close silent connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Any, Protocol

from orjson import dumps
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.errors import SlowClient
from router.http.guard import ClientConnection, ClientGone
from router.requests.continuing import NOTHING, Journal, Prepare
from router.requests.generation import OpenRequest
from router.scheduling.request import Event


class PlainAnswer(Response):
    """JSON that is ready."""

    media_type = "application/json"

    def __init__(self, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(bytes(memoryview(content)), headers=headers)  # orjson's own bytes take eight times their size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        with ClientConnection.of(scope).coming(len(self.body)):
            await super().__call__(scope, receive, send)


PIECE_BYTES = 16 * 1024


class StaticFile(Response):
    """The whole content, in pieces."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        content = memoryview(self.body)
        for begin in range(0, len(content), PIECE_BYTES):
            piece = content[begin : begin + PIECE_BYTES]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


PING = b": ping\n\n"  # a comment: clients ignore it, proxies see that the stream lives
# Proxies cut connections that are silent for a minute or less.
KEEP_ALIVE_S = 15.0
# Of a stream, in this process: some thousand events that the client has not read, beyond what the kernel holds for it.
MAX_UNREAD_BYTES = 256 * 1024


class Frames(Protocol):
    """How an API writes the events of its streams. Some have a method `prepare` too (`Prepare`)."""

    def write(self, index: int, events: list[Event]) -> bytes:
        """All frames for these events, at least one, of the sequence of this number."""


def frame(event: Mapping[str, object]) -> bytes:
    """One server-sent event. JSON has no raw newline, so one event is always one line."""
    return b"data: " + dumps(event) + b"\n\n"


def named_frame(event: Mapping[str, Any]) -> bytes:
    """The same, named after its type."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), dumps(event))


async def first_events(opened: OpenRequest) -> list[tuple[int, list[Event]]]:
    """The events that come first, or none after KEEP_ALIVE_S: then it is time to show that the request lives."""
    try:
        async with asyncio.timeout(KEEP_ALIVE_S):
            return await opened.next_events()
    except TimeoutError:
        return []


class EventStream(Response):
    """The response that streams the events of one open request, and closes it."""

    media_type = "text/event-stream"

    def __init__(
        self,
        opened: OpenRequest,
        frames: Frames,
        first: list[tuple[int, list[Event]]],
        headers: dict[str, str],
        ping: bytes = PING,
        journal: Journal | None = None,
    ) -> None:
        """journal: what tells a balancer of the stream."""
        super().__init__(None, headers=headers)
        del self.headers["content-length"]
        self._opened = opened
        self._frames = frames
        self._prepare: Prepare | None = getattr(frames, "prepare", None)
        self._first = first
        self._journal = journal
        self._ping = ping if journal is None else ping + NOTHING
        self._num_writes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with closing(self._opened), suppress(ClientGone), (connection := ClientConnection.of(scope)).needed():
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with self._heartbeat(connection):
                # Resuming a coroutine costs more the deeper its stack is. ASGI's is deep; a task has one of its own.
                await asyncio.create_task(self._write_events(connection))
            self._opened.close()  # its place is free, however slowly the client reads what is left
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write_events(self, connection: ClientConnection) -> None:
        events, write, most_unread = self._first, self._frames.write, MAX_UNREAD_BYTES
        while True:
            if self._journal is not None:
                data = await self._journalled(events, self._journal)
            else:
                if self._prepare is not None:
                    await self._prepare(events)
                data = b"".join([write(*some) for some in events]) if events else self._ping
            num_unread = 0
            if data:  # there may be nothing to show yet, and an empty chunk would be the end
                num_unread = connection.write_chunk(data)
                self._num_writes += 1
                most_unread = max(most_unread, 2 * len(data))  # what was written at once, no client could have read
            if self._opened.is_over:
                return
            if num_unread > most_unread:
                self._opened.fail(SlowClient(num_unread))
                return connection.cut()
            events = await self._opened.next_events()

    async def _journalled(self, events: list[tuple[int, list[Event]]], journal: Journal) -> bytes:
        """The frames, and what tells a balancer of them; none of what the client has from another server."""
        if not events:
            return self._ping
        new = await journal.new(events, self._prepare, self._frames.write)
        if not new:
            return b""
        if self._prepare is not None:
            await self._prepare(new)
        return b"".join([self._frames.write(*some) for some in new]) + journal.line(new)

    @contextmanager
    def _heartbeat(self, connection: ClientConnection) -> Iterator[None]:
        """Show that the stream lives whenever nothing was written for a while, KEEP_ALIVE_S at most."""
        self._beat(connection, num_seen=-1)
        try:
            yield
        finally:
            self._next_beat.cancel()

    def _beat(self, connection: ClientConnection, num_seen: int) -> None:
        if num_seen == self._num_writes:
            connection.write_chunk(self._ping)
        later = asyncio.get_running_loop().call_later
        self._next_beat = later(KEEP_ALIVE_S / 2, self._beat, connection, self._num_writes)
