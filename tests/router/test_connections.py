"""What a connection may take and how long it may last: trailers, bodies, unread answers, pipelines, silence.

Against the application as it is served, on the event loop that serves it, with short limits.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import socket
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import uvloop
from starlette.requests import Request
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.__main__ import SPARE_FILES, doors, max_connections
from router.bodies import Bodies
from router.client import ShardError, ShardHealth
from router.config import RouterConfig
from router.errors import Overloaded
from router.plain_answer import PlainAnswer
from router.probing import REUSED_S
from router.static_file import StaticFile
from tests.router.doubles import fake_shards, make_limits
from tests.router.test_app import PROMPT, Site, serving, site

SHORT = {"header_timeout": 0.3, "body_timeout": 0.6, "keep_alive_timeout": 0.9, "unread_timeout": 0.6}
# A text of which one token is left after `truncate` may have four times as many characters as the longest prompt.
LONG: dict[str, Any] = {"max_total_tokens": 2048, "max_batch_total_tokens": 8 * 2048, "max_input_length": 200_000}
PATIENCE_S = 20.0  # a liveness bound: every story takes a second or two
PROBE = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
SCRIPT = b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nhost: x\r\n\r\n"  # 1.5 MB
POST = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY = json.dumps({"inputs": PROMPT, "parameters": {"max_new_tokens": 1}}).encode()


def run(story: Callable[[Site], Awaitable[None]], **config: Any) -> None:
    """A story at a site with short times."""

    async def whole() -> None:
        shards = fake_shards(make_limits(**LONG), step_delay_s=0.01)
        async with asyncio.timeout(PATIENCE_S), site(shards, config=SHORT | config, **LONG) as it:
            await story(it)

    uvloop.run(whole())


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


# ------------------------------------------------------------------------------------------------- trailers


def chunked(*trailers: bytes, end: bytes = b"\r\n", body: bytes = BODY) -> bytes:
    """A request whose body is one chunk."""
    head = POST + b"transfer-encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%b\r\n0\r\n" % (len(body), body) + b"".join(trailer + b"\r\n" for trailer in trailers) + end


def test_trailers_are_no_headers() -> None:
    async def story(it: Site) -> None:
        client = await Client.to(it, chunked(b"x-request-id: mine", b"authorization: Bearer k"))
        assert 401 == (await client.answer())[0]
        client.writer.write(PROBE)
        assert b"mine" not in await client.reader.readuntil(b"\r\n\r\n")  # nor do they leak into the next request
        client.writer.close()

    run(story, api_key="k")


def test_trailers_count_against_the_limits_of_headers() -> None:
    async def story(it: Site) -> None:
        for trailers in ([b"x: y"] * 101, [b"x: " + b"y" * 40_000]):
            assert_refused(await (await Client.to(it, chunked(*trailers))).rest(), 431)
        assert b" 200 OK" in await (await Client.to(it, chunked(*[b"x: y"] * 90))).rest()

    run(story)


@pytest.mark.parametrize("endless", [b"x: y\r\n", b"y" * 1000])
def test_endless_trailers_take_no_memory(endless: bytes) -> None:
    async def story(it: Site) -> None:
        before = memory_of_this_process()
        client = await Client.to(it, chunked(b"x: y", end=b"x: "))
        try:
            for _ in range(40):
                client.writer.write(endless * (1_000_000 // len(endless)))
                await client.writer.drain()
        except ConnectionError:
            pass
        assert_refused(await client.rest(), 431)
        assert memory_of_this_process() - before < 20_000_000

    run(story, body_timeout=10.0)


def test_endless_chunk_extensions_are_refused() -> None:
    async def story(it: Site) -> None:
        client = await Client.to(it, POST + b"transfer-encoding: chunked\r\n\r\n1;" + b"x" * 300_000)
        await asyncio.sleep(0)
        client.writer.write(b"x" * 300_000)
        assert_refused(await client.rest(), 431)

    run(story)


# ---------------------------------------------------------------------------------------- what ends a connection


async def ended(client: Client) -> bool:
    """Whether the server ends the connection of a client that reads on only now."""
    await client.rest()
    return True


@pytest.mark.parametrize("follows", [b"", b"\r\n", b"G", PROBE, POST + b"content-length: 9\r\n\r\n{"])
def test_an_unread_answer_is_reset_whatever_follows_it(follows: bytes) -> None:
    async def story(it: Site) -> None:
        client = await unread(it, SCRIPT)
        await asyncio.sleep(0.1)
        client.writer.write(follows)
        while (await it.http.get("/health")).status_code == 200 and num_connections(it) > 1:
            await asyncio.sleep(0.02)
        assert b"reset" == await client.rest()

    run(story)


def num_connections(it: Site) -> int:
    """Open sockets of this process that belong to the server's port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    local = f"0100007F:{it.port:04X}"
    return sum(row[1] == local and row[3] in ("01", "08") for row in rows)  # established, and closed by the client


