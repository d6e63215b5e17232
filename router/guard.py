"""uvicorn's httptools protocol with the bounds that it lacks, and a short way for streams.

httptools is the fast parser, but uvicorn sets it no limit: 100 MB of headers are taken in, and a connection may send
one byte a minute for ever (CVE-2025-48956 was this in another server). Here headers are bounded in bytes and lines
(431), and a request must arrive in time or its connection is closed. Bodies are bounded where they are read.

Answers are bounded too. What a client does not read waits in the kernel's send buffer, which has a fixed size here, and
then in this process: a stream is told how much that is after each write, and what is left of any answer has a limited
time to be read. `ClientConnection` is how an application writes the middle of a stream, past ASGI: the layers of ASGI
cost more for each token than all of the rest.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 32 * 1024  # request line included; browsers and proxies stay under 16 KiB
MAX_HEADER_LINES = 100
HEADER_TIMEOUT_S = 10.0  # from the first byte of a request, or from connecting, to the end of its headers
BODY_TIMEOUT_S = 30.0  # 2 MB in this time is 70 KB/s
UNREAD_TIMEOUT_S = 60.0  # for a client to read what is left of an answer that is complete
SEND_BUFFER_BYTES = 256 * 1024  # of the kernel, for each connection; Linux grants the double, and up to 4 MB unasked
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, for no time
EXTENSION = "lockstep.connection"

_BODY = b'{"error":"Request headers are larger than 32 KiB or more than 100","error_type":"validation"}'
TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


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
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return self._transport.get_write_buffer_size()

    def limit_unread(self) -> None:
        """Say that no more will come: what the client has not read after UNREAD_TIMEOUT_S is lost."""
        self._protocol.limit_unread()

    def cut(self) -> None:
        """Reset the connection, with all that waits to be sent."""
        self._protocol.cycle.disconnected = True  # or uvicorn would report an answer without an end
        self._protocol.reset()

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
        """Tell whoever needs the connection that it is gone. The protocol calls this."""
        self._is_lost = True
        if self._on_lost is not None:
            self._on_lost()


class GuardedHttpProtocol(HttpToolsProtocol):
    """One connection with bounded headers, bounded waiting and bounded buffers."""

    connection: ClientConnection

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._unread_deadline: asyncio.TimerHandle | None = None
        self._is_in_headers = True
        self._num_header_bytes = 0
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Bound the kernel's send buffer and the wait for the first request."""
        super().connection_made(transport)
        self.connection = ClientConnection(self)
        self._set_option(socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._set_deadline(HEADER_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all clocks and tell whoever answers."""
        self._set_deadline(None)
        self._lift_unread_limit()
        super().connection_lost(exc)
        self.connection.lost()

    def data_received(self, data: bytes) -> None:
        """Parse what has come, unless headers grow beyond MAX_HEADER_BYTES."""
        if self._is_refused:
            return
        if self._is_in_headers:  # counted before parsing: httptools keeps an unfinished header in memory
            self._num_header_bytes += len(data)
        super().data_received(data)
        if self._is_in_headers and self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse()

    def on_message_begin(self) -> None:
        """A request begins: its headers must end in time, and its scope gets the connection."""
        super().on_message_begin()
        self._lift_unread_limit()
        self.scope["extensions"] = {EXTENSION: self.connection}  # type: ignore[dict-item]
        self._is_in_headers = True
        self._num_header_bytes = 0
        self._set_deadline(HEADER_TIMEOUT_S)

    def on_headers_complete(self) -> None:
        """Refuse headers that are too many or too large, else wait for the body."""
        self._is_in_headers = False
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > MAX_HEADER_BYTES or len(self.headers) > MAX_HEADER_LINES:
            self._refuse()
        else:
            self._set_deadline(BODY_TIMEOUT_S)
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body, unless the request was refused."""
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is there as a whole."""
        self._set_deadline(None)
        if not self._is_refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is there as a whole: the client has limited time to read the rest."""
        super().on_response_complete()
        self.limit_unread()

    def limit_unread(self) -> None:
        """Reset the connection unless what waits in this process is sent within UNREAD_TIMEOUT_S."""
        self._lift_unread_limit()
        if self.transport.get_write_buffer_size():
            self._unread_deadline = self.loop.call_later(UNREAD_TIMEOUT_S, self._reset_unread)

    def _lift_unread_limit(self) -> None:
        if self._unread_deadline is not None:
            self._unread_deadline.cancel()

    def _reset_unread(self) -> None:
        if self.transport.get_write_buffer_size():
            self.reset()

    def reset(self) -> None:
        """Close at once. The kernel forgets its unsent bytes too, which it would go on offering to a slow reader."""
        self._set_option(socket.SO_LINGER, RESET)
        self.transport.abort()

    def _set_option(self, option: int, value: int | bytes) -> None:
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, option, value)

    def _refuse(self) -> None:
        if not self._is_refused:
            self._is_refused = True
            self.transport.write(TOO_LARGE)
            self.transport.close()

    def _set_deadline(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.close)
