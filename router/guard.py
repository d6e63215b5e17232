"""uvicorn's httptools protocol with the bounds that it lacks.

httptools is the fast parser, but uvicorn sets it no limit: 100 MB of headers are taken in, and a connection may send
one byte a minute for ever (CVE-2025-48956 was this in another server). Here headers are bounded in bytes and lines
(431), and a request must arrive in time or its connection is closed. Bodies are bounded where they are read.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 32 * 1024  # request line included; browsers and proxies stay under 16 KiB
MAX_HEADER_LINES = 100
HEADER_TIMEOUT_S = 10.0  # from the first byte of a request, or from connecting, to the end of its headers
BODY_TIMEOUT_S = 30.0  # 2 MB in this time is 70 KB/s

_BODY = b'{"error":"Request headers are larger than 32 KiB or more than 100","error_type":"validation"}'
TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


class GuardedHttpProtocol(HttpToolsProtocol):
    """One connection with bounded headers and bounded waiting."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._is_in_headers = True
        self._num_header_bytes = 0
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline(HEADER_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_deadline(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._is_in_headers:  # counted before parsing: httptools keeps an unfinished header in memory
            self._num_header_bytes += len(data)
        super().data_received(data)
        if self._is_in_headers and self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_headers = True
        self._num_header_bytes = 0
        self._set_deadline(HEADER_TIMEOUT_S)

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > MAX_HEADER_BYTES or len(self.headers) > MAX_HEADER_LINES:
            self._refuse()
        else:
            self._set_deadline(BODY_TIMEOUT_S)
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._set_deadline(None)
        if not self._is_refused:
            super().on_message_complete()

    def _refuse(self) -> None:
        if not self._is_refused:
            self._is_refused = True
            self.transport.write(TOO_LARGE)
            self.transport.close()

    def _set_deadline(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.close)
