"""Bodies that do not arrive: all of them together have a bound, and who holds most of it makes room."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

from starlette.requests import Request
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.errors import Overloaded
from router.http.bodies import Bodies
from tests.router.http.raw_clients import BODY, POST, Client, short_site


async def test_unfinished_bodies_share_a_bound_and_the_oldest_makes_room() -> None:
    """Ten bodies of 100 kB that lack a byte, where half of them have room."""
    async with short_site(max_unfinished_bytes=500_000, payload_limit=200_000, body_timeout=10.0) as it:
        start = POST + b"content-length: 100000\r\n\r\n" + b" " * 99_999
        clients = []
        for _ in range(10):
            clients.append(await Client.to(it, start))
            await asyncio.sleep(0.05)
        honest = await it.http.post(
            "/generate", content=BODY + b" " * 50_000, headers={"content-type": "application/json"}
        )
        assert 200 == honest.status_code
        for client in clients[:5]:
            status, body = await client.answer()
            assert (429, "overloaded") == (status, json.loads(body)["error_type"])
        client = clients[-1]
        client.writer.write(b" ")
        assert 400 == (await client.answer())[0]  # it has arrived, and it is no JSON
        for client in clients:
            client.writer.close()


async def test_the_bytes_of_bodies_are_given_back_however_they_end() -> None:
    async with short_site(max_unfinished_bytes=200_000, payload_limit=200_000) as it:
        start = POST + b"content-length: 100000\r\n\r\n" + b" " * 99_999
        for end in (b" ", None, b"late") * 3:  # malformed, left, timed out
            client = await Client.to(it, start)
            if end is None:
                await asyncio.sleep(0.05)
            elif end == b" ":
                client.writer.write(end)
                assert 400 == (await client.answer())[0]
            else:
                assert 408 == (await client.answer())[0]
            client.writer.close()
        clients = [await Client.to(it, start) for _ in range(2)]  # all that has room
        await asyncio.sleep(0.1)
        for client in clients:
            client.writer.write(b" ")
            assert 400 == (await client.answer())[0]
            client.writer.close()


async def test_a_body_that_comes_bit_by_bit_stays_and_silent_ones_make_room() -> None:
    async with short_site(max_unfinished_bytes=500_000, payload_limit=200_000, body_timeout=10.0) as it:
        body = BODY + b" " * 20_000
        honest = await Client.to(it, POST + b"content-length: %d\r\n\r\n" % len(body) + body[:1000])
        silent = []
        for begin in range(1000, 20_000, 1000):
            silent.append(await Client.to(it, POST + b"content-length: 100000\r\n\r\n" + b" " * 99_999))
            await asyncio.sleep(0.02)
            honest.writer.write(body[begin : begin + 1000])
            await asyncio.sleep(0.02)
        honest.writer.write(body[20_000:])
        assert 200 == (await honest.answer())[0]
        assert 429 == (await silent[0].answer())[0]
        for client in (honest, *silent):
            client.writer.close()


async def test_large_bodies_that_are_silent_make_room_before_a_small_one() -> None:
    async with short_site(max_unfinished_bytes=450_000, payload_limit=200_000, body_timeout=10.0) as it:
        clients = []
        for size in (10_000, 100_000, 100_000, 100_000, 100_000):
            clients.append(await Client.to(it, POST + b"content-length: %d\r\n\r\n" % size + b" " * (size - 1)))
        await asyncio.sleep(0.2)
        clients.append(await Client.to(it, POST + b"content-length: 100000\r\n\r\n" + b" " * 99_999))
        await asyncio.sleep(0.1)
        clients[0].writer.write(b" ")
        assert 400 == (await clients[0].answer())[0]  # it has arrived, and it is no JSON
        for client in clients:
            client.writer.close()


async def test_who_holds_most_of_the_unfinished_bodies_makes_room() -> None:
    """The silent body of another account or peer stays, although it is the oldest."""

    def begun(part: bytes, rest: asyncio.Queue[bytes] | None = None) -> Request:
        parts = [part]
        rest = rest or asyncio.Queue()

        async def receive() -> Any:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": True}
            return {"type": "http.request", "body": await rest.get(), "more_body": False}

        return Request({"type": "http", "headers": []}, receive)

    bodies = Bodies(500_000, 200_000)
    others = [asyncio.create_task(bodies.read(begun(b" " * 90_000), "many")) for _ in range(4)]
    rest: asyncio.Queue[bytes] = asyncio.Queue()
    few = asyncio.create_task(bodies.read(begun(b" " * 100_000, rest), "few"))
    await asyncio.sleep(0)
    others += [asyncio.create_task(bodies.read(begun(b" " * 90_000), "many")) for _ in range(4)]
    done, waiting = await asyncio.wait(others, timeout=0.1)
    assert done == set(others[:4]) and all(isinstance(task.exception(), Overloaded) for task in done)
    rest.put_nowait(b"end")
    assert 100_003 == len(await few)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)


async def test_parts_of_bodies_that_nobody_reads_do_not_outlive_their_answer() -> None:
    async with short_site() as it:
        gc.collect()
        gc.disable()
        try:
            head = POST.replace(b"application/json", b"text/plain") + b"content-length: 99999\r\n\r\n"
            client = await Client.to(it, head + b" " * 40_000)
            assert 415 == (await client.answer())[0]
            cycles = [found for found in gc.get_objects() if type(found) is RequestResponseCycle]
            assert cycles and 0 == sum(len(cycle.body) for cycle in cycles)
            client.writer.close()
        finally:
            gc.enable()
