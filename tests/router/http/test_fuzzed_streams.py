"""Mutated byte streams straight at the HTTP protocol, with the whole application behind it, in virtual time.

1,000 streams, or 10,000 with `HYPOTHESIS_PROFILE=large`; stream N is always the same. Whatever arrives: nothing is
raised or logged as an error, no answer is a 5xx but 503 and 504, every error has our schema, and the connection of a
client that falls silent ends by its clocks. One client in eight reads nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import selectors
from typing import Any
from unittest.mock import MagicMock

import pytest
import uvicorn
from fastapi import FastAPI
from hypothesis import settings as hypothesis_settings
from uvicorn.server import ServerState

from router.config import RouterConfig
from router.http.guard import GuardedHttpProtocol
from router.http.transport import Connections
from tests.router.site import unserved

NUM_STREAMS = 1_000 if hypothesis_settings().max_examples <= 100 else 10_000
AT_ONCE = 1_000  # streams of one test
SETTINGS = RouterConfig("a", "b", ("c",), payload_limit=10_000)
# Virtual seconds until any silent connection has ended: one clock after the other, with refusals in between.
MOST_SECONDS = 10 + 30 + 30 + 75 + 2 * 60

JSON = b"content-type: application/json\r\n"
BODY = b'{"inputs":"hello","parameters":{"max_new_tokens":3,"details":true,"stop":["x"],"seed":1}}'
REQUESTS = [
    b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n",
    b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /info HTTP/1.0\r\nconnection: keep-alive\r\n\r\n",
    b"GET http://x/metrics?a=b#c HTTP/1.1\r\nhost: x\r\naccept: */*\r\n\r\n",
    b"GET /docs/swagger-ui.css HTTP/1.1\r\nhost: x\r\nrange: bytes=1-2,5-9\r\n\r\n",
    b"GET /nowhere/%2e%2e/%ff HTTP/1.1\r\nhost: x\r\nx-request-id: mine\r\n\r\n",
    b"DELETE /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    b"OPTIONS /generate HTTP/1.1\r\nhost: x\r\norigin: http://a\r\naccess-control-request-method: POST\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMA\r\n\r\n",
    *(
        b"POST /%b HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n%b" % (path, JSON, len(BODY), BODY)
        for path in (b"generate", b"generate_stream", b"", b"tokenize")
    ),
    b"POST /generate HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n%bcontent-length: 7\r\n\r\n%b" % (JSON, BODY),
    b"POST /generate_stream HTTP/1.1\r\nhost: x\r\n%btransfer-encoding: chunked\r\n\r\n%x;a=b\r\n%b\r\n1\r\n \r\n0\r\n"
    b"x-request-id: mine\r\ntrailer: too\r\n\r\n" % (JSON, len(BODY), BODY),
    b"POST /generate HTTP/1.1\r\nhost: x\r\n%bcontent-length: 20000\r\n\r\n" % JSON + b" " * 20_000,
]
WORDS = [
    b"\r\n", b"\n", b"\r", b"\0", b":", b" ", b"\t", b";", b"\xff", b"0\r\n\r\n", b"\r\n\r\n", b"HTTP/1.1", b"GET ",
    b"connection: close\r\n", b"content-length: 5\r\n", b"content-length: 99999999999999999999\r\n",
    b"transfer-encoding: chunked\r\n", b"transfer-encoding: gzip\r\n", b"expect: 100-continue\r\n", b"upgrade: h2c\r\n",
    b"x" * 40_000, b"a: b\r\n" * 101, b"fffffffffffffffff\r\n", b"origin: \x7f\xe9\r\n", b'"', b"}", b"[" * 1000,
]  # fmt: skip


def mutated(number: int) -> tuple[list[bytes], bool]:
    """The pieces in which stream `number` arrives, and whether its client reads."""
    choose = random.Random(number)
    data = bytearray(b"".join(choose.choices(REQUESTS, k=choose.choice((1, 1, 1, 2, 3, 20)))))
    for _ in range(choose.choice((0, 1, 1, 2, 4, 16))):
        at, length = choose.randrange(len(data) + 1), choose.choice((1, 1, 2, 10, 100))
        match choose.randrange(6):
            case 0:
                data[at : at + 1] = choose.randbytes(1)
            case 1:
                del data[at : at + length]
            case 2:
                data[at:at] = data[at : at + length]
            case 3:
                data[at:at] = choose.choice(WORDS)
            case 4:
                data[at : at + length] = choose.randbytes(length)
            case 5:
                data = data[:at] if choose.random() < 0.3 else data
    cuts = sorted(choose.randrange(len(data) + 1) for _ in range(choose.choice((0, 1, 3))))
    pieces = [bytes(data[a:b]) for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    return pieces, choose.random() > 1 / 8


class Clock(selectors.DefaultSelector):
    """Never waits: where an event loop would sleep, time is put forward."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing is due, ever"
        self.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop without waiting and without threads."""

    def __init__(self) -> None:
        self._clock = Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        result = self.create_future()
        try:
            result.set_result(func(*args))
        except Exception as error:
            result.set_exception(error)
        return result


class Wire(asyncio.Transport):
    """A client that reads everything or nothing."""

    def __init__(self, *, is_read: bool) -> None:
        super().__init__()
        self.written = bytearray()
        self.ended = asyncio.Event()
        self.protocol: GuardedHttpProtocol | None = None
        self._is_read = is_read
        self._is_closing = False
        self._is_aborted = False

    def write(self, data: Any) -> None:
        assert not self.ended.is_set(), "written after the end"
        self.written += data
        if not self._is_read and len(self.written) > 65_536:
            assert self.protocol is not None
            self.protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return 0 if self._is_read else len(self.written)

    def close(self) -> None:
        self._is_closing = True
        if not self.get_write_buffer_size():
            self.abort()

    def abort(self) -> None:
        self._is_closing = True
        if not self._is_aborted:
            self._is_aborted = True
            asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        assert self.protocol is not None
        self.protocol.connection_lost(None)
        self.ended.set()

    def is_closing(self) -> bool:
        return self._is_closing

    def write_eof(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return MagicMock() if name == "socket" else default


async def answers_to(pieces: list[bytes], *, is_read: bool, config: uvicorn.Config, shared: Connections) -> bytes:
    """All that is said to a client that sends these pieces and then nothing, until its connection ends."""
    protocol = GuardedHttpProtocol(config=config, server_state=ServerState(), app_state={}, shared=shared)
    wire = Wire(is_read=is_read)
    wire.protocol = protocol
    protocol.connection_made(wire)
    for piece in pieces:
        if not wire.is_closing():
            protocol.data_received(piece)
        await asyncio.sleep(0)
    async with asyncio.timeout(MOST_SECONDS):
        await wire.ended.wait()
    return bytes(wire.written)


def check(answers: bytes) -> None:
    """No 5xx but 503, 504 and, for a coding that nobody undoes, 501; and errors in our schema."""
    parts = re.split(rb"HTTP/1\.1 (\d{3}) [A-Za-z -]+\r\n", answers)
    assert b"" == parts[0], answers[:300]
    for status, rest in zip(map(int, parts[1::2]), parts[2::2], strict=True):
        assert status < 500 or status in (501, 503, 504), answers
        body = rest.partition(b"\r\n\r\n")[2]
        if status >= 400 and body:
            assert {"error", "error_type"} == json.loads(body).keys(), answers


def in_virtual_time(numbers: range, problems: list[object]) -> None:
    async def story() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        async with unserved(config={"payload_limit": SETTINGS.payload_limit}) as it:
            config = application(it.app)
            shared = Connections(SETTINGS, max_connections=10)
            for number in numbers:
                pieces, is_read = mutated(number)
                try:
                    check(await answers_to(pieces, is_read=is_read, config=config, shared=shared))
                except BaseException as error:
                    error.add_note(f"stream {number}: {pieces!r:.2000}")
                    raise
                assert not shared.idle
            await it.all_free()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(story())


def application(app: FastAPI) -> uvicorn.Config:
    """Loaded as a server loads it."""
    config = uvicorn.Config(app, ws="none", log_config=None, access_log=False)
    config.load()
    return config


@pytest.mark.parametrize("first", range(0, NUM_STREAMS, AT_ONCE))
def test_no_stream_of_bytes_is_a_surprise(first: int, caplog: pytest.LogCaptureFixture) -> None:
    problems: list[object] = []
    in_virtual_time(range(first, first + AT_ONCE), problems)
    assert [] == problems
    assert [] == [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
