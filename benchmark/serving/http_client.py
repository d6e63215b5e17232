"""Streamed requests as a benchmark needs them: TGI's and OpenAI's bodies, and the moment each token arrived.

One request is one connection (`Connection: close`): a connect costs a fraction of a millisecond next to a prefill, and
no request can inherit another one's broken connection. Not here: retries, redirects, proxies, compression, HTTP/2.

Why not httpx2: the client shares its cores with the server, and what it spends is measured as the server's slowness.
64 streams at 47 events a second each, on one x86-64 core of 2026: this client 11 % of the core (37 µs an event; 5 % and
16 µs on uvloop, which `serving` uses), httpx2 34 % (119 µs; 21 % and 76 µs on uvloop). HTTP itself is still parsed by a
library, httptools.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import httptools
import orjson

MOST_BODY = 16 * 2**20  # bytes of an answer, or of an event, that are kept: a server that sends more is cut off
PLAIN_TIMEOUT_S = 30.0  # of everything but generation
UNREACHABLE, DISCONNECTED, TIMEOUT, MALFORMED = "unreachable", "disconnected", "timeout", "malformed"


# What a request asks: a text, or the messages of a conversation, each with its role and its content.
Asked = str | Sequence[Mapping[str, str]]


def as_text(asked: Asked) -> str:
    """A conversation as one text, its messages on lines of their own, for an API that takes no messages."""
    return asked if isinstance(asked, str) else "\n".join(message["content"] for message in asked)


def as_messages(asked: Asked) -> list[Mapping[str, str]]:
    """A text as the one message of a user."""
    return [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)


@dataclass(slots=True)
class Reply:
    """What the client saw of one request. Times are `time.perf_counter`, in seconds."""

    sent_at: float
    ended_at: float = 0.0
    token_times: list[float] = field(default_factory=list)  # one for each event that carried text
    num_tokens: int = 0
    num_prompt_tokens: int | None = None  # as the server counted them, where it tells
    error: str | None = None  # None; a status such as "429"; the server's own word; or one of the four above
    detail: str = ""  # what the server said with the error
    status: int = 0  # of HTTP; 0 where no answer came
    text: str = ""  # of the answer, where it was asked for


class StreamEvent(NamedTuple):
    """What one server-sent event says, whatever the API."""

    has_token: bool = False
    is_last: bool = False
    num_tokens: int | None = None  # of the whole request, where the server counts for us
    num_prompt_tokens: int | None = None
    error: str | None = None
    text: str = ""


class Api(Protocol):
    """How one family of servers is spoken to."""

    path: str

    def body(self, asked: Asked, output_length: int, adapter: str = "") -> dict[str, Any]:
        """The body of a streamed, greedy request for `output_length` tokens. adapter: its name; empty: none."""

    def read(self, data: bytes) -> StreamEvent:
        """One event. Raises ValueError, LookupError, TypeError or AttributeError if it is none of this API."""


class TgiApi:
    """`/generate_stream` of Lockstep and TGI. Lockstep reads `ignore_eos`; TGI, which cannot, passes over it."""

    path = "/generate_stream"

    def __init__(self, *, ignore_eos: bool = False) -> None:
        self._further: dict[str, Any] = {"ignore_eos": True} if ignore_eos else {}

    def body(self, asked: Asked, output_length: int, adapter: str = "") -> dict[str, Any]:
        """The body of a streamed, greedy request, with details so that the server counts its tokens."""
        parameters = {"max_new_tokens": output_length, "details": True, **self._further}
        if adapter:
            parameters["adapter_id"] = adapter
        return {"inputs": as_text(asked), "parameters": parameters}

    def read(self, data: bytes) -> StreamEvent:
        """One event. Raises ValueError, LookupError, TypeError or AttributeError if it is none of this API."""
        event = orjson.loads(data)
        if "token" not in event:
            return StreamEvent(error=str(event.get("error_type", "error")))
        details = event.get("details") or {}
        return StreamEvent(
            has_token=True,
            is_last=event["generated_text"] is not None,
            num_tokens=details.get("generated_tokens"),
            num_prompt_tokens=details.get("input_length"),
            text=event["token"]["text"],
        )


class OpenAiApi:
    """`/v1/completions`. Several tokens may come in one event, so the count of tokens is the server's `usage`."""

    path = "/v1/completions"

    def __init__(self, model: str, *, ignore_eos: bool = True) -> None:
        self._always: dict[str, Any] = {"model": model, "temperature": 0, "stream": True}
        self._always |= {"stream_options": {"include_usage": True}} | ({"ignore_eos": True} if ignore_eos else {})

    def body(self, asked: Asked, output_length: int, adapter: str = "") -> dict[str, Any]:
        """The body of a streamed, greedy request that also asks for the count of its tokens."""
        return {"prompt": as_text(asked), "max_tokens": output_length, **self._always, **_named(adapter)}

    def read(self, data: bytes) -> StreamEvent:
        """One event. Raises ValueError, LookupError, TypeError or AttributeError if it is none of this API."""
        if data == b"[DONE]":
            return StreamEvent(is_last=True)
        event = orjson.loads(data)
        if "choices" not in event:
            return StreamEvent(error=_openai_error(event))
        usage = event.get("usage") or {}
        text, is_token = self._said(event["choices"][0]) if event["choices"] else ("", False)
        return StreamEvent(is_token, False, usage.get("completion_tokens"), usage.get("prompt_tokens"), None, text)

    def _said(self, choice: Mapping[str, Any]) -> tuple[str, bool]:
        """The text of an event, and whether it is a token."""
        # An empty text may be a token whose character is not whole yet; with a finish reason it is only the end.
        return choice["text"], bool(choice["text"]) or not choice.get("finish_reason")