@pytest.mark.parametrize(
    "begin", [b"", PROBE, PROBE + b"\r\n", PROBE + b"\r\n\r\n\r\n", PROBE + PROBE, b"\r\n", chunked(b"x: y")]
)
def test_a_silent_connection_is_closed_without_a_word(begin: bytes) -> None:
    async def story(it: Site) -> None:
        answers = await (await Client.to(it, begin)).rest()
        assert begin.count(b"HTTP/1.1") == answers.count(b"HTTP/1.1 200 ") == answers.count(b"HTTP/1.1")

    run(story)


def test_empty_lines_do_not_prolong_a_connection() -> None:
    async def story(it: Site) -> None:
        client = await Client.to(it, PROBE)
        await client.answer()
        started = asyncio.get_running_loop().time()
        while not client.reader.at_eof():
            client.writer.write(b"\r\n")
            await asyncio.sleep(0.05)
        assert asyncio.get_running_loop().time() - started < 5 * SHORT["keep_alive_timeout"]
        client.writer.close()

    run(story)


@pytest.mark.parametrize(
    "begun", [b"G", PROBE + b"G", PROBE[:-2], POST + b"content-length: 9\r\n\r\n{", chunked(end=b"")]
)
def test_a_request_that_does_not_arrive_is_answered_408(begun: bytes) -> None:
    async def story(it: Site) -> None:
        client = await Client.to(it, begun)
        if begun.startswith(PROBE):
            await client.answer()
        assert_refused(await client.rest(), 408, "request_timeout")

    run(story)


def test_a_request_that_arrives_byte_by_byte_is_not_given_more_time() -> None:
    async def story(it: Site) -> None:
        client = await Client.to(it)
        with pytest.raises((ConnectionError, RuntimeError)):  # of a connection that is closed
            for byte in PROBE[:-2]:
                client.writer.write(bytes([byte]))
                await client.writer.drain()
                await asyncio.sleep(0.05)
        client.writer.close()

    run(story)


def stream(num_tokens: int) -> bytes:
    """A request for a stream."""
    body = json.dumps({"inputs": PROMPT, "parameters": {"max_new_tokens": num_tokens}}).encode()
    return POST.replace(b"generate", b"generate_stream") + b"content-length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize(
    "follows", [b"", b"\r\n", b"G", PROBE, b"nonsense\r\n\r\n", POST + b"content-length: 9\r\n\r\n{"]
)
def test_a_stream_is_longer_than_all_clocks_and_what_follows_is_answered_in_its_turn(follows: bytes) -> None:
    async def story(it: Site) -> None:
        client = await Client.to(it, stream(200))  # two seconds
        await client.reader.readuntil(b"data: ")
        client.writer.write(follows)
        answers = await client.rest()
        assert 199 == answers.count(b"data: ")
        others = answers.partition(b"\r\n0\r\n\r\n")[2]
        statuses = [int(part.split()[0]) for part in others.split(b"HTTP/1.1 ")[1:]]
        assert {b"G": [408], PROBE: [200], b"nonsense\r\n\r\n": [400], b"": [], b"\r\n": []}.get(
            follows, [408]
        ) == statuses

    run(story)


