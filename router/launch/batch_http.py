"""The HTTP client of jobs: httpx2's transport, with a bound on everything that is waited for.

It sends what jobs send, POSTs with a JSON body, over TCP or TLS, on connections that stay open. Of httpx2 it takes the
transport alone: no redirects, no proxies, no cookies, no compression, and nothing from the environment. A connection
that was closed while it was idle is replaced; one that is closed just when a request comes costs a try.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from contextlib import aclosing
from types import TracebackType
from urllib.parse import urlsplit

import httpx2

from router.jobs.lines import Problem, Wanted
from router.jobs.results import Reply
from router.jobs.runner import Lost

CONNECT_S = 10.0
MOST_ANSWER_BYTES = 1 << 26
MOST_WHY = 200  # characters of what is told of a lost connection, which may quote the server
MOST_RETRY_AFTER_S = 300.0  # whatever a server says: it may be back sooner
# So long after a peer has vanished without a word the kernel says so: 60 + 4 * 15 s.
SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)
NO_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None)


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
    base = f"{parts.scheme}://{parts.netloc}"
    try:
        httpx2.URL(base)
    except httpx2.InvalidURL as error:
        raise ValueError(f"{url} is no server's URL: {error}") from None
    return base


class HttpSender:
    """Sends requests to a server by its URL. Raises ValueError for what is none.

    timeout_s: of one answer, from its request to its last byte. An async context manager.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        self._base, self._timeout_s = base_of(url), timeout_s
        self._headers = {b"Content-Type": b"application/json", b"User-Agent": b"lockstep-batch"}
        if api_key is not None:
            self._headers[b"Authorization"] = b"Bearer " + api_key.encode()
        self._tls = ssl.create_default_context()
        # Of one connection each: one of 512 looks at all of them for each request, and takes three times as long.
        self._idle: list[httpx2.AsyncHTTPTransport] = []
        # A connection and its TLS have half of the time each, so that whether a request was sent is known.
        self._connect_s = min(CONNECT_S, timeout_s / 2)
        self._extensions = {"timeout": {"connect": self._connect_s}}

    async def __aenter__(self) -> HttpSender:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._idle:
            await self._idle.pop().aclose()

    async def send(self, wanted: Wanted, request_id: str) -> Reply | Problem:
        """The answer to a request. Raises Lost."""
        headers = {**self._headers, b"X-Request-Id": request_id.encode()}
        url = self._base + wanted.url
        request = httpx2.Request("POST", url, headers=headers, content=wanted.body, extensions=self._extensions)
        transport = self._idle.pop() if self._idle else self._new_transport()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await _ask(transport, request, wanted, request_id)
        except TimeoutError:
            raise Lost(f"there was no answer within {self._timeout_s:g} s", was_sent=True) from None
        except (httpx2.ConnectTimeout, httpx2.PoolTimeout):
            raise Lost(f"no connection to {self._base} within {self._connect_s:g} s", was_sent=False) from None
        except httpx2.ConnectError as error:
            raise Lost(f"no connection to {self._base}: {_why(error)}", was_sent=False) from None
        except httpx2.RemoteProtocolError as error:
            raise Lost(f"the answer is not whole, or is not HTTP: {str(error)[:MOST_WHY]}", was_sent=True) from None
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise Lost(f"the connection was lost: {_why(error)}", was_sent=True) from None
        finally:
            self._idle.append(transport)

    def _new_transport(self) -> httpx2.AsyncHTTPTransport:
        return httpx2.AsyncHTTPTransport(self._tls, limits=NO_LIMITS, socket_options=SOCKET_OPTIONS)


async def _ask(
    transport: httpx2.AsyncHTTPTransport, request: httpx2.Request, wanted: Wanted, request_id: str
) -> Reply | Problem:
    body = bytearray()
    async with aclosing(await transport.handle_async_request(request)) as response:
        async for piece in response.aiter_raw():
            body += piece
            if len(body) > MOST_ANSWER_BYTES:
                sentence = f"the answer is larger than {MOST_ANSWER_BYTES} bytes: ask for less of it"
                return Problem(wanted.custom_id, "answer_too_large", sentence)
    named = response.headers.get("x-request-id", request_id)
    return Reply(response.status_code, named, bytes(body), _seconds(response.headers.get("retry-after")))


def _seconds(retry_after: str | None) -> float | None:
    """A `Retry-After` of whole seconds; a date is read as none."""
    if retry_after is None or not retry_after.strip().isdecimal():
        return None
    return min(float(retry_after), MOST_RETRY_AFTER_S)


def _why(error: BaseException) -> str:
    """What the kernel said, where it did, for httpx2 says no more than that it tried; else what httpx2 says."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno and not isinstance(cause, ssl.SSLError | socket.gaierror):
            return os.strerror(cause.errno).lower()
        cause = cause.__cause__ or cause.__context__
    return str(error)[:MOST_WHY] or type(error).__name__
