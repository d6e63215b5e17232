"""Clients on sockets: tokens as they come, clients that leave, headers too long or too slow."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.router.doubles import fake_shards, make_limits
from tests.router.site import PROMPT, events_in, raw, site


async def test_tokens_arrive_one_by_one_over_a_socket() -> None:
    shards = fake_shards(make_limits(), step_delay_s=0.02)
    async with site(shards) as it:
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 6}}
        async with it.http.stream("POST", "/generate_stream", json=body) as answer:
            chunks = [chunk async for chunk in answer.aiter_raw()]
        assert len(chunks) == 6


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_request_of_a_client_that_leaves_is_retired_within_two_steps(path: str) -> None:
    shards = fake_shards(make_limits(), step_delay_s=0.1)
    async with site(shards, max_concurrent_requests=1) as it:
        _, writer = await asyncio.open_connection("127.0.0.1", it.port)
        body = json.dumps({"inputs": PROMPT, "parameters": {"max_new_tokens": 100}}).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        while len(shards.requests) < 4:
            await asyncio.sleep(0.001)
        assert (await it.post("/generate")).status_code == 429
        left_at = shards.requests[-1].step
        writer.close()
        await it.all_free()
        [retired_at] = [request.step for request in shards.requests if request.retire]
        assert retired_at - left_at <= 2
        assert (await it.post("/generate", max_new_tokens=1)).status_code == 200
        assert 'tgi_request_failure{err="dropped"} 1.0' in (await it.http.get("/metrics")).text


async def test_storm_of_disconnects_leaves_nothing_behind() -> None:
    shards = fake_shards(make_limits(), step_delay_s=0.001)
    async with site(shards, max_concurrent_requests=500) as it:

        async def visit(number: int) -> None:
            body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 50}}
            path = "/generate_stream" if number % 2 else "/generate"
            try:
                async with asyncio.timeout(number % 17 / 500):
                    await it.http.post(path, json=body)
            except TimeoutError:
                pass

        await asyncio.gather(*(visit(number) for number in range(100)))
        await it.all_free()
        text = (await it.http.get("/metrics")).text
        counts = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line[0] != "#"}
        ended = counts["tgi_request_success"] + sum(
            value for name, value in counts.items() if name.startswith("tgi_request_failure")
        )
        assert counts["tgi_request_count"] == ended


async def test_huge_headers_are_refused() -> None:
    async with site() as it:
        start = b"GET /health HTTP/1.1\r\nhost: x\r\n"
        for headers in (b"a: " + b"x" * 40_000 + b"\r\n\r\n", b"a: b\r\n" * 101 + b"\r\n", b"a: " + b"x" * 10**6):
            assert (await raw(it.port, start + headers)).startswith(b"HTTP/1.1 431 ") or len(headers) == 10**6 + 3
        assert b" 431 " in await raw(it.port, b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        ok = await it.http.get("/health", headers={f"h{number}": "x" * 200 for number in range(80)})
        assert ok.status_code == 200


SHORT = {"header_timeout": 0.2, "body_timeout": 0.2}


async def test_slow_answer_is_not_cut_off() -> None:
    shards = fake_shards(make_limits(), step_delay_s=0.1)
    async with site(shards, config=SHORT) as it:
        for _ in range(2):  # the second on the same connection
            assert (await it.post("/generate", max_new_tokens=4)).status_code == 200


async def test_stream_and_plain_answer_have_the_same_text() -> None:
    async with site() as it:
        for prompt in ("a", "🙂", "line\nline", "x\0y"):
            plain = (await it.post("/generate", inputs=prompt, max_new_tokens=30)).json()["generated_text"]
            events = events_in((await it.post("/generate_stream", inputs=prompt, max_new_tokens=30)).text)
            assert "".join(event["token"]["text"] for event in events) == plain == events[-1]["generated_text"]
