"""What clients send to get in, to get more than their share, or to reach others: nothing comes of it."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import time
from typing import Any

import orjson
import pytest

from router.shards.client import ShardError
from tests.router.apis.error_bodies import assert_is_clean, assert_is_clean_answer
from tests.router.doubles import fake_shards, make_limits
from tests.router.site import PROMPT, raw, site

KEY = "Canary-4711"
JSON = {"content-type": "application/json"}
# Requests for what a key guards, as no client library would write them.
ODD_PATHS = """
    /info //info /v1/../info /health/../info /info/ /info?x=/health /info#/health /info;/health
    /health%2f..%2finfo /%69nfo http://x/info http://x/health/../info /docs/../metrics /INFO
"""
ODD_LINES = [*(b"GET %b HTTP/1.1" % path.encode() for path in ODD_PATHS.split()), b"GET /metrics HTTP/1.0"]
ODD_LINES += [
    line.encode() + b" HTTP/1.1"
    for line in (
        "HEAD /info",
        "get /info",
        "OPTIONS /info",
        "POST /health",
        "POST /",
        "DELETE /generate",
        "TRACE /info",
    )
]
ODD_HOSTS = [b"x", b"a/?x=", b"a/health#", b"a/health?", b"x\r\nx-original-url: /health", b"/health"]
KEYS = [
    b"",
    b"authorization: Bearer wrong\r\n",
    b"authorization: Bearer \r\n",
    b"authorization: Bearer canary-4711\r\n",
    b"authorization: Bearer CANARY-4711\r\n",
    b"authorization: Bearer Canary-471\r\n",
    b"authorization: Bearer Canary-47111\r\n",
    b"authorization: Bearer \xc3\xa9\xff\r\n",
    b"authorization: Canary-4711\r\n",
    b"authorization: Basic Canary-4711\r\n",
    b"authorization: Bearer wrong\r\nauthorization: Bearer Canary-4711\r\n",
    b"x-api-key: Canary-4711\r\n",
]


async def test_no_spelling_of_a_request_comes_past_the_key() -> None:
    """On a server that any name may reach, so that the key alone is in the way."""

    async with site(config={"api_key": KEY, "hostname": "0.0.0.0"}) as it:
        for line in ODD_LINES:
            for host in ODD_HOSTS:
                for key in KEYS[:2] if host != b"x" else KEYS:
                    request = line + b"\r\nhost: " + host + b"\r\nconnection: close\r\n" + key + b"\r\n"
                    async with asyncio.timeout(20):
                        answer = await raw(it.port, request)
                    assert re.match(rb"HTTP/1.1 (400|401|404|405|421) ", answer), (request, answer)
                    assert b"model_id" not in answer and b"tgi_" not in answer
        right = {"authorization": f"Bearer {KEY}"}
        assert (await it.http.get("/info", headers=right)).status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip"])
async def test_compressed_bodies_are_not_unpacked(encoding: str) -> None:
    """So a small body cannot become a large one."""

    async with site() as it:
        body = gzip.compress(b'{"inputs": "' + b"a" * 10**7 + b'"}')
        answer = await it.http.post("/generate", content=body, headers=JSON | {"content-encoding": encoding})
        assert answer.status_code in (400, 415)
        assert_is_clean_answer(answer.headers["content-type"], answer.content)


async def test_thousands_of_ranges_are_one_file() -> None:
    async with site() as it:
        path = "/docs/swagger-ui.css"
        whole = await it.http.get(path)
        assert whole.status_code == 200
        ranges = "bytes=" + ",".join(f"{n}-{n}" for n in range(0, 6000, 2))
        assert (await it.http.get(path, headers={"range": ranges})).content == whole.content
        assert (await it.http.get(path, headers={"range": "bytes=0-"})).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/docs/../app.py",
        "/docs/..%2fapp.py",
        "/docs/%2e%2e/%2e%2e/config.py",
        "/docs/..%5capp.py",
        "/docs/swagger-ui.css%00.py",
        "/docs//etc/passwd",
        "/playground/page.html",
        "/playground/../app.py",
        "/playground/%2e%2e/config.py",
        "/docs/" + "a" * 5000,
        "//etc/passwd",
        "/etc/passwd",
        "/static/swagger-ui.css",
    ],
)
async def test_paths_lead_to_routes_and_not_to_files(path: str) -> None:
    async with site() as it:
        answer = await raw(it.port, f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        head, _, content = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 404 "), answer
        assert_is_clean(json.loads(content))


NO_SUCH_FIELD = {
    "chat_template": "{% for a in range(10**9) %}{% for b in range(10**9) %}x{% endfor %}{% endfor %}",
    "chat_template_kwargs": {"tokenize": True, "chat_template": "{{ cycler.__init__.__globals__.os }}"},
    "model": "../../etc/passwd",
    "logits_processor": "gASVIAAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOU",
    "logits_bias": {str(10**9): 1e308},
    "allowed_token_ids": [10**9],
    "cache_salt": [],
    "image": "http://127.0.0.1:1/",
}


async def test_fields_that_we_do_not_have_change_nothing() -> None:
    """Tensors, code, templates, paths and addresses are no part of a request, whatever other servers make of them."""

    async with site() as it:
        plain = (await it.post("/generate", max_new_tokens=5)).json()
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 5} | NO_SUCH_FIELD} | NO_SUCH_FIELD
        assert (await it.http.post("/generate", json=body)).json() == plain
        assert (await it.post("/generate", adapter_id="../../etc/passwd")).status_code == 422
        for tensor in ({"prompt_embeds": NO_SUCH_FIELD["logits_processor"]}, {"input_embeds": [[1e308] * 10]}):
            for asked in ({"inputs": PROMPT} | tensor, {"inputs": PROMPT, "parameters": tensor}):
                answer = await it.http.post("/generate", json=asked)
                assert answer.status_code == 422
                assert f"{next(iter(tensor))}`: is not served: leave it out" in answer.json()["error"]
        image = f"![]({NO_SUCH_FIELD['image']})"
        assert (await it.post("/generate", inputs=image, max_new_tokens=1)).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": PROMPT, "parameters": {"stop": ["a"] * 100_000}},
        {"inputs": ["a"] * 100_000},
        {"inputs": PROMPT, "parameters": {"best_of": 3, "do_sample": True}},
        {"inputs": PROMPT, "parameters": {"max_new_tokens": 124}},
        {"inputs": PROMPT, "parameters": {"top_n_tokens": 6}},
        {"inputs": PROMPT, "parameters": {"truncate": 65}},
    ],
    ids=lambda body: str(body)[:60],
)
async def test_what_is_too_much_is_refused(body: dict[str, Any]) -> None:
    async with site() as it:
        answer = await it.http.post("/generate", content=orjson.dumps(body), headers=JSON)
        assert answer.status_code == 422, answer.text
        assert_is_clean_answer(answer.headers["content-type"], answer.content)


async def test_a_request_that_is_cancelled_takes_none_of_its_name_with_it() -> None:
    """All have the same id or a beginning of it: a server that looked requests up by it would end the wrong ones."""

    shards = fake_shards(make_limits(), step_delay_s=0.001)
    async with site(shards, max_concurrent_requests=200) as it:
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 20}}
        names = ["a" * (1 + number % 64) for number in range(80)]
        tasks = [
            asyncio.create_task(it.http.post("/generate", json=body, headers={"x-request-id": name})) for name in names
        ]
        while not shards.live_ids:
            await asyncio.sleep(0.001)
        left = tasks[0]
        left.cancel()
        answers = await asyncio.gather(*tasks[1:])
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.text for answer in answers}) == 1
        await it.all_free()


async def test_no_answer_of_the_status_routes_has_the_key() -> None:
    async with site(config={"api_key": KEY}) as it:
        right = {"authorization": f"Bearer {KEY}"}
        for path in ("/info", "/metrics", "/health", "/api-doc/openapi.json", "/docs", "/nowhere"):
            answer = await it.http.get(path, headers=right)
            assert KEY not in answer.text and KEY not in str(answer.headers)


async def test_a_scraper_that_never_rests_stops_no_stream() -> None:
    shards = fake_shards(make_limits(), step_delay_s=0.002)
    async with site(shards) as it:
        alone = (await it.post("/generate_stream", max_new_tokens=100)).text
        stream = asyncio.create_task(it.post("/generate_stream", max_new_tokens=100))
        began, scraped = time.monotonic(), 0
        while not stream.done():
            assert (await it.http.get("/metrics")).status_code == 200
            scraped += 1
            assert time.monotonic() - began < 60
        assert scraped > 3
        assert stream.result().text == alone


async def test_a_probe_is_told_of_an_outage_and_not_of_the_inside_of_the_server() -> None:
    """Probes need no key."""

    async with site(config={"api_key": KEY}) as it:
        it.batcher.outage = ShardError(0, "File /srv/lockstep/server/engine.py, at 0x7f3a2b1c")
        answer = await it.http.get("/health")
        assert 503 == answer.status_code and "started again" in answer.json()["error"]
        assert_is_clean_answer(answer.headers["content-type"], answer.content)
        assert "engine.py" not in answer.text
