"""A small HTTP/1.1 client for jobs: connections that stay open, and a bound on everything that is waited for.

It sends what jobs send, one POST with a JSON body at a time on each connection, over TCP or TLS, and reads the answer
with httptools, which the server reads requests with. A connection that was closed while it was idle is noticed by its
first byte not coming, and another one is opened at once. Left out: redirects, proxies, compression.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import urlsplit

import httptools

from router.jobs.lines import Problem, Wanted
from router.jobs.results import Reply
from router.jobs.runner import Lost

CONNECT_S = 10.0
MOST_ANSWER_BYTES = 1 << 26
MOST_HEADER_BYTES = 1 << 16
PIECE = 1 << 16
MOST_RETRY_AFTER_S = 300.0  # whatever a server says: it may be back sooner
# So long after a peer has vanished without a word the kernel says so: 60 + 4 * 15 s.
KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))


class TooLarge(Exception):
    """An answer, or its headers, is larger than is read."""


@dataclass
class Answer:
    """What httptools finds in the bytes of one answer. It calls the methods that begin with `on_`."""

    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    is_whole: bool = False
    stays_open: bool = False  # the connection, behind this answer
    parser: httptools.HttpResponseParser | None = None

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self.body += body
        if len(self.body) > MOST_ANSWER_BYTES:
            raise TooLarge

    def on_message_complete(self) -> None:
        """The end. Only now does the parser know of the connection."""
        self.is_whole = True
        self.stays_open = self.parser is not None and self.parser.should_keep_alive()


@dataclass
class Connection:
    """One to the server, with nothing under way on it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_used: bool = False

    def close(self) -> None:
        """Drop it, whatever is under way."""
        self.writer.transport.abort()


def base_of(url: str) -> str:
    """The URL of a server as `urlsplit` reads it, without a path. Raises ValueError."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"{url} has no port from 1 to 65535") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.rstrip("/") not in ("", "/v1"):
        raise ValueError(f"{url} is no server's URL: give one such as http://127.0.0.1:3000")
    if parts.username is not None or parts.query or parts.fragment or port == 0:
        raise ValueError("give the server's URL alone, such as http://127.0.0.1:3000, and a key with --api-key")
    return f"{parts.scheme}://{parts.netloc}"


class HttpSender:
    """Sends requests to a server by its URL. Raises ValueError for what is none.

    timeout_s: of one answer, from the first byte of its request to its last one. An async context manager.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        parts = urlsplit(base_of(url))
        assert parts.hostname is not None
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []
        self._head = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\nUser-Agent: lockstep-batch\r\n"
        if api_key is not None:
            self._head += f"Authorization: Bearer {api_key}\r\n"

    async def __aenter__(self) -> HttpSender:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._idle:
            self._idle.pop().close()

    async def send(self, wanted: Wanted, request_id: str) -> Reply | Problem:
        """The answer to a request. Raises Lost."""
        while True:
            connection = self._idle.pop() if self._idle else await self._connect()
            was_used, answer = connection.is_used, Answer()
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._ask(connection, wanted, request_id, answer)
            except TooLarge:
                sentence = f"the answer is larger than {MOST_ANSWER_BYTES} bytes: ask for less of it"
                return Problem(wanted.custom_id, "answer_too_large", sentence)
            except TimeoutError:
                raise Lost(f"there was no answer within {self._timeout_s:g} s", was_sent=True) from None
            except httptools.HttpParserError:
                raise Lost("the answer is not HTTP", was_sent=True) from None
            except (OSError, EOFError) as error:
                if was_used and not answer.headers:
                    continue  # it was closed while it was idle
                raise Lost(f"the connection was lost: {_why(error)}", was_sent=True) from None
            finally:
                if connection not in self._idle:
                    connection.close()

    async def _connect(self) -> Connection:
        where = f"{self._host}:{self._port}"
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=PIECE)
        except TimeoutError:
            raise Lost(f"no connection to {where} within {CONNECT_S:g} s", was_sent=False) from None
        except OSError as error:
            raise Lost(f"no connection to {where}: {_why(error)}", was_sent=False) from None
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE:
            raw.setsockopt(socket.IPPROTO_TCP, option, value)
        return Connection(reader, writer)

    async def _ask(self, connection: Connection, wanted: Wanted, request_id: str, answer: Answer) -> Reply:
        connection.is_used = True
        head = f"POST {wanted.url} HTTP/1.1\r\n{self._head}X-Request-Id: {request_id}\r\n"
        connection.writer.write(f"{head}Content-Length: {len(wanted.body)}\r\n\r\n".encode() + wanted.body)
        await connection.writer.drain()
        parser = answer.parser = httptools.HttpResponseParser(answer)
        num_bytes = 0
        while not answer.is_whole:
            piece = await connection.reader.read(PIECE)
            if not piece:
                raise EOFError
            num_bytes += len(piece)
            _feed(parser, piece)
            if num_bytes - len(answer.body) > 2 * MOST_HEADER_BYTES + len(answer.body):
                raise TooLarge
        answer.parser = None  # they know each other, and would stay until a garbage collection
        if answer.stays_open:
            self._idle.append(connection)
        named = answer.headers.get("x-request-id", request_id)
        return Reply(parser.get_status_code(), named, bytes(answer.body), _seconds(answer.headers.get("retry-after")))


def _feed(parser: httptools.HttpResponseParser, piece: bytes) -> None:
    """Parse. Raises TooLarge, which the parser would hide behind an error of its own, and HttpParserError."""
    try:
        parser.feed_data(piece)
    except httptools.HttpParserCallbackError as error:
        if isinstance(error.__context__, TooLarge):
            raise TooLarge from None
        raise


def _seconds(retry_after: str | None) -> float | None:
    """A `Retry-After` of whole seconds; a date is read as none."""
    if retry_after is None or not retry_after.strip().isdecimal():
        return None
    return min(float(retry_after), MOST_RETRY_AFTER_S)


def _why(error: OSError | EOFError) -> str:
    if isinstance(error, ssl.SSLError | socket.gaierror):
        return error.strerror or str(error)
    if isinstance(error, OSError):
        return os.strerror(error.errno).lower() if error.errno else str(error) or type(error).__name__
    return "the server closed it"