def test_a_client_may_ask_for_sixteen_answers_ahead() -> None:
    async def story(it: Site) -> None:
        answers = await (await Client.to(it, PROBE * 17)).rest()
        assert 17 == answers.count(b"HTTP/1.1 200 ") == answers.count(b"HTTP/1.1")
        answers = await (await Client.to(it, PROBE * 10_000)).rest()
        assert 17 == answers.count(b"HTTP/1.1 200 ")
        assert_refused(answers[answers.rindex(b"HTTP/1.1") :], 429, "overloaded")

    run(story)


# ------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "request_line",
    [b"nonsense", b"GET / HTTP/3.0", b"GET", b"GET /\x00 HTTP/1.1", b"CONNECT a:1 HTTP/1.1", b"PRI * HTTP/2.0"],
)
def test_what_is_not_http_is_refused_in_json(request_line: bytes) -> None:
    async def story(it: Site) -> None:
        assert_refused(await (await Client.to(it, request_line + b"\r\nhost: x\r\n\r\n")).rest(), 400)

    run(story)


@pytest.mark.parametrize("body", [b"zz\r\n", b"3\r\nabcd\r\n"])
def test_a_malformed_body_is_refused_in_json(body: bytes) -> None:
    async def story(it: Site) -> None:
        start = POST + b"transfer-encoding: chunked\r\n\r\n"
        assert_refused(await (await Client.to(it, start + body)).rest(), 400)
        client = await Client.to(it, start + b"1\r\n{\r\n")
        await asyncio.sleep(0.1)  # the route has begun to read
        client.writer.write(body)
        assert_refused(await client.rest(), 400)

    run(story)


def test_a_request_for_another_protocol_is_answered_and_is_the_last() -> None:
    async def story(it: Site) -> None:
        upgrade = PROBE[:-2] + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n"
        answer = await (await Client.to(it, upgrade + PROBE)).rest()
        assert 1 == answer.count(b"HTTP/1.1 200 ") == answer.count(b"HTTP/1.1")

    run(story)


@pytest.mark.parametrize(
    "length", [b"content-length: 20000000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n1312d00\r\n"]
)
def test_who_sends_too_much_reads_why(length: bytes) -> None:
    async def story(it: Site) -> None:
        client = await Client.to(it, POST + length)
        client.writer.write(b" " * 20_000_000)
        await client.writer.drain()
        assert_refused(await client.rest(), 413)

    run(story, body_timeout=10.0)


def test_an_ordinary_client_reads_why_its_body_is_refused() -> None:
    async def story(it: Site) -> None:
        for content in (b" " * 20_000_000, endless(20)):
            answer = await it.http.post("/generate", content=content, headers={"content-type": "application/json"})
            assert (413, "validation") == (answer.status_code, answer.json()["error_type"])

    async def endless(megabytes: int) -> AsyncIterator[bytes]:
        for _ in range(megabytes):
            yield b" " * 1_000_000

    run(story, body_timeout=10.0)


def test_a_refused_body_is_not_read_for_ever() -> None:
    async def story(it: Site) -> None:
        client = await Client.to(
            it, POST.replace(b"application/json", b"text/plain") + b"content-length: 99999999\r\n\r\n"
        )
        assert 415 == (await client.answer())[0]
        with pytest.raises(ConnectionError):
            for _ in range(100):
                client.writer.write(b" " * 1_000_000)
                await client.writer.drain()

    run(story, body_timeout=10.0, max_discarded_bytes=3_000_000)


def test_a_connection_goes_on_after_a_refused_body() -> None:
    async def story(it: Site) -> None:
        client = await Client.to(
            it, POST.replace(b"application/json", b"text/plain") + b"content-length: 1000000\r\n\r\n"
        )
        assert 415 == (await client.answer())[0]
        client.writer.write(b" " * 1_000_000 + PROBE)
        assert (200, b"") == await client.answer()
        client.writer.close()

    run(story, body_timeout=10.0)


# -------------------------------------------------------------------------------------------- unfinished bodies


