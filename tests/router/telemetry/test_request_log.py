"""One log line for each request that is over, whatever became of it, and none that a client can misuse."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router.telemetry.request_log import MOST_REFUSALS_A_MINUTE, RequestLogMiddleware, harmless, harmless_names
from tests.router.doubles import fake_shards, make_limits
from tests.router.site import PROMPT, Site, site

SECRET = "SECRET"
CHAT = {"messages": [{"role": "user", "content": SECRET}]}


@asynccontextmanager
async def logging_site(
    caplog: pytest.LogCaptureFixture, **options: Any
) -> AsyncIterator[tuple[Site, list[dict[str, Any]]]]:
    """A site, and what the log has of its requests once the block is over."""
    lines: list[dict[str, Any]] = []
    with caplog.at_level(logging.INFO, "router"):
        async with site(**options) as it:
            yield it, lines
    assert all(SECRET not in str(record.__dict__) for record in caplog.records)
    records = [record for record in caplog.records if record.name == "router.telemetry.request_log"]
    lines += [{**record.__dict__, "message": record.getMessage()} for record in records]


def chosen(lines: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(line.get(name) for name in names) for line in lines]


async def test_every_request_that_is_over_has_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async with logging_site(caplog, config={"api_key": "k"}) as (it, lines):
        headers = {"authorization": "Bearer k", "x-request-id": "mine"}
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 2}}
        for path in ("/generate", "/generate_stream"):
            assert 200 == (await it.http.post(path, json=body, headers=headers)).status_code
        asked = {"model": "gpt", "prompt": [PROMPT, PROMPT], "n": 2, "max_tokens": 3, "best_of": 2}
        assert 200 == (await it.http.post("/v1/completions", json=asked, headers=headers)).status_code
        assert 200 == (await it.http.post("/tokenize", json=body, headers=headers)).status_code
    assert {("mine", 200, "default")} == set(chosen(lines, "request_id", "status", "key"))
    assert [
        ("/generate", "length", None, False, 5, 0, 2, None),
        ("/generate_stream", "length", None, True, 5, 0, 2, None),
        ("/v1/completions", "length", "gpt", False, 10, 0, 12, 4),
        ("/tokenize", "answered", None, None, None, None, None, None),
    ] == chosen(
        lines, "path", "reason", "model", "stream", "prompt_tokens", "cached_tokens", "generated_tokens", "answers"
    )
    for line in lines[:3]:
        assert line["message"] == "request ended: length"
        assert all(line[name] >= 0 for name in ("validation_ms", "queue_ms", "first_token_ms", "total_ms"))


async def test_times_of_requests_that_were_cut_are_there_too(caplog: pytest.LogCaptureFixture) -> None:
    """Of one that was computed, and of one that only waited."""
    slow = fake_shards(make_limits(max_batch_size=1), step_delay_s=3600)
    async with logging_site(caplog, shards=slow, max_batch_size=1) as (it, lines):
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 2}}
        late = {"x-request-timeout-ms": "2000"}
        running = asyncio.create_task(it.http.post("/generate", json=body, headers=late))
        while not slow.live_ids and not running.done():
            await asyncio.sleep(0)
        answers = await asyncio.gather(running, it.http.post("/generate", json=body, headers=late))
        assert [504, 504] == [answer.status_code for answer in answers]
    for line in lines:
        assert "timeout" == line["reason"] and "first_token_ms" not in line
        assert 0 <= line["validation_ms"] <= line["total_ms"] and 0 <= line["queue_ms"] <= line["total_ms"]
    waited = lines[1]
    assert abs(waited["validation_ms"] + waited["queue_ms"] - waited["total_ms"]) <= 2  # each is rounded


async def test_probes_have_none(caplog: pytest.LogCaptureFixture) -> None:
    async with logging_site(caplog) as (it, lines):
        for path in ("/health", "/metrics", "/info", "/"):
            assert 200 == (await it.http.get(path)).status_code
    assert [] == lines


async def test_cached_tokens_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    async with logging_site(caplog, prefix_caching=True) as (it, lines):
        for _ in range(2):
            await it.post("/generate", inputs="x" * 40, max_new_tokens=2)
    assert [(40, 0), (40, 32)] == chosen(lines, "prompt_tokens", "cached_tokens")


async def test_refused_requests_have_a_line_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    async with logging_site(caplog, config={"api_key": "k", "payload_limit": 200}) as (it, lines):
        key = {"authorization": "Bearer k"}
        await it.http.post("/generate", json={"inputs": SECRET}, headers={"authorization": f"Bearer {SECRET}"})
        await it.http.post("/nowhere?q=SECRET", json={"inputs": SECRET}, headers=key)
        await it.http.get("/generate", headers=key)
        await it.http.post("/generate", json={"inputs": SECRET * 100}, headers=key)
        await it.http.post("/generate", content=SECRET, headers=key)
        await it.http.post("/generate", json={"inputs": SECRET, "parameters": {"top_p": 7}}, headers=key)
        await it.http.post("/v1/completions", json={"prompt": SECRET, "n": 0, "model": "m"}, headers=key)
        await it.http.post("/v1/chat/completions", json={"model": "m"}, headers=key)
    assert [
        ("request refused: unauthorized", "/generate", 401, None),
        ("request refused: not_found", "/nowhere", 404, "default"),
        ("request refused: method_not_allowed", "/generate", 405, "default"),
        ("request refused: validation", "/generate", 413, "default"),
        ("request refused: validation", "/generate", 415, "default"),
        ("request ended: validation", "/generate", 422, "default"),
        ("request refused: validation", "/v1/completions", 400, "default"),
        ("request refused: validation", "/v1/chat/completions", 400, "default"),
    ] == chosen(lines, "message", "path", "status", "key")
    assert "m" == lines[6]["model"]


async def test_a_stream_that_fails_says_why_and_what_it_had(caplog: pytest.LogCaptureFixture) -> None:
    shards = fake_shards(make_limits(), failing_steps=dict.fromkeys(range(4, 60), "no memory"), step_delay_s=0.01)
    async with logging_site(caplog, shards=shards) as (it, lines):
        await it.post("/generate_stream", max_new_tokens=9)
    assert [(200, "generation", 3)] == chosen(lines, "status", "reason", "generated_tokens")


async def test_a_bug_is_a_line_with_500_and_an_answer_with_its_id(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> None:
        raise KeyError

    monkeypatch.setattr("router.http.bodies.Bodies.read", broken)
    async with logging_site(caplog) as (it, lines):
        answer = await it.http.post("/generate", json={"inputs": "a"}, headers={"x-request-id": "mine"})
        assert (500, "mine") == (answer.status_code, answer.headers["x-request-id"])
    assert [("mine", 500, "internal_server_error")] == chosen(lines, "request_id", "status", "reason")


async def test_fields_that_nobody_looks_at_are_named_and_no_value_is(caplog: pytest.LogCaptureFixture) -> None:
    many = {f"x{number}": SECRET for number in range(20)}
    async with logging_site(caplog) as (it, lines):
        for extra in (
            {"store": True, "metadata": {SECRET: 1}, "tools": None},
            many,
            {"a\r\n\x1b[2J\u202eb" + "c" * 99: 1},
        ):
            answer = await it.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **extra})
            assert 200 == answer.status_code
        await it.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "model": "\x1b" + "m" * 99})
    named = [line.get("ignored_fields") for line in lines]
    assert named[0] == "store, metadata"
    assert named[1] == ", ".join([*list(many)[:16], "and 4 more"])
    assert named[2] == ("a\ufffd\ufffd\ufffd[2J\ufffdb" + "c" * 99)[:64]
    assert (None, ("\ufffd" + "m" * 99)[:64]) == (named[3], lines[3]["model"])


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "suffix": "", "stray": 1}, "stray"),
        ("/v1/completions", {"prompt": "a", "prompt_embeds": "x"}, None),
        (
            "/generate",
            {"inputs": "a", "suffix": "", "parameters": {"max_new_tokns": 3}},
            "suffix, parameters.max_new_tokns",
        ),
        ("/", {"inputs": "a", "suffix": "", "paramters": {"max_new_tokens": 3}}, "suffix, paramters"),
        ("/vertex", {"suffix": 1, "instances": [{"inputs": "a", "stray": 1}]}, "suffix, instances.stray"),
        ("/v1/chat/completions", {"messages": [], "functions": [{}], "stray": 1}, "stray"),
        ("/v1/responses", {"input": "a", "previous_response_id": "x", "top_logprobs": 999}, None),
        ("/v1/messages", {"messages": [], "mcp_servers": [{}]}, None),
    ],
)
async def test_fields_that_are_refused_are_not_named_as_ignored(
    path: str, body: dict[str, Any], named: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with logging_site(caplog) as (it, lines):
        assert (200 if "suffix" in body else 400) == (await it.http.post(path, json=body)).status_code
    [line] = lines
    assert named == line.get("ignored_fields")


def test_names_of_clients_are_cut_and_cleaned() -> None:
    assert "a\ufffdb" == harmless("a\nb")
    assert 64 == len(harmless("x" * 1000))
    assert "" == harmless_names([])
    assert "a, b" == harmless_names(["a", "b"])


async def test_refusals_are_written_so_often_and_the_rest_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0

    async def answer(status: int, fields: dict[str, Any]) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope["state"]["log"].update(fields)
            await send({"type": "http.response.start", "status": status})

        async def send(_: Any) -> None:
            pass

        middleware._app = app
        scope = {"type": "http", "method": "POST", "path": "/generate", "state": {"request_id": "r"}}
        await middleware(scope, send, send)  # type: ignore[arg-type]

    middleware = RequestLogMiddleware(None, lambda: now)  # type: ignore[arg-type]

    with caplog.at_level(logging.INFO, "router"):
        for _ in range(MOST_REFUSALS_A_MINUTE + 50):
            await answer(401, {})
        await answer(200, {"reason": "length", "stream": True, "generated_tokens": 1})
        await answer(429, {"reason": "overloaded", "stream": True})
        await answer(424, {"reason": "generation", "stream": False, "generated_tokens": 3})
        now = 60 / MOST_REFUSALS_A_MINUTE
        await answer(401, {})
        await answer(401, {})
    lines = [record.__dict__ for record in caplog.records]
    assert [("length", 50), ("generation", 1), ("unauthorized", None)] == chosen(
        lines[MOST_REFUSALS_A_MINUTE:], "reason", "refusals_left_out"
    )


async def test_a_client_that_goes_away_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    shards = fake_shards(make_limits(), step_delay_s=0.01)
    async with logging_site(caplog, shards=shards) as (it, lines):
        _, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.write(
            b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 17\r\n\r\n"
        )
        writer.write(b'{"inputs": "abc"}')
        while not shards.live_ids:
            await asyncio.sleep(0.001)
        writer.close()
        await it.all_free()
    assert [(499, "cancelled", 3)] == chosen(lines, "status", "reason", "prompt_tokens")


async def test_a_stream_that_is_left_has_the_time_of_its_first_token(caplog: pytest.LogCaptureFixture) -> None:
    shards = fake_shards(make_limits(), step_delay_s=0.01)
    body = b'{"inputs": "abc", "parameters": {"max_new_tokens": 60}}'
    async with logging_site(caplog, shards=shards) as (it, lines):
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        head = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(b"POST /generate_stream HTTP/1.1\r\n" + head.encode() + body)
        await reader.readuntil(b"data:")
        writer.close()
        await it.all_free()
    assert [("cancelled", 3)] == chosen(lines, "reason", "prompt_tokens")
    assert 0 <= lines[0]["first_token_ms"] <= lines[0]["total_ms"]
