"""What a connection may take and how long it may last: trailers, pipelines, silence, refusals.

Against the application as it is served, on the event loop that serves it, with short limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.router.http.raw_clients import (
    BODY,
    POST,
    PROBE,
    SCRIPT,
    Client,
    assert_refused,
    memory_of_this_process,
    num_connections,
    short_site,
    stream,
    unread,
)

# ------------------------------------------------------------------------------------------------------------ trailers


def chunked(*trailers: bytes, end: bytes = b"\r\n", body: bytes = BODY) -> bytes:
    """A request whose body is one chunk."""
    head = POST + b"transfer-encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%b\r\n0\r\n" % (len(body), body) + b"".join(trailer + b"\r\n" for trailer in trailers) + end


async def test_trailers_are_no_headers() -> None:
    async with short_site(api_key="k") as it:
        client = await Client.to(it, chunked(b"x-request-id: mine", b"authorization: Bearer k"))
        assert 401 == (await client.answer())[0]
        client.writer.write(PROBE)
        assert b"mine" not in await client.reader.readuntil(b"\r\n\r\n")  # nor do they leak into the next request
        client.writer.close()


async def test_trailers_count_against_the_limits_of_headers() -> None:
    async with short_site() as it:
        for trailers in ([b"x: y"] * 101, [b"x: " + b"y" * 40_000]):
            assert_refused(await (await Client.to(it, chunked(*trailers))).rest(), 431)
        assert b" 200 OK" in await (await Client.to(it, chunked(*[b"x: y"] * 90))).rest()


@pytest.mark.parametrize("endless", [b"x: y\r\n", b"y" * 1000])
async def test_endless_trailers_take_no_memory(endless: bytes) -> None:
    async with short_site(body_timeout=10.0) as it:
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


async def test_endless_chunk_extensions_are_refused() -> None:
    async with short_site() as it:
        client = await Client.to(it, POST + b"transfer-encoding: chunked\r\n\r\n1;" + b"x" * 300_000)
        await asyncio.sleep(0)
        client.writer.write(b"x" * 300_000)
        assert_refused(await client.rest(), 431)


IN_CHUNKS = POST + b"transfer-encoding: chunked\r\n\r\n"
CRUMBS = b"1\r\n \r\n" * 5000


async def test_a_body_in_parts_of_a_few_bytes_is_refused() -> None:
    """Each takes as much time as thousands of bytes."""
    async with short_site() as it:
        assert_refused(await (await Client.to(it, IN_CHUNKS + CRUMBS)).rest(), 400)
        some_large = (CRUMBS[:300] + b"1000\r\n" + b" " * 4096 + b"\r\n") * 40
        client = await Client.to(it, IN_CHUNKS + some_large + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
        assert 200 == (await client.answer())[0]
        client.writer.close()


async def test_of_a_request_that_is_answered_they_are_read_no_further() -> None:
    async with short_site(api_key="k", body_timeout=30.0) as it:
        client = await Client.to(it, IN_CHUNKS)
        assert 401 == (await client.answer())[0]
        client.writer.write(CRUMBS)
        assert b"" == await client.rest()


# ---------------------------------------------------------------------------------------------- what ends a connection


async def ended(client: Client) -> bool:
    """Whether the server ends the connection of a client that reads on only now."""
    await client.rest()
    return True


async def test_an_unread_answer_is_reset_whatever_follows_it() -> None:
    async with short_site() as it:
        clients = []
        for follows in (b"", b"\r\n", b"G", PROBE, POST + b"content-length: 9\r\n\r\n{"):
            clients.append(await unread(it, SCRIPT))
            await asyncio.sleep(0.1)
            clients[-1].writer.write(follows)
        while (await it.http.get("/health")).status_code == 200 and num_connections(it) > 1:
            await asyncio.sleep(0.02)
        assert {b"reset"} == {await client.rest() for client in clients}


async def test_a_silent_connection_is_closed_without_a_word() -> None:
    begun = [b"", PROBE, PROBE + b"\r\n", PROBE + b"\r\n\r\n\r\n", PROBE + PROBE, b"\r\n", chunked(b"x: y")]
    async with short_site() as it:
        clients = [await Client.to(it, begin) for begin in begun]
        for begin, answers in zip(begun, await asyncio.gather(*(client.rest() for client in clients)), strict=True):
            assert begin.count(b"HTTP/1.1") == answers.count(b"HTTP/1.1 200 ") == answers.count(b"HTTP/1.1")


async def test_empty_lines_do_not_prolong_a_connection() -> None:
    async with short_site() as it:
        client = await Client.to(it, PROBE)
        await client.answer()
        # If they did, this would go on for ever. What is sent for long after the server's end is answered by a reset,
        # after which there is no end to be read.
        while not client.reader.at_eof() and not client.writer.is_closing():
            client.writer.write(b"\r\n")
            await asyncio.sleep(0.05)
        client.writer.close()


async def test_a_request_that_does_not_arrive_is_answered_408() -> None:
    async with short_site() as it:
        clients = []
        for begun in (b"G", PROBE + b"G", PROBE[:-2], POST + b"content-length: 9\r\n\r\n{", chunked(end=b"")):
            clients.append(await Client.to(it, begun))
            if begun.startswith(PROBE):
                await clients[-1].answer()
        for client in clients:
            assert_refused(await client.rest(), 408, "request_timeout")


async def test_a_request_that_arrives_byte_by_byte_is_not_given_more_time() -> None:
    async with short_site() as it:
        client = await Client.to(it)
        with pytest.raises((ConnectionError, RuntimeError)):  # of a connection that is closed
            for byte in PROBE[:-2]:
                client.writer.write(bytes([byte]))
                await client.writer.drain()
                await asyncio.sleep(0.05)
        client.writer.close()


async def test_a_stream_is_longer_than_all_clocks_and_what_follows_is_answered_in_its_turn() -> None:
    body = POST + b"content-length: 9\r\n\r\n{"
    expected = {b"": [], b"\r\n": [], b"G": [408], PROBE: [200], b"nonsense\r\n\r\n": [400], body: [408]}
    async with short_site() as it:
        clients = [await Client.to(it, stream(120)) for _ in expected]  # longer than a second
        for client, follows in zip(clients, expected, strict=True):
            await client.reader.readuntil(b"data: ")
            client.writer.write(follows)
        for client, statuses in zip(clients, expected.values(), strict=True):
            answers = await client.rest()
            assert 119 == answers.count(b"data: ")
            others = answers.partition(b"\r\n0\r\n\r\n")[2]
            assert statuses == [int(part.split()[0]) for part in others.split(b"HTTP/1.1 ")[1:]]


async def test_a_client_may_ask_for_sixteen_answers_ahead() -> None:
    async with short_site() as it:
        answers = await (await Client.to(it, PROBE * 17)).rest()
        assert 17 == answers.count(b"HTTP/1.1 200 ") == answers.count(b"HTTP/1.1")
        answers = await (await Client.to(it, PROBE * 10_000)).rest()
        assert 17 == answers.count(b"HTTP/1.1 200 ")
        assert_refused(answers[answers.rindex(b"HTTP/1.1") :], 429, "overloaded")


# ------------------------------------------------------------------------------------------------------------ refusals


async def test_what_is_not_http_is_refused_in_json() -> None:
    odd = [b"nonsense", b"GET / HTTP/3.0", b"GET", b"GET /\x00 HTTP/1.1", b"CONNECT a:1 HTTP/1.1", b"PRI * HTTP/2.0"]
    async with short_site() as it:
        for request_line in odd:
            assert_refused(await (await Client.to(it, request_line + b"\r\nhost: x\r\n\r\n")).rest(), 400)


async def test_a_malformed_body_is_refused_in_json() -> None:
    async with short_site() as it:
        for body in (b"zz\r\n", b"3\r\nabcd\r\n"):
            assert_refused(await (await Client.to(it, IN_CHUNKS + body)).rest(), 400)
            client = await Client.to(it, IN_CHUNKS + b"1\r\n{\r\n")
            await asyncio.sleep(0.1)  # the route has begun to read
            client.writer.write(body)
            assert_refused(await client.rest(), 400)


UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_request_that_asks_for_another_protocol_is_answered_whole(is_chunked: bool) -> None:
    """As Java's client asks by default, and `curl --http2`; whoever sends more behind it is answered too."""
    async with short_site(header_timeout=10.0, body_timeout=10.0) as it:
        for pieces in (1, 2, 7):
            whole = chunked() if is_chunked else POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
            whole = whole.replace(b"\r\n\r\n", b"\r\n" + UPGRADE + b"\r\n", 1)
            sent = whole + PROBE[:-2] + UPGRADE + b"\r\n" + whole + PROBE
            client = await Client.to(it)
            size = -(-len(sent) // pieces)
            for start in range(0, len(sent), size):
                client.writer.write(sent[start : start + size])
                await asyncio.sleep(0.02)
            answers = [await client.answer() for _ in range(4)]
            assert [200] * 4 == [status for status, _ in answers]
            assert b"generated_text" in answers[0][1] and b"generated_text" in answers[2][1]
            client.writer.close()


async def test_a_body_in_another_coding_is_refused_and_never_taken_as_it_is() -> None:
    async with short_site() as it:
        for coding in (b"gzip, chunked", b"chunked, chunked", b"gzip"):
            coded = chunked().replace(b"transfer-encoding: chunked", b"transfer-encoding: " + coding)
            answer = await (await Client.to(it, coded)).rest()
            assert int(answer.split()[1]) in (400, 501)
        assert_refused(await (await Client.to(it, chunked().replace(b": chunked", b": gzip, chunked"))).rest(), 501)


async def test_a_client_of_http_1_0_reads_plain_bytes_up_to_the_end() -> None:
    async with short_site() as it:
        for asked in (stream(3), POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY, PROBE):
            answer = await (await Client.to(it, asked.replace(b"HTTP/1.1", b"HTTP/1.0", 1))).rest()
            head, _, body = answer.partition(b"\r\n\r\n")
            assert b" 200 OK" in head and b"chunked" not in head and b"connection: close" in head.lower()
            if asked == stream(3):
                assert body.startswith(b"data:") and body.endswith(b"\n\n") and 3 == body.count(b"data:")


@pytest.mark.parametrize("is_old_first", [False, True])
async def test_what_is_asked_later_does_not_change_how_an_answer_is_framed(is_old_first: bool) -> None:
    """A stream, and while it goes on a request of another version of HTTP behind it."""
    async with short_site() as it:
        asked = [stream(50), PROBE]
        older = 0 if is_old_first else 1
        asked[older] = asked[older].replace(b"HTTP/1.1", b"HTTP/1.0", 1)
        client = await Client.to(it, asked[0])
        head = await client.reader.readuntil(b"\r\n\r\n")
        client.writer.write(asked[1])
        body = await client.rest()
        if is_old_first:
            assert b"chunked" not in head and b"HTTP/1." not in body
        else:
            chunks, _, probed = body.partition(b"0\r\n\r\n")
            assert b"chunked" in head and b" 200 OK" in probed
            body = dechunked(chunks)
        assert body.endswith(b"\n\n") and 50 == body.count(b"data:")
        assert all(line.startswith(b"data:") for line in body.split(b"\n\n")[:-1])


def dechunked(body: bytes) -> bytes:
    """What is in chunks, the last of which is not there."""
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        parts.append(body[:length])
        assert b"\r\n" == body[length : length + 2]
        body = body[length + 2 :]
    return b"".join(parts)


async def test_who_sends_too_much_reads_why() -> None:
    async with short_site(body_timeout=10.0) as it:
        for length in (b"content-length: 20000000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n1312d00\r\n"):
            client = await Client.to(it, POST + length)
            client.writer.write(b" " * 20_000_000)
            await client.writer.drain()
            assert_refused(await client.rest(), 413)


async def test_an_ordinary_client_reads_why_its_body_is_refused() -> None:
    async def endless(megabytes: int) -> AsyncIterator[bytes]:
        for _ in range(megabytes):
            yield b" " * 1_000_000

    async with short_site(body_timeout=10.0) as it:
        for content in (b" " * 20_000_000, endless(20)):
            answer = await it.http.post("/generate", content=content, headers={"content-type": "application/json"})
            assert (413, "validation") == (answer.status_code, answer.json()["error_type"])


async def test_a_refused_body_is_not_read_for_ever() -> None:
    async with short_site(body_timeout=10.0, max_discarded_bytes=3_000_000) as it:
        client = await Client.to(
            it, POST.replace(b"application/json", b"text/plain") + b"content-length: 99999999\r\n\r\n"
        )
        assert 415 == (await client.answer())[0]
        with pytest.raises(ConnectionError):
            for _ in range(100):
                client.writer.write(b" " * 1_000_000)
                await client.writer.drain()


async def test_a_connection_goes_on_after_a_refused_body() -> None:
    async with short_site(body_timeout=10.0) as it:
        client = await Client.to(
            it, POST.replace(b"application/json", b"text/plain") + b"content-length: 1000000\r\n\r\n"
        )
        assert 415 == (await client.answer())[0]
        client.writer.write(b" " * 1_000_000 + PROBE)
        assert (200, b"") == await client.answer()
        client.writer.close()
