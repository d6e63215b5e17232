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
    run,
    stream,
    unread,
)
from tests.router.site import Site

# ------------------------------------------------------------------------------------------------------------ trailers


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


IN_CHUNKS = POST + b"transfer-encoding: chunked\r\n\r\n"
CRUMBS = b"1\r\n \r\n" * 5000


def test_a_body_in_parts_of_a_few_bytes_is_refused() -> None:
    """Each takes as much time as thousands of bytes."""

    async def story(it: Site) -> None:
        assert_refused(await (await Client.to(it, IN_CHUNKS + CRUMBS)).rest(), 400)
        some_large = (CRUMBS[:300] + b"1000\r\n" + b" " * 4096 + b"\r\n") * 40
        client = await Client.to(it, IN_CHUNKS + some_large + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
        assert 200 == (await client.answer())[0]
        client.writer.close()

    run(story)


def test_of_a_request_that_is_answered_they_are_read_no_further() -> None:
    async def story(it: Site) -> None:
        client = await Client.to(it, IN_CHUNKS)
        assert 401 == (await client.answer())[0]
        client.writer.write(CRUMBS)
        assert b"" == await client.rest()

    run(story, api_key="k", body_timeout=30.0)


# ---------------------------------------------------------------------------------------------- what ends a connection


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
        # If they did, this would go on for ever. What is sent for long after the server's end is answered by a reset,
        # after which there is no end to be read.
        while not client.reader.at_eof() and not client.writer.is_closing():
            client.writer.write(b"\r\n")
            await asyncio.sleep(0.05)
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


# ------------------------------------------------------------------------------------------------------------ refusals


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


UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"


@pytest.mark.parametrize("pieces", [1, 2, 7])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_request_that_asks_for_another_protocol_is_answered_whole(pieces: int, is_chunked: bool) -> None:
    """As Java's client asks by default, and `curl --http2`; whoever sends more behind it is answered too."""

    async def story(it: Site) -> None:
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

    run(story, header_timeout=10.0, body_timeout=10.0)


def test_a_body_in_another_coding_is_refused_and_never_taken_as_it_is() -> None:
    async def story(it: Site) -> None:
        for coding in (b"gzip, chunked", b"chunked, chunked", b"gzip"):
            coded = chunked().replace(b"transfer-encoding: chunked", b"transfer-encoding: " + coding)
            answer = await (await Client.to(it, coded)).rest()
            assert int(answer.split()[1]) in (400, 501)
        assert_refused(await (await Client.to(it, chunked().replace(b": chunked", b": gzip, chunked"))).rest(), 501)

    run(story)


def test_a_client_of_http_1_0_reads_plain_bytes_up_to_the_end() -> None:
    async def story(it: Site) -> None:
        for asked in (stream(3), POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY, PROBE):
            answer = await (await Client.to(it, asked.replace(b"HTTP/1.1", b"HTTP/1.0", 1))).rest()
            head, _, body = answer.partition(b"\r\n\r\n")
            assert b" 200 OK" in head and b"chunked" not in head and b"connection: close" in head.lower()
            if asked == stream(3):
                assert body.startswith(b"data:") and body.endswith(b"\n\n") and 3 == body.count(b"data:")

    run(story)


@pytest.mark.parametrize("is_old_first", [False, True])
def test_what_is_asked_later_does_not_change_how_an_answer_is_framed(is_old_first: bool) -> None:
    """A stream, and while it goes on a request of another version of HTTP behind it."""

    async def story(it: Site) -> None:
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

    run(story)


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
