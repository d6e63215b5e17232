"""A small balancer of real servers that runs the simulator's policy code: `python -m tests.benchmark.fleet.balancer`.

HTTP/1.1 with a length, one request a connection, answers passed on as they come. For measurements on one machine, and
no product: it knows neither TLS nor health.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from random import Random
from urllib.parse import urlsplit
from zlib import crc32

from router.scheduling.balancing import Balancer

PREFIX_CHARACTERS = 512  # of a prompt, that say what it begins with


class Proxy:
    """Servers behind one address."""

    def __init__(self, urls: Sequence[str], policy: str, seed: int = 0) -> None:
        self._addresses = [urlsplit(url) for url in urls]
        self._balancer = Balancer(policy, Random(seed))
        for _ in urls:
            self._balancer.up(self._balancer.add())
        self.sent = [0] * len(urls)  # to each

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on the requests of one connection, one after the other, until either side ends it."""
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.decode("latin-1").lower().split("\r\n")
                length = next((int(line.split(":")[1]) for line in lines if line.startswith("content-length:")), 0)
                await self._pass_on(head, await reader.readexactly(length), writer)
                break
        writer.close()

    async def _pass_on(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        tokens, prefix = _size(body)
        number = self._balancer.send(tokens, prefix)
        assert number is not None
        self.sent[number] += bool(body)
        first, rest = head.split(b"\r\n", 1)
        kept = [line for line in rest.split(b"\r\n") if line and not line.lower().startswith(b"connection:")]
        try:
            there, back = await asyncio.open_connection(self._addresses[number].hostname, self._addresses[number].port)
            back.write(b"\r\n".join([first, *kept, b"connection: close", b"", b""]) + body)
            while piece := await there.read(65536):
                writer.write(piece)
                await writer.drain()
            back.close()
        finally:
            self._balancer.done(number, tokens)


def _size(body: bytes) -> tuple[int, int | None]:
    """How long a request may become, about, and what it begins with."""
    try:
        asked = json.loads(body)
        text = str(asked["inputs"])
        return len(text.split()) + int(asked["parameters"]["max_new_tokens"]), crc32(text[:PREFIX_CHARACTERS].encode())
    except (ValueError, KeyError, TypeError):
        return 1, None


async def main(argv: Sequence[str] | None = None) -> None:
    """Serve until a signal ends it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--policy", default="power-of-two")
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args(argv)
    proxy = Proxy(args.urls, args.policy)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", args.port)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