def test_unfinished_bodies_share_a_bound_and_the_oldest_makes_room() -> None:
    """Ten bodies of 100 kB that lack a byte, where half of them have room."""

    async def story(it: Site) -> None:
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

    run(story, max_unfinished_bytes=500_000, payload_limit=200_000, body_timeout=10.0)


def test_the_bytes_of_bodies_are_given_back_however_they_end() -> None:
    async def story(it: Site) -> None:
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

    run(story, max_unfinished_bytes=200_000, payload_limit=200_000)


def test_a_body_that_comes_bit_by_bit_stays_and_silent_ones_make_room() -> None:
    async def story(it: Site) -> None:
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

    run(story, max_unfinished_bytes=500_000, payload_limit=200_000, body_timeout=10.0)


def test_large_bodies_that_are_silent_make_room_before_a_small_one() -> None:
    async def story(it: Site) -> None:
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

    run(story, max_unfinished_bytes=450_000, payload_limit=200_000, body_timeout=10.0)


def test_who_holds_most_of_the_unfinished_bodies_makes_room() -> None:
    """The silent body of another account or peer stays, although it is the oldest."""

    async def story() -> None:
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

    def begun(part: bytes, rest: asyncio.Queue[bytes] | None = None) -> Request:
        parts = [part]
        rest = rest or asyncio.Queue()

        async def receive() -> Any:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": True}
            return {"type": "http.request", "body": await rest.get(), "more_body": False}

        return Request({"type": "http", "headers": []}, receive)

    asyncio.run(story())


def test_parts_of_bodies_that_nobody_reads_do_not_outlive_their_answer() -> None:
    async def story(it: Site) -> None:
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

    run(story)


# ------------------------------------------------------------------------------------------------ unread answers

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


def test_unread_answers_share_a_bound_and_the_one_that_is_read_least_is_cut() -> None:
    async def story(it: Site) -> None:
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

    run(story, max_unread_bytes=2_000_000, **UNREAD)


def test_an_answer_behind_an_unread_one_counts_as_unread() -> None:
    async def story(it: Site) -> None:
        clients = [await unread(it, echo(600_000) * 2) for _ in range(4)]
        await num_connections_are(it, 3)
        for client in clients:
            client.writer.close()

    run(story, max_unread_bytes=3_600_000, **UNREAD)  # as much as four of them and half another


def test_unread_files_share_the_bound_and_a_single_answer_may_be_larger() -> None:
    async def story(it: Site) -> None:
        clients = [await unread(it, SCRIPT) for _ in range(10)]
        await num_connections_are(it, 5)
        for client in clients:
            client.writer.close()
        await num_connections_are(it, 0)
        assert (await (await Client.to(it, echo(600_000))).rest()).count(b"x") > 600_000

    run(story, max_unread_bytes=300_000, **UNREAD)


def test_a_static_file_is_sent_in_small_views_of_one_copy() -> None:
    async def story() -> None:
        file = StaticFile(bytes(100_000))
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await file({"type": "http"}, asyncio.Queue[Any]().get, send)
        pieces = [message["body"] for message in sent[1:-1]]
        assert 100_000 == sum(map(len, pieces)) and max(map(len, pieces)) <= 16 * 1024
        assert all(piece.obj is file.body for piece in pieces)

    asyncio.run(story())


def test_a_plain_answer_takes_no_more_memory_than_its_bytes() -> None:
    text = "x" * 1_000_000
    tracemalloc.start()
    try:
        answer = PlainAnswer(orjson.dumps({"generated_text": text}))
        assert len(answer.body) < tracemalloc.get_traced_memory()[0] < 1.1 * len(answer.body)
    finally:
        tracemalloc.stop()


# --------------------------------------------------------------------------------------------------- descriptors


IN_HEADERS = POST
IN_BODY = POST + b"content-length: 9\r\n\r\n{"


