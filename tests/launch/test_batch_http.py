"""What a job hears from servers that answer, answer nonsense, close, or say nothing."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress

import httpx2
import pytest

from launch.commands import batch as http_module
from launch.commands.batch import HttpSender, base_of
from router.jobs.lines import BatchRequest, Problem, Reply
from router.jobs.runner import NoAnswer

REQUEST = BatchRequest("a", "/v1/completions", b'{"prompt": "x"}')
OK = b"HTTP/1.1 200 OK\r\nX-Request-Id: their-id\r\nContent-Length: 2\r\n\r\n{}"


class Server:
    """Says these bytes to each request, in turn; b"" closes without a word, None says nothing."""

    def __init__(self, *answers: bytes | None) -> None:
        self.heard: list[bytes] = []
        self.num_connections = 0
        self.tasks: list[asyncio.Task[None]] = []
        self._answers = list(answers)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        assert task is not None
        self.tasks.append(task)
        with suppress(OSError, EOFError):
            while self._answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.heard.append(head + await reader.readexactly(length))
                answer = self._answers.pop(0)
                if answer is None:
                    await reader.read()
                    break
                writer.write(answer)
                if not answer or b"close" in answer.lower() or b"hunk" in answer[:9]:
                    break
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def told(server: Server, story: Callable[[HttpSender], Awaitable[None]], timeout_s: float = 5.0) -> None:
    async def run() -> None:
        async with await asyncio.start_server(server, "127.0.0.1", 0) as listener:
            port = listener.sockets[0].getsockname()[1]
            async with HttpSender(f"http://127.0.0.1:{port}/v1/", "the-key", timeout_s) as sender:
                await story(sender)
            async with asyncio.timeout(20):
                await asyncio.gather(*server.tasks)

    asyncio.run(run())


def test_a_connection_serves_one_request_after_another() -> None:
    server = Server(OK, OK)

    async def story(sender: HttpSender) -> None:
        for _ in range(2):
            assert Reply(200, "their-id", b"{}") == await sender.send(REQUEST, "our-id")

    told(server, story)
    assert 1 == server.num_connections and 2 == len(server.heard)
    first = server.heard[0]
    assert first.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:") and first.endswith(REQUEST.body)
    assert b"Authorization: Bearer the-key\r\n" in first and b"X-Request-Id: our-id\r\n" in first


def test_chunks_and_retry_after_are_read() -> None:
    chunked = b"HTTP/1.1 429 X\r\nRetry-After: 7\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n"
    dated = chunked.replace(b"7", b"Wed, 21 Oct 2026 07:28:00 GMT")

    async def story(sender: HttpSender) -> None:
        assert Reply(429, "our-id", b"{}", 7.0) == await sender.send(REQUEST, "our-id")
        assert Reply(429, "our-id", b"{}", None) == await sender.send(REQUEST, "our-id")

    told(Server(chunked, dated), story)


def test_a_connection_that_was_closed_while_idle_is_replaced() -> None:
    server = Server(OK.replace(b"OK", b"close"), OK)

    async def story(sender: HttpSender) -> None:
        assert isinstance(await sender.send(REQUEST, "x"), Reply)
        await asyncio.gather(*server.tasks)  # the server has closed it, and did not say so in a header
        assert isinstance(await sender.send(REQUEST, "x"), Reply)

    told(server, story)
    assert 2 == server.num_connections and 2 == len(server.heard)


def test_a_connection_that_is_closed_when_a_request_comes_costs_a_try() -> None:
    server = Server(OK, b"", OK)

    async def story(sender: HttpSender) -> None:
        assert isinstance(await sender.send(REQUEST, "x"), Reply)
        with pytest.raises(NoAnswer, match="without sending a response") as lost:
            await sender.send(REQUEST, "x")
        assert lost.value.was_sent
        assert isinstance(await sender.send(REQUEST, "x"), Reply)

    told(server, story)
    assert 2 == server.num_connections and 3 == len(server.heard)


def test_what_a_server_sets_or_moves_is_not_followed() -> None:
    moved = OK.replace(b"200 OK", b"307 X").replace(b"X-Req", b"Location: /v1/x\r\nSet-Cookie: a=b\r\nX-Req")
    server = Server(moved, OK)

    async def story(sender: HttpSender) -> None:
        assert Reply(307, "their-id", b"{}") == await sender.send(REQUEST, "x")
        assert Reply(200, "their-id", b"{}") == await sender.send(REQUEST, "x")

    told(server, story)
    assert b"cookie" not in server.heard[1].lower() and b"accept-encoding" not in server.heard[1].lower()


def test_proxies_of_the_environment_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    async def story(sender: HttpSender) -> None:
        assert isinstance(await sender.send(REQUEST, "x"), Reply)

    told(Server(OK), story)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"", "the answer is not whole, or is not HTTP: Server disconnected without sending a response"),
        (OK.replace(b"OK", b"close")[:-1], "the answer is not whole.*received 1 bytes, expected 2"),
        (b"SSH-2.0 close\r\n\r\n", "the answer is not whole, or is not HTTP: illegal status line"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000, "Receive buffer too long"),
        (None, "no answer within 0.3 s"),
    ],
)
def test_what_is_no_answer_has_a_sentence(answer: bytes | None, says: str) -> None:
    async def story(sender: HttpSender) -> None:
        with pytest.raises(NoAnswer, match=says) as lost:
            await sender.send(REQUEST, "x")
        assert lost.value.was_sent

    told(Server(answer), story, timeout_s=0.3)


def test_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "MOST_ANSWER_BYTES", 4000)

    async def story(sender: HttpSender) -> None:
        found = await sender.send(REQUEST, "x")
        assert isinstance(found, Problem) and ("a", "answer_too_large") == (found.custom_id, found.code)

    told(Server(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n" + b"x" * 5000), story)


async def test_a_reset_is_named() -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async with await asyncio.start_server(reset, "127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        async with HttpSender(url, None, 5) as sender:
            with pytest.raises(NoAnswer, match="the connection was lost: connection reset by peer") as lost:
                await sender.send(REQUEST, "x")
            assert lost.value.was_sent


def test_keep_alive_is_asked_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    ask = httpx2.AsyncHTTPTransport.handle_async_request

    async def asked(self: httpx2.AsyncHTTPTransport, request: httpx2.Request) -> httpx2.Response:
        response = await ask(self, request)
        raw = response.extensions["network_stream"].get_extra_info("socket")
        found.extend(raw.getsockopt(level, option) for level, option, _ in http_module.SOCKET_OPTIONS)
        return response

    monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", asked)

    async def story(sender: HttpSender) -> None:
        assert isinstance(await sender.send(REQUEST, "x"), Reply)

    told(Server(OK), story)
    assert [1, 60, 15, 4] == found


async def test_nobody_there_was_not_asked() -> None:
    async with HttpSender("http://127.0.0.1:1", None, 1) as sender:
        with pytest.raises(NoAnswer, match=r"no connection to http://127\.0\.0\.1:1: connection refused$") as lost:
            await sender.send(REQUEST, "x")
        assert not lost.value.was_sent


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("127.0.0.1:3000", "no server's URL"),
        ("ftp://a", "no server's URL"),
        ("http://", "no server's URL"),
        ("http://a/v1/completions", "no server's URL"),
        ("http://a:99999", "no port"),
        ("http://me:secret@a", "--api-key"),
        ("http://a?x=1", "URL alone"),
        ("http://a\x00b", "no server's URL"),
        ("http://\u2603\u0301.\u06e6", "no server's URL"),
    ],
)
def test_what_is_no_url_gets_a_sentence(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        base_of(url)


def test_urls_of_servers() -> None:
    for url in ("https://a", "https://a/", "https://a/v1", "https://a/v1/"):
        assert "https://a" == base_of(url)
    assert "http://[::1]:80" == base_of("http://[::1]:80")
