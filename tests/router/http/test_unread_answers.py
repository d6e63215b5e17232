"""Answers that nobody reads: all of them together have a bound, and none is kept twice."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Any

import orjson

from router.http.responses import PlainAnswer, StaticFile
from tests.router.http.raw_clients import POST, SCRIPT, Client, num_connections, short_site, unread
from tests.router.site import Site

UNREAD: dict[str, Any] = {"unread_timeout": 60.0, "body_timeout": 10.0, "send_buffer_bytes": 4096}


def echo(num_bytes: int) -> bytes:
    """A request whose answer has its long prompt, of which it generates from a single token."""
    asked = {"max_new_tokens": 1, "truncate": 1, "return_full_text": True}
    body = json.dumps({"inputs": "x" * num_bytes, "parameters": asked}).encode()
    return POST + b"content-length: %d\r\n\r\n" % len(body) + body


async def num_connections_are(it: Site, most: int) -> None:
    """Wait until no more are open."""
    while num_connections(it) > most:
        await asyncio.sleep(0.02)


async def test_unread_answers_share_a_bound_and_the_one_that_is_read_least_is_cut() -> None:
    async with short_site(max_unread_bytes=2_000_000, **UNREAD) as it:
        clients = []
        for _ in range(8):
            clients.append(await unread(it, echo(600_000)))
            assert b"H" == await clients[-1].reader.readexactly(1)  # the answer is there
        await num_connections_are(it, 4)
        assert b"reset" == await clients[0].rest()
        assert (await clients[-1].rest()).count(b"x") > 600_000 - 10
        assert b" 200 OK" in await (await Client.to(it, echo(600_000))).rest()
        for client in clients:
            client.writer.close()


async def test_an_answer_behind_an_unread_one_counts_as_unread() -> None:
    async with short_site(max_unread_bytes=3_600_000, **UNREAD) as it:
        clients = [await unread(it, echo(600_000) * 2) for _ in range(4)]
        await num_connections_are(it, 3)
        for client in clients:
            client.writer.close()


async def test_unread_files_share_the_bound_and_a_single_answer_may_be_larger() -> None:
    async with short_site(max_unread_bytes=300_000, **UNREAD) as it:
        clients = [await unread(it, SCRIPT) for _ in range(10)]
        await num_connections_are(it, 5)
        for client in clients:
            client.writer.close()
        await num_connections_are(it, 0)
        assert (await (await Client.to(it, echo(600_000))).rest()).count(b"x") > 600_000


async def test_a_static_file_is_sent_in_small_views_of_one_copy() -> None:
    file = StaticFile(bytes(100_000))
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await file({"type": "http"}, asyncio.Queue[Any]().get, send)
    pieces = [message["body"] for message in sent[1:-1]]
    assert 100_000 == sum(map(len, pieces)) and max(map(len, pieces)) <= 16 * 1024
    assert all(piece.obj is file.body for piece in pieces)


def test_a_plain_answer_takes_no_more_memory_than_its_bytes() -> None:
    text = "x" * 1_000_000
    tracemalloc.start()
    try:
        answer = PlainAnswer(orjson.dumps({"generated_text": text}))
        assert len(answer.body) < tracemalloc.get_traced_memory()[0] < 1.1 * len(answer.body)
    finally:
        tracemalloc.stop()
