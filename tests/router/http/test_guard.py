"""What `router/http/guard.py` and `router/__main__.py` use of uvicorn's internals, which no version promises to keep.

uvicorn's minor version is pinned for this reason. Who moves the pin learns here, by name, what is gone.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections import deque
from typing import Any, cast

import httptools
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

REMEDY = "adapt router/http/guard.py and router/__main__.py, then move the pin of uvicorn in pyproject.toml"

# What is extended or called -> its parameters.
METHODS = {
    "connection_made": ["self", "transport"],
    "connection_lost": ["self", "exc"],
    "data_received": ["self", "data"],
    "shutdown": ["self"],
    "_unset_keepalive_if_required": ["self"],
    "on_message_begin": ["self"],
    "on_url": ["self", "url"],
    "on_header": ["self", "name", "value"],
    "on_headers_complete": ["self"],
    "on_body": ["self", "body"],
    "on_message_complete": ["self"],
    "on_response_complete": ["self"],
}
SERVER_METHODS = {
    "capture_signals": ["self"],
    "startup": ["self", "sockets"],
    "serve": ["self", "sockets"],
    "shutdown": ["self", "sockets"],
}
# What is read or set while a request is there -> whether it is what the guard takes it for.
ATTRIBUTES = {
    "loop": lambda value: value is asyncio.get_running_loop(),
    "transport": lambda value: value.get_write_buffer_size() == 0,
    "scope": lambda value: value["path"] == "/path",
    "url": lambda value: value == b"/path",
    "headers": lambda value: value == [(b"host", b"x")],
    "cycle": lambda value: (
        (value.disconnected, value.keep_alive, value.response_started, value.response_complete)
        == (False, True, False, False)
        and isinstance(value.message_event, asyncio.Event)
        and value.body == bytearray()
    ),
    "parser": lambda value: isinstance(value, httptools.HttpRequestParser),
    "pipeline": lambda value: value == deque(),  # the newest at its left, started from its right
    "connections": lambda value: len(value) == 1,
}


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        *((HttpToolsProtocol, name, parameters) for name, parameters in METHODS.items()),
        *((uvicorn.Server, name, parameters) for name, parameters in SERVER_METHODS.items()),
    ],
)
def test_methods_that_we_extend_are_there(owner: type, name: str, parameters: list[str]) -> None:
    where = f"{owner.__name__}.{name} of uvicorn {uvicorn.__version__}"
    assert hasattr(owner, name), f"{where} is gone: {REMEDY}"
    assert parameters == list(inspect.signature(getattr(owner, name)).parameters), f"{where} takes others: {REMEDY}"


@pytest.mark.parametrize("name", ATTRIBUTES)
async def test_attributes_that_we_use_are_there_during_a_request(name: str) -> None:
    protocol, _ = await request_under_way()
    where = f"HttpToolsProtocol.{name} of uvicorn {uvicorn.__version__}"
    assert hasattr(protocol, name), f"{where} is gone: {REMEDY}"
    assert ATTRIBUTES[name](getattr(protocol, name)), f"{where} is something else: {REMEDY}"


def test_server_ends_when_should_exit_is_set() -> None:
    assert uvicorn.Server(uvicorn.Config(answer)).should_exit is False, f"Server.should_exit is another: {REMEDY}"


async def test_answer_without_a_length_is_chunked_and_reports_its_end() -> None:
    """`write_chunk` writes chunks beside uvicorn, so uvicorn must have announced them."""

    protocol, written = await request_under_way()
    ended = asyncio.Event()
    protocol.cycle.on_response = ended.set
    async with asyncio.timeout(5):
        await ended.wait()
    head, _, body = bytes(written).partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower(), f"streams are not chunked any more: {REMEDY}"
    assert b"4\r\nbody\r\n0\r\n\r\n" == body


async def test_newest_request_is_at_the_left_of_the_pipeline_and_is_the_cycle() -> None:
    protocol, _ = await request_under_way()
    for path in (b"second", b"third"):
        protocol.data_received(b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n" % path)
    paths = [cycle.scope["path"] for cycle, _ in protocol.pipeline]
    assert ["/third", "/second"] == paths, f"the pipeline runs another way: {REMEDY}"
    assert "/third" == protocol.cycle.scope["path"], f"the cycle is not the newest request: {REMEDY}"


def test_http_is_called_for_each_connection_and_need_be_no_class() -> None:
    made = functools.partial(HttpToolsProtocol)
    config = uvicorn.Config(answer, http=cast(Any, made), ws="none", log_config=None)
    config.load()
    assert made is config.http_protocol_class, f"uvicorn looks at what makes a protocol: {REMEDY}"


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """An answer of unknown length."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"body", "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class Pipe(asyncio.Transport):
    """A transport into memory."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass


async def request_under_way() -> tuple[HttpToolsProtocol, bytearray]:
    """uvicorn's own protocol with a request whose answer has not begun, and what it will have written."""
    config = uvicorn.Config(answer, ws="none", log_config=None)
    config.load()
    protocol = HttpToolsProtocol(config=config, server_state=ServerState(), app_state={})
    pipe = Pipe()
    protocol.connection_made(pipe)
    protocol.data_received(b"GET /path HTTP/1.1\r\nhost: x\r\n\r\n")
    return protocol, pipe.written