@pytest.mark.parametrize(
    "held, first", [([IN_HEADERS] * 3, 0), ([IN_BODY] * 3, 0), ([IN_BODY, stream(1000), IN_HEADERS], 2)]
)
def test_where_none_is_idle_who_owes_headers_or_a_body_makes_room(held: list[bytes], first: int) -> None:
    async def story(it: Site) -> None:
        settings = RouterConfig("a", "b", ("c",))
        async with serving(it.app, settings, max_connections=3) as it.port:
            clients = []
            for begun in held:
                clients.append(await Client.to(it, begun))
                await asyncio.sleep(0.05)
            probe = await Client.to(it, PROBE)
            assert 200 == (await probe.answer())[0]
            assert 429 == (await clients[first].answer())[0]
            for client in (*clients, probe):
                client.writer.close()

    run(story)


def test_where_none_is_idle_who_does_not_read_makes_room() -> None:
    async def story(it: Site) -> None:
        settings = RouterConfig("a", "b", ("c",), send_buffer_bytes=4096)
        async with serving(it.app, settings, max_connections=3) as it.port:
            clients = []
            for _ in range(3):
                clients.append(await unread(it, SCRIPT))
                assert b"H" == await clients[-1].reader.readexactly(1)
            await asyncio.sleep(0.05)
            probe = await Client.to(it, PROBE)
            assert 200 == (await probe.answer())[0]
            assert b"reset" == await clients[0].rest()
            for client in (*clients, probe):
                client.writer.close()

    run(story)


def test_many_connections_are_accepted_in_one_turn_of_the_event_loop() -> None:
    """The loop accepts one a turn at each descriptor, and turns are long while many bodies arrive."""

    async def story() -> None:
        loop, accepted = asyncio.get_running_loop(), 0

        class Counting(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                nonlocal accepted
                accepted += 1

        listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        clients = [socket.create_connection(listener.getsockname()) for _ in range(64)]
        servers = [await loop.create_server(Counting, sock=door) for door in doors(listener)]
        num_turns = 0
        while accepted < len(clients):
            await asyncio.sleep(0)
            num_turns += 1
        assert num_turns < len(clients) / 2
        for end in (*clients, *servers):
            end.close()

    uvloop.run(asyncio.wait_for(story(), PATIENCE_S))


def test_the_connection_that_is_idle_the_longest_makes_room() -> None:
    async def story(it: Site) -> None:
        settings = RouterConfig("a", "b", ("c",))
        async with serving(it.app, settings, max_connections=3) as port:
            it.port = port
            clients = []
            for _ in range(3):
                clients.append(await Client.to(it, PROBE))
                await clients[-1].answer()
            clients[0].writer.write(PROBE)
            await clients[0].answer()
            clients.append(await Client.to(it, PROBE))
            await clients[-1].answer()
            assert b"" == await clients.pop(1).rest()
            for client in clients:
                client.writer.write(stream(1000))
                await client.reader.readuntil(b"data: ")
            assert_refused(await (await Client.to(it)).rest(), 429, "overloaded")
            for client in clients:
                client.writer.close()

    run(story)


def test_the_limit_of_descriptors_is_raised_and_leaves_some() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 300), hard))
        found = max_connections()
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert hard == raised or raised == 2**20
    assert raised - SPARE_FILES - 500 < found < raised - SPARE_FILES


# -------------------------------------------------------------------------------------------------------- probes


def test_many_probes_ask_the_shards_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(it: Site) -> None:
        asked = 0
        health = it.shards.health

        async def counted() -> ShardHealth:
            nonlocal asked
            asked += 1
            await asyncio.sleep(0.05)
            return await health()

        monkeypatch.setattr(it.shards, "health", counted)
        assert [200] * 50 == await asyncio.gather(*(probe(it) for _ in range(50)))
        assert asked < 25
        monkeypatch.setattr(it.shards, "health", gone)
        await asyncio.sleep(2 * REUSED_S)
        assert [503] * 50 == await asyncio.gather(*(probe(it) for _ in range(50)))

    async def gone() -> ShardHealth:
        raise ShardError(0, "gone")

    async def probe(it: Site) -> int:
        client = await Client.to(it, PROBE)
        try:
            return (await client.answer())[0]
        finally:
            client.writer.close()

    run(story)
