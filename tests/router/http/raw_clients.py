"""Raw connections to the application as it is served, on the event loop that serves it, with short limits."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.router.doubles import fake_shards, make_limits
from tests.router.site import PROMPT, Site, site

SHORT = {"header_timeout": 0.3, "body_timeout": 0.6, "keep_alive_timeout": 0.9, "unread_timeout": 0.6}
# A text of which one token is left after `truncate` may have four times as many characters as the longest prompt.
LONG: dict[str, Any] = {"max_total_tokens": 2048, "max_batch_total_tokens": 8 * 2048, "max_input_length": 200_000}
PATIENCE_S = 60.0  # a liveness bound: every story takes a second or two of an idle machine
PROBE = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
SCRIPT = b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nhost: x\r\n\r\n"  # 1.5 MB
POST = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY = json.dumps({"inputs": PROMPT, "parameters": {"max_new_tokens": 1}}).encode()


@asynccontextmanager
async def short_site(**config: Any) -> AsyncIterator[Site]:
    """A site with short times."""
    shards = fake_shards(make_limits(**LONG), step_delay_s=0.01)
    async with asyncio.timeout(PATIENCE_S), site(shards, config=SHORT | config, **LONG) as it:
        yield it


class Client:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, it: Site, data: bytes = b"", **options: Any) -> Client:
        client = cls(*await asyncio.open_connection("127.0.0.1", it.port, **options))
        client.writer.write(data)
        return client

    async def rest(self) -> bytes:
        """Everything until the server closes, or b"reset" if it does so by force."""
        try:
            return await self.reader.read()
        except ConnectionResetError:
            return b"reset"
        finally:
            self.writer.close()

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of one answer with a length."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
        body = await self.reader.readexactly(int(headers[b"content-length"]))
        return int(head.split()[1]), body


async def unread(it: Site, data: bytes) -> Client:
    """A client that sends this and takes next to nothing of the answer."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", it.port))
    client = Client(*await asyncio.open_connection(sock=sock, limit=1))  # it stops reading after two bytes
    client.writer.write(data)
    return client


def assert_refused(answer: bytes, status: int, error_type: str = "validation") -> None:
    """One answer and no more, in the schema of all errors."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert status == int(head.split()[1])
    assert b"content-type: application/json" in head.lower()
    assert {"error", "error_type"} == json.loads(body).keys()
    assert error_type == json.loads(body)["error_type"]


def memory_of_this_process() -> int:
    """Its peak, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def num_connections(it: Site) -> int:
    """Open sockets of this process that belong to the server's port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    local = f"0100007F:{it.port:04X}"
    return sum(row[1] == local and row[3] in ("01", "08") for row in rows)  # established, and closed by the client


def stream(num_tokens: int) -> bytes:
    """A request for a stream."""
    body = json.dumps({"inputs": PROMPT, "parameters": {"max_new_tokens": num_tokens}}).encode()
    return POST.replace(b"generate", b"generate_stream") + b"content-length: %d\r\n\r\n" % len(body) + body