class ChatApi(OpenAiApi):
    """`/v1/chat/completions`. What a model thinks before its answer is generated as the answer is, and counts."""

    path = "/v1/chat/completions"

    def body(self, asked: Asked, output_length: int, adapter: str = "") -> dict[str, Any]:
        """The body of a streamed, greedy request; `max_tokens`, which some servers know alone."""
        return {"messages": as_messages(asked), "max_tokens": output_length, **self._always, **_named(adapter)}

    def _said(self, choice: Mapping[str, Any]) -> tuple[str, bool]:
        """The first event has a role and no text, and is no token."""
        delta = choice["delta"]
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        text = delta.get("content") or ""
        return text, bool(text or thought or delta.get("tool_calls"))


def _named(adapter: str) -> dict[str, str]:
    return {"model": adapter} if adapter else {}


def _openai_error(event: dict[str, Any]) -> str:
    error = event.get("error")
    return str(error.get("type") or "error") if isinstance(error, dict) else "error"


class HttpExchange(asyncio.Protocol):
    """One exchange. httptools finds the body in the bytes; a 200's body is cut into server-sent events as it comes."""

    def __init__(self, request: bytes, on_event: Callable[[bytes, float], None] | None) -> None:
        self.body = bytearray()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._on_event = on_event
        self._parser = httptools.HttpResponseParser(self)

    @property
    def status(self) -> int:
        """The HTTP status; 0 before the head of the answer is there."""
        return self._parser.get_status_code()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio: send the request."""
        cast(asyncio.WriteTransport, transport).write(self._request)  # uvloop's transports are no subclass of it

    def data_received(self, data: bytes) -> None:
        """Called by asyncio, with bytes that need not be whole events."""
        arrived_at = time.perf_counter()  # of every token in these bytes, before any of them is parsed
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._end()
        if self._on_event is not None and self.status == 200:
            self._cut_events(self._on_event, arrived_at)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio: the exchange is over, whatever came of it."""
        self._end()

    def on_body(self, body: bytes) -> None:
        """Called by httptools, with pieces of the body that need not be whole events."""
        self.body += body
        if len(self.body) > MOST_BODY:
            self._end()

    def on_message_complete(self) -> None:
        """Called by httptools: the body is complete."""
        self._end()

    def _cut_events(self, on_event: Callable[[bytes, float], None], arrived_at: float) -> None:
        """Hand over the whole lines of the body that carry data; comments and blank lines are dropped."""
        end = self.body.rfind(b"\n") + 1
        if not end:
            return
        lines = bytes(self.body[:end]).split(b"\n")
        del self.body[:end]
        for line in lines:
            if line.startswith(b"data:"):
                on_event(line[5:].strip(), arrived_at)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class HttpClient:
    """Sends requests to one server, each over a connection of its own."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        self._host = parts.hostname or ""
        self._host_header = parts.netloc.rpartition("@")[2]
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path
        self._timeout_s = timeout_s
        self._key_line = f"Authorization: Bearer {api_key}\r\n" if api_key else ""

    async def stream(
        self, api: Api, asked: Asked, output_length: int, *, adapter: str = "", keep_text: bool = False
    ) -> Reply:
        """One request, to its last token or its error. Never raises for what a server can do."""
        reply = Reply(sent_at=time.perf_counter())
        stream = _Stream(api, reply, keep_text)
        try:
            async with asyncio.timeout(self._timeout_s):
                body = orjson.dumps(api.body(asked, output_length, adapter))
                connection = await self._exchange("POST", api.path, body, stream.take)
            stream.close(connection)
        except TimeoutError:
            reply.error = TIMEOUT
        except OSError as error:
            reply.error, reply.detail = UNREACHABLE, str(error)
        reply.ended_at = time.perf_counter()
        return reply

    async def json(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and parsed body (None if it is not JSON) of a plain exchange. Raises OSError, TimeoutError."""
        exchange = await self._plain(method, path, b"" if body is None else orjson.dumps(body))
        try:
            return exchange.status, orjson.loads(exchange.body)
        except orjson.JSONDecodeError:
            return exchange.status, None

    async def text(self, path: str) -> str:
        """The body of the answer to a GET. Raises OSError, TimeoutError."""
        return (await self._plain("GET", path, b"")).body.decode()

    async def _plain(self, method: str, path: str, body: bytes) -> HttpExchange:
        """A whole exchange that nothing is streamed in."""
        async with asyncio.timeout(PLAIN_TIMEOUT_S):
            exchange = await self._exchange(method, path, body, None)
        if not exchange.status:
            raise ConnectionResetError("it cut the connection")
        if len(exchange.body) > MOST_BODY:
            raise ConnectionResetError(f"its answer to {path} has more than {MOST_BODY} bytes")
        return exchange

    async def _exchange(
        self, method: str, path: str, body: bytes, on_event: Callable[[bytes, float], None] | None
    ) -> HttpExchange:
        head = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\nHost: {self._host_header}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{self._key_line}\r\n"
        )
        loop = asyncio.get_running_loop()
        transport, connection = await loop.create_connection(
            lambda: HttpExchange(head.encode() + body, on_event), self._host, self._port, ssl=self._tls
        )
        try:
            await connection.ended
        finally:
            transport.abort()
        return connection


class _Stream:
    """Notes the events of one stream in its reply."""

    def __init__(self, api: Api, reply: Reply, keep_text: bool) -> None:
        self._api = api
        self._reply = reply
        self._keep_text = keep_text
        self._is_over = False

    def take(self, data: bytes, arrived_at: float) -> None:
        reply = self._reply
        try:
            event = self._api.read(data)
        except (ValueError, LookupError, TypeError, AttributeError):
            event = StreamEvent(error=MALFORMED)
        if event.has_token:
            reply.token_times.append(arrived_at)
        reply.num_tokens = event.num_tokens or max(reply.num_tokens, len(reply.token_times))
        reply.num_prompt_tokens = event.num_prompt_tokens or reply.num_prompt_tokens
        reply.error = reply.error or event.error
        self._is_over |= event.is_last
        if self._keep_text:
            reply.text += event.text

    def close(self, connection: HttpExchange) -> None:
        """Judge what came: a stream without its last event was cut."""
        reply = self._reply
        reply.status = connection.status
        if connection.status not in (0, 200):
            reply.error, reply.detail = str(connection.status), connection.body.decode(errors="replace")[:200]
        elif not self._is_over or not reply.token_times:
            reply.error = reply.error or DISCONNECTED
