"""uvicorn's httptools protocol with the bounds that it lacks, and a short way for streams.

httptools is the fast parser, but uvicorn sets it no limit: 100 MB of headers or trailers are taken in, and a connection
may send one byte a minute for ever (CVE-2025-48956 was this in another server). Here all that is not body is bounded in
bytes and lines (431), trailers are dropped, and whatever a client owes has a clock, always. A connection waits for

    the headers of a request   header_timeout      from connecting, or from the first byte of a later request
    its body                   body_timeout        from the end of the headers
    its answer                 no limit            but each byte of it must be read within unread_timeout (transport.py)
    the next request           keep_alive_timeout  from the end of the answer; empty lines do not count
    the rest of a refused one  body_timeout        it is thrown away, so that the client can read why (transport.py)

Requests that arrive before the answer to an earlier one wait for it; as long as uvicorn does not read, no clock runs.
What the HTTP layer refuses is answered in the schema of all errors, in its turn. A request that also asks for another
protocol (Java's client asks for HTTP/2) is answered as if it had not; one of HTTP/1.0 gets its answer unframed, up to
the connection's end. Where connections are short, the peer that has the most gives one up.

`ClientConnection` is how an application writes the middle of a stream, past ASGI: the layers of ASGI cost more for each
token than all of the rest.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http import HTTPStatus
from itertools import chain
from typing import Any

import httptools
import orjson
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.http.transport import ClientTransport, Connections

MAX_PIPELINED = 16  # requests that wait for the answer to an earlier one; clients that send any are rare
FREE_BODY_PARTS, LEAST_BODY_PART = 1000, 64  # chunks or packets of a body, and bytes of each one beyond, on average
EXTENSION = "lockstep.connection"
FRAMING = (b"content-length", b"transfer-encoding")  # headers that say where a body ends


def refusal(status: int, error: str, error_type: str = "validation", header: str = "") -> bytes:
    """A whole answer, after which the connection is closed."""
    body = orjson.dumps({"error": error, "error_type": error_type})
    return (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        f"{header}content-length: {len(body)}\r\n\r\n"
    ).encode() + body


MALFORMED = refusal(400, "The request is not valid HTTP/1.1")
TIMED_OUT = refusal(408, "The request did not arrive in time", "request_timeout")
UNKNOWN_CODING = refusal(501, "The body has a Transfer-Encoding other than `chunked`: send it as it is")
TOO_SMALL_PARTS = refusal(400, "The body comes in thousands of parts of a few bytes each: send larger ones")
STOPPING = refusal(503, "The server is stopping or restarting", "unavailable", "retry-after: 1\r\n")
TOO_LARGE = refusal(431, "The request's headers or trailers are larger or more than the server takes")
TOO_MANY = refusal(429, "Too many connections or unanswered requests", "overloaded", "retry-after: 1\r\n")


class ClientGone(Exception):
    """The connection is lost: the answer is not wanted any more."""


class ClientConnection:
    """The connection to one client, for what a route does with it beyond ASGI."""

    def __init__(self, protocol: GuardedHttpProtocol) -> None:
        self._protocol = protocol
        self._transport = protocol.transport
        self._is_lost = False
        self._on_lost: Callable[[], object] | None = None

    @staticmethod
    def of(scope: Scope) -> ClientConnection:
        """The connection of a request."""
        connection: ClientConnection = scope["extensions"][EXTENSION]
        return connection

    def write_chunk(self, data: bytes) -> int:
        """Send a part of the body of an answer that has begun. Returns how many bytes wait in this process."""
        return self._transport.send(b"%x\r\n%b\r\n" % (len(data), data) if self._protocol.is_framed else data)

    def coming(self, num_bytes: int) -> AbstractContextManager[None]:
        """Count bytes as unread that the block writes once the client has taken what is before them."""
        return self._transport.coming(num_bytes)

    def cut(self) -> None:
        """Reset the connection, with all that waits to be sent."""
        self._protocol.end_answer()  # or uvicorn would report one without an end
        self._transport.reset()

    @contextmanager
    def needed(self) -> Iterator[None]:
        """Cancel the block as soon as the connection is lost; it then ends with ClientGone."""
        task = asyncio.current_task()
        assert task is not None
        if self._is_lost:
            raise ClientGone
        self._on_lost = task.cancel
        try:
            yield
        except asyncio.CancelledError:
            if self._is_lost and task.uncancel() == 0:
                raise ClientGone from None
            raise
        finally:
            self._on_lost = None

    def lost(self) -> None:
        """Cancel the block that needs the connection, which is gone. The protocol calls this."""
        self._is_lost = True
        if self._on_lost is not None:
            self._on_lost()


class Refused(Exception):
    """Stops the parser."""


class Arriving(enum.Enum):
    """What of a request the parser is in."""

    NOTHING = enum.auto()
    HEADERS = enum.auto()
    BODY = enum.auto()


class GuardedHttpProtocol(HttpToolsProtocol):
    """One connection with bounded headers, bounded waiting and bounded buffers."""

    connection: ClientConnection
    transport: ClientTransport

    def __init__(self, *args: Any, shared: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shared = shared
        self._limits = shared.limits
        self._clock: asyncio.TimerHandle | None = None
        self._waits_among: dict[Any, None] | None = None  # which of the shared lists this connection is in
        self._arriving = Arriving.NOTHING
        self._num_framing_bytes = 0  # since the request began or, later, since the last byte of its body
        self._num_header_bytes = self._num_header_lines = 0
        self._num_body_bytes = self._num_body_parts = 0
        self._due: deque[RequestResponseCycle] = deque()  # answers, the running one first
        self._is_clock_due = False  # for another part of a request than the clock runs for
        self._cause = MALFORMED  # why a callback stopped the parser
        self._is_primed = True  # the parser reads what the client has sent, and not what it is told of it
        self._last_words: bytes | None = None  # once no more requests are taken: what follows the answers that are due

    # ------------------------------------------------------------------------------------------- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Bound the kernel's send buffer and the wait for the first request; make room if there is none."""
        super().connection_made(ClientTransport(transport, self._shared, self.loop))
        self.connection = ClientConnection(self)
        self._peer = self.client[0] if self.client else None
        self._shared.of_peer.setdefault(self._peer, {})[self] = None
        self._wait_for_client()
        if len(self.connections) > self._shared.max_connections:
            self._make_room()

    def _make_room(self) -> None:
        """A connection that closes gives way, then one that waits for a request, sends one, is not read; else this one.

        Of those that wait or send, one of the peer with the most connections comes first.
        """
        shared = self._shared
        largest = shared.of_largest_peer()
        crowds = (filter(largest.__contains__, among) for among in (shared.idle, shared.in_headers, shared.in_body))
        first, *others = crowds
        for other in chain(shared.closing, first, shared.idle, *others, shared.in_headers, shared.in_body):
            if other is not self:
                other.give_way()
                return
        if not shared.unread.reset_slowest(self.loop.time()):
            self._refuse(TOO_MANY)
            self.transport.end()

    def give_way(self) -> None:
        """End this connection, which waits for its client, as another one needs its place; an unread one is reset."""
        if self._arriving is not Arriving.NOTHING and not self.transport.is_closing():
            self._refuse(TOO_MANY)
        if self.transport.num_unread:
            self.transport.reset()
        else:
            self.transport.end()
        self._wait_for_client()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all clocks and cancel the answer."""
        self._set_clock(None)
        self._wait_among(None)
        self._shared.forget(self._peer, self)
        self.transport.lost()
        super().connection_lost(exc)
        self.end_answer()  # uvicorn tells the newest request alone
        for cycle in self._due:
            cycle.body = bytearray()  # it would stay until the next full garbage collection
        self.connection.lost()

    def shutdown(self) -> None:
        """The server ends: wait for the answers that are due, and for nothing else."""
        if self.transport.is_closing():
            self.transport.end()
        self.transport.is_receiving = False
        if self._arriving is Arriving.HEADERS:
            self._refuse(STOPPING, lingers=False)
        else:
            super().shutdown()

    # --------------------------------------------------------------------------------------------------- parsing

    def data_received(self, data: bytes) -> None:
        """Parse what has come, or throw it away if no more requests are taken from this connection."""
        if self._last_words is not None or self.transport.is_closing():
            self.transport.discard(len(data))
            return
        self._num_framing_bytes += len(data)  # counted before parsing: httptools keeps an unfinished header in memory
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse(self._cause)
        else:
            if self._num_framing_bytes > self._limits.max_header_bytes:
                self._refuse(TOO_LARGE)
        if self._is_clock_due:
            self._wait_for_client()

    def _parse(self, data: bytes) -> None:
        """Read a request that asks for another protocol on as if it had not: httptools stops behind its headers."""
        while data:
            try:
                return self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as stopped:
                data = data[stopped.args[0] :]
            framing = [pair for pair in self.headers if pair[0] in FRAMING]
            self.parser = httptools.HttpRequestParser(self)
            self._is_primed = False
            try:
                self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(b"%b: %b\r\n" % pair for pair in framing))
            finally:
                self._is_primed = True

    def on_message_begin(self) -> None:
        """A request begins; its scope gets the connection."""
        if not self._is_primed:
            return
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: self.connection}  # type: ignore[dict-item]
        self._num_framing_bytes = self._num_header_bytes = self._num_header_lines = 0
        self._num_body_bytes = self._num_body_parts = 0
        self.transport.num_discarded = 0
        self._arrives(Arriving.HEADERS)
        if len(self.pipeline) == MAX_PIPELINED:
            self._stop(TOO_MANY)

    def on_url(self, url: bytes) -> None:
        """A part of the request line."""
        if not self._is_primed:
            return
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer: these count alike and are dropped, so that none is taken for a header."""
        if not self._is_primed:
            return
        self._num_header_lines += 1
        self._count(len(name) + len(value) + 4)
        if self._arriving is Arriving.HEADERS:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A request that will be answered."""
        if not self._is_primed:
            return
        if any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in self.headers):
            self._stop(UNKNOWN_CODING)  # which would be taken undecoded
        super().on_headers_complete()
        if not _knows_chunks(self.cycle):
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _UpToTheEnd()
        if self._shared.is_leaving:
            self.cycle.keep_alive = False
        self._due.append(self.cycle)
        self._arrives(Arriving.BODY)

    def on_body(self, body: bytes) -> None:
        """A part of the body, unless it came too late to matter."""
        self._num_framing_bytes = 0
        self._num_body_bytes += len(body)
        self._num_body_parts += 1
        if self._num_body_parts > FREE_BODY_PARTS + self._num_body_bytes // LEAST_BODY_PART:
            self._stop(TOO_SMALL_PARTS)  # each costs as much time as thousands of bytes
        if self.cycle.response_complete:
            self.transport.discard(len(body))
        else:
            super().on_body(body)
            if self.pipeline:
                self.transport.num_ahead += len(body)
                self.transport.note_unread()

    def on_message_complete(self) -> None:
        """The request is there as a whole."""
        if self.parser.should_upgrade():
            return  # its body is still to come: see `_parse`
        super().on_message_complete()
        self._num_framing_bytes = 0
        self._arrives(Arriving.NOTHING)

    def _count(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        limits = self._limits
        if self._num_header_bytes > limits.max_header_bytes or self._num_header_lines > limits.max_header_lines:
            self._stop(TOO_LARGE)

    def _stop(self, cause: bytes) -> None:
        self._cause = cause
        raise Refused

    def _arrives(self, part: Arriving) -> None:
        self._arriving = part
        self.transport.is_receiving = part is not Arriving.NOTHING
        self._is_clock_due = True

    # -------------------------------------------------------------------------------------------------- answering

    def on_response_complete(self) -> None:
        """The next answer is due, or the last words, or the client's next request."""
        super().on_response_complete()
        self.transport.num_ahead = 0
        self._unset_keepalive_if_required()  # ours goes on when empty lines come
        self._due.popleft().body = bytearray()  # a part that is not wanted would stay as long as the connection
        if self._last_words is None:
            self._wait_for_client()
        elif not self._due:
            self._close_with_last_words()

    def _refuse(self, answer: bytes, *, lingers: bool = True) -> None:
        """Take no more from this connection: it ends with `answer`, after the answers that are due."""
        if self._last_words is not None:
            return
        self._last_words = answer
        self.transport.is_receiving = lingers
        if self._arriving is Arriving.BODY:
            self._drop_newest_request()
        if not self._due:
            self._close_with_last_words()

    def _drop_newest_request(self) -> None:
        """Its body will not come: nothing more is said to it if its answer has begun, else it gets the last words."""
        if self.cycle.response_started:
            self._last_words = b""
            return
        if self.pipeline:
            self.pipeline.popleft()
        else:
            self.end_answer()
        self._due.pop()

    @property
    def is_framed(self) -> bool:
        """Whether the answer that is due comes in chunks; another version of HTTP may have been asked for behind it."""
        return not self._due or _knows_chunks(self._due[0])

    def end_answer(self) -> None:
        """What the application waits for in this answer ends, and what it says is dropped."""
        if self._due:
            self._due[0].disconnected = True
            self._due[0].message_event.set()

    def _close_with_last_words(self) -> None:
        self.transport.write(self._last_words)
        self.close()

    # --------------------------------------------------------------------------------------------------- clocks

    def _wait_for_client(self) -> None:
        """Start the clock for what the client owes now, if it is its turn."""
        limits, shared, seconds, waits_among = self._limits, self._shared, None, None
        self._is_clock_due = False
        if self.transport.is_closing():
            waits_among = shared.closing  # a clock of the transport runs
        elif self._last_words is not None or self.pipeline:
            pass  # an answer is computed
        elif self._arriving is Arriving.HEADERS:
            waits_among, seconds = shared.in_headers, limits.header_timeout
        elif self._arriving is Arriving.BODY:
            waits_among, seconds = shared.in_body, limits.body_timeout
        elif self.cycle is None:  # nothing has come, and it is as likely to come as the rest of headers
            waits_among, seconds = shared.in_headers, limits.header_timeout
        elif not self._due:
            waits_among, seconds = shared.idle, limits.keep_alive_timeout
        self._wait_among(waits_among)
        self._set_clock(seconds)

    def _wait_among(self, others: dict[Any, None] | None) -> None:
        """Be the last in this list of connections, and in no other."""
        if self._waits_among is not None:
            self._waits_among.pop(self, None)
        if others is not None:
            others[self] = None
        self._waits_among = others

    def _set_clock(self, seconds: float | None) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._clock = None if seconds is None else self.loop.call_later(seconds, self._on_clock)

    def _on_clock(self) -> None:
        if self._arriving is Arriving.NOTHING:
            self.close()
        else:
            self._refuse(TIMED_OUT, lingers=False)

    def close(self) -> None:
        """End a connection on which no request is under way."""
        self.transport.close()
        self._wait_for_client()


def _knows_chunks(cycle: RequestResponseCycle) -> bool:
    """Whether the client that asked for this answer does."""
    return bool(cycle.scope["http_version"] != "1.0")


class _UpToTheEnd(int):
    """The length of an answer that ends with its connection: for uvicorn, which counts, any number of bytes is it."""

    def __lt__(self, other: int) -> bool:
        return False

    def __sub__(self, other: int) -> _UpToTheEnd:
        return self

    def __ne__(self, other: object) -> bool:
        return False
