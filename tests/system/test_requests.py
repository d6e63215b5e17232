"""What a request may do to a whole server, as a user starts it: whom it must name, and what a long prompt may cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.router.apis.error_bodies import assert_is_clean_answer
from tests.running import Server, body

WORDS = " ".join(f"{number * 7919 % 100_003:x}" for number in range(400_000))[:1_900_000]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--model-id", "null") as running:
        yield running


def test_web_pages_of_others_get_nothing(server: Server) -> None:
    url = f"{server.url}/generate"
    rebound = httpx2.post(url, json=body("a", max_new_tokens=1), headers={"host": "evil.example:3000"}, timeout=60)
    assert rebound.status_code == 421
    assert_is_clean_answer(rebound.headers["content-type"], rebound.content)
    for host in ("localhost", "127.0.0.1:1", "[::1]"):
        headers = {"host": host, "origin": "http://a.example"}
        answer = httpx2.post(url, json=body("a", max_new_tokens=1), headers=headers, timeout=60)
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers


def test_long_prompts_are_refused_while_a_stream_goes_on(server: Server) -> None:
    """Of two megabytes each, by their characters; and by its tokens one that is as long as `truncate` allows."""
    stream = {**body("a", max_new_tokens=2000), "stream": True}
    long = [body(WORDS), body(WORDS, truncate=10), body(WORDS[:212_940], truncate=10, max_new_tokens=10**6)]
    with ThreadPoolExecutor(5) as pool, httpx2.stream("POST", f"{server.url}/", json=stream, timeout=60) as streamed:
        lines = (line for line in streamed.iter_lines() if line.startswith("data: "))
        next(lines)
        posts = [pool.submit(httpx2.post, f"{server.url}/generate", json=one, timeout=60) for one in long]
        posts.append(pool.submit(httpx2.post, f"{server.url}/tokenize", json=long[0], timeout=60))
        by_characters, truncated, by_tokens, tokenize = (post.result() for post in posts)
        *_, last = lines
    for answer in (by_characters, truncated, by_tokens, tokenize):
        assert answer.status_code == 422
        assert_is_clean_answer(answer.headers["content-type"], answer.content)
    assert "Given: 1900000 characters" in by_characters.json()["error"] and "1900000" in tokenize.json()["error"]
    assert "at most 212940 characters if `truncate` is set" in truncated.json()["error"]
    assert "10 `inputs` tokens and 1000000 `max_new_tokens`" in by_tokens.json()["error"]
    assert json.loads(last.removeprefix("data: "))["generated_text"]


def test_nothing_is_held_after_all_that(server: Server) -> None:
    metrics = server.metrics()
    assert metrics["tgi_kv_blocks_free"] == metrics["tgi_kv_blocks_total"]
