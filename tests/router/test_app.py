"""The HTTP side over fake shards, served on loopback as the router serves it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import httpx2
import pytest
import uvicorn
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Route

from router import model_files, tgi
from router.api_document import api_document
from router.app import create_app
from router.batcher import Batcher
from router.config import RouterConfig
from router.entry import Token
from router.generation import OpenRequest
from router.guard import GuardedHttpProtocol
from router.metrics import Metrics
from router.schemas import GenerateRequest
from router.text import ModelTokenizer
from router.tracing import NoTracer, Tracer
from router.transport import Connections
from tests.router.doubles import EOS, byte_tokenizer, fake_shards, make_limits
from tests.router.fake_shards import FakeShardedClient

PROMPT = "hello"


@dataclass
class Site:
    """A served application and its parts."""

    app: FastAPI
    http: httpx2.AsyncClient
    port: int
    batcher: Batcher
    shards: FakeShardedClient
    metrics: Metrics
    settings: RouterConfig

    async def post(self, path: str, inputs: str = PROMPT, *, stream: bool | None = None, **parameters: Any) -> Any:
        body: dict[str, Any] = {"inputs": inputs, "parameters": parameters}
        return await self.http.post(path, json=body if stream is None else {**body, "stream": stream})

    async def all_free(self) -> None:
        """Wait until no request has left anything behind."""
        async with asyncio.timeout(5):
            while self.shards.live_ids or self.batcher.num_free_blocks < self.batcher.limits.num_blocks:
                await asyncio.sleep(0.001)


@asynccontextmanager
async def site(
    shards: FakeShardedClient | None = None,
    *,
    config: dict[str, Any] | None = None,
    tokenizer: ModelTokenizer | None = None,
    tracer: Tracer | None = None,
    **limits: Any,
) -> AsyncIterator[Site]:
    """On a loopback port, through the guarded protocol."""
    async with unserved(shards, config=config, tokenizer=tokenizer, tracer=tracer, **limits) as it:
        async with serving(it.app, it.settings) as it.port:
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{it.port}") as it.http:
                yield it


@cache
def documents() -> dict[tuple[Any, ...], bytes]:
    return {}


def document_once(app: FastAPI, **about: bool) -> bytes:
    """The API's document, which takes longer to make than the rest of an application and is always the same."""
    key = tuple(sorted(about.items()))
    if key not in documents():
        documents()[key] = api_document(app, **about)
    return documents()[key]


@asynccontextmanager
async def unserved(
    shards: FakeShardedClient | None = None,
    *,
    config: dict[str, Any] | None = None,
    tokenizer: ModelTokenizer | None = None,
    tracer: Tracer | None = None,
    **limits: Any,
) -> AsyncIterator[Site]:
    """Without a port. tokenizer: None stands for one token for each byte."""
    tokenizer = tokenizer or byte_tokenizer()
    wanted = make_limits(**limits)
    shards = shards or fake_shards(wanted)
    given = {"model_id": "a/model", "model_path": "/nowhere", "shard_sockets": ("x",), **(config or {})}
    settings = RouterConfig(**given)
    metrics = Metrics(wanted)
    batcher = Batcher(shards, tokenizer, wanted, metrics)
    with patch("router.app.api_document", document_once):
        app = create_app(
            settings,
            limits=wanted,
            model=await shards.info(),
            tokenizer=tokenizer,
            shards=shards,
            batcher=batcher,
            metrics=metrics,
            tracer=tracer or NoTracer(),
        )
    task = asyncio.create_task(batcher.run())
    async with in_process(app) as http:
        yield Site(app, http, 0, batcher, shards, metrics, settings)
    task.cancel()
    await asyncio.wait({task})


@asynccontextmanager
async def serving(app: FastAPI, settings: RouterConfig, max_connections: int = 1000) -> AsyncIterator[int]:
    """The application on the port that this gives."""
    listener = socket.create_server(("127.0.0.1", 0))
    protocol: Any = partial(GuardedHttpProtocol, shared=Connections(settings, max_connections))
    fixed: dict[str, Any] = {"ws": "none", "log_config": None, "access_log": False}
    # A story that fails leaves connections behind: its server ends all the same.
    server = uvicorn.Server(uvicorn.Config(app, http=protocol, timeout_graceful_shutdown=5, **fixed))
    task = asyncio.create_task(server._serve([listener]))
    while not server.started:
        await asyncio.sleep(0.001)
    port: int = listener.getsockname()[1]
    try:
        yield port
    finally:
        server.should_exit = True
        await task


def in_process(app: FastAPI) -> httpx2.AsyncClient:
    """Straight to the ASGI application, with headers that no client library would send."""
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://test")


def events_in(text: str) -> list[dict[str, Any]]:
    frames = [frame for frame in text.split("\n\n") if frame and not frame.startswith(":")]
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def answering(text: str | bytes) -> dict[str, Any]:
    """Shards that answer PROMPT with this text and then EOS."""
    ids = [*(text.encode() if isinstance(text, str) else text), EOS]

    def next_token(token_ids: Any, *_: Any) -> int:
        return ids[min(len(token_ids) - len(PROMPT), len(ids) - 1)]

    return {"vocab_size": 257, "next_token": next_token}


# ------------------------------------------------------------------------------------------------- answers


def test_generate_answers_an_object_and_root_a_list() -> None:
    async def story() -> None:
        async with site(fake_shards(make_limits(), **answering("Hi 🙂"))) as it:
            plain = await it.post("/generate")
            assert plain.json() == {"generated_text": "Hi 🙂"}
            assert (await it.post("/")).json() == [{"generated_text": "Hi 🙂"}]
            assert (await it.post("/", stream=False)).json() == [{"generated_text": "Hi 🙂"}]
            full = await it.post("/generate", return_full_text=True)
            assert full.json() == {"generated_text": "helloHi 🙂"}
            for name in ("x-compute-type", "x-request-id"):
                assert plain.headers[name]
            assert plain.headers["x-compute-characters"] == plain.headers["x-prompt-tokens"] == "5"
            assert plain.headers["x-generated-tokens"] == "8"
            times = ("compute", "total", "validation", "queue", "inference")
            assert all(plain.headers[f"x-{name}-time"].isdigit() for name in times)
            assert plain.headers["x-time-per-token"].isdigit()

    asyncio.run(story())


def test_details_have_tokens_prompt_and_candidates() -> None:
    async def story() -> None:
        async with site(fake_shards(make_limits(), **answering("Hi"))) as it:
            answer = await it.post("/generate", details=True, decoder_input_details=True, top_n_tokens=2)
            details = answer.json()["details"]
            assert details["finish_reason"] == "eos_token"
            assert (details["generated_tokens"], details["seed"]) == (3, None)
            assert [token["text"] for token in details["prefill"]] == list("hello")
            assert [token["logprob"] for token in details["prefill"]] == [None, -1, -1, -1, -1]
            assert details["tokens"][0] == {"id": 72, "text": "H", "logprob": -0.5, "special": False}
            assert details["tokens"][-1] == {"id": EOS, "text": "</s>", "logprob": -0.5, "special": True}
            assert [len(candidates) for candidates in details["top_tokens"]] == [2, 2, 2]
            assert "best_of_sequences" not in details
            plain = (await it.post("/generate", details=True)).json()["details"]
            assert plain["prefill"] == [] and "top_tokens" not in plain

    asyncio.run(story())


def test_seed_is_shown_only_where_it_mattered() -> None:
    async def story() -> None:
        async with site() as it:
            answer = await it.post("/generate", details=True, do_sample=True, seed=7, max_new_tokens=2)
            assert answer.json()["details"]["seed"] == 7
            answer = await it.post("/generate", details=True, seed=7, max_new_tokens=2)
            assert answer.json()["details"]["seed"] is None

    asyncio.run(story())


def test_best_of_returns_the_likeliest_and_the_others() -> None:
    async def story() -> None:
        async with site() as it:
            answer = await it.post("/generate", details=True, best_of=2, do_sample=True, max_new_tokens=3)
            details = answer.json()["details"]
            [other] = details["best_of_sequences"]
            assert other["seed"] != details["seed"]
            assert other["generated_tokens"] == 3
            assert set(other) >= {"generated_text", "finish_reason", "prefill", "tokens"}

    asyncio.run(story())


def test_stream_numbers_its_events_and_ends_with_the_text() -> None:
    async def story() -> None:
        async with site(fake_shards(make_limits(), **answering("a\nb"))) as it:
            for path, stream in (("/generate_stream", None), ("/", True)):
                answer = await it.post(path, stream=stream, details=True)
                assert answer.status_code == 200
                assert answer.headers["content-type"].startswith("text/event-stream")
                assert answer.headers["x-accel-buffering"] == "no"
                assert answer.headers["cache-control"] == "no-cache"
                events = events_in(answer.text)
                assert [event["index"] for event in events] == [1, 2, 3, 4]
                assert [event["token"]["text"] for event in events] == ["a", "\n", "b", "</s>"]
                assert all(event["generated_text"] is event["details"] is None for event in events[:-1])
                assert events[-1]["generated_text"] == "a\nb"
                expected = {"finish_reason": "eos_token", "generated_tokens": 4, "seed": None, "input_length": 5}
                assert events[-1]["details"] == expected
                assert "top_tokens" not in events[0]

    asyncio.run(story())


def test_end_token_inside_a_character_leaves_the_same_text_everywhere() -> None:
    async def story() -> None:
        async with site(fake_shards(make_limits(), **answering("Hi 🙂".encode()[:-1]))) as it:
            events = events_in((await it.post("/generate_stream")).text)
            shown = "".join(event["token"]["text"] for event in events if not event["token"]["special"])
            plain = (await it.post("/generate")).json()["generated_text"]
            assert shown == events[-1]["generated_text"] == plain == "Hi "

    asyncio.run(story())


def test_stream_without_details_has_none() -> None:
    async def story() -> None:
        async with site() as it:
            events = events_in((await it.post("/generate_stream", max_new_tokens=3)).text)
            assert events[-1]["details"] is None
            assert isinstance(events[-1]["generated_text"], str)

    asyncio.run(story())


def test_tokenize_gives_byte_offsets() -> None:
    async def story() -> None:
        async with site() as it:
            answer = await it.http.post("/tokenize", json={"inputs": "aé"})
            assert answer.json()[0] == {"id": 97, "text": "a", "start": 0, "stop": 1}
            assert answer.json()[-1]["stop"] == 3

    asyncio.run(story())


def test_info_reports_what_the_publisher_says_about_generating(tmp_path: Path) -> None:
    wanted = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
    published = {"eos_token_id": [128001, 128009], "top_k": None, "transformers_version": "4.40.0", **wanted}
    (tmp_path / "generation_config.json").write_text(json.dumps(published))

    async def story() -> None:
        async with site(config={"model_path": str(tmp_path)}) as it:
            info = (await it.http.get("/info")).json()
            assert (wanted, [EOS]) == (info["generation_defaults"], info["eos_token_ids"])

    asyncio.run(story())
    assert {128001, 128009} == model_files.eos_ids(tmp_path)


def test_info_health_metrics_and_docs() -> None:
    async def story() -> None:
        async with site() as it:
            await it.post("/generate", max_new_tokens=3)
            info = (await it.http.get("/info")).json()
            assert info["model_id"] == "a/model"
            assert info["max_input_length"] == info["max_input_tokens"] == 64
            for path in ("/health", "/ping", "/"):
                answer = await it.http.get(path)
                assert (answer.status_code, answer.content) == (200, b"")
            metrics = (await it.http.get("/metrics")).text
            assert "\ntgi_request_count 1.0\n" in metrics
            assert "# TYPE tgi_request_success counter" in metrics
            assert "\ntgi_batch_max_total_tokens 1024.0\n" in metrics
            assert "\ntgi_kv_blocks_total 64.0\n" in metrics
            assert "\ntgi_kv_blocks_free 64.0\n" in metrics
            assert 'tgi_batch_inference_count{method="prefill"} 1.0' in metrics
            assert "tgi_request_time_to_first_token_duration_count 1.0" in metrics
            assert "_created" not in metrics
            page = (await it.http.get("/docs")).text
            assert "http://" not in page and "https://" not in page
            assert (await it.http.get("/docs/swagger-ui.css")).status_code == 200
            assert (await it.http.get("/docs/swagger-ui-bundle.js")).status_code == 200
            paths = (await it.http.get("/api-doc/openapi.json")).json()["paths"]
            schema = paths["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
            assert "temperature" in schema["properties"]["parameters"]["anyOf"][0]["properties"]

    asyncio.run(story())


@given(st.text(), st.floats(max_value=0, allow_nan=False) | st.none(), st.booleans())
def test_frames_of_all_tokens_have_one_form(text: str, logprob: float | None, special: bool) -> None:
    token = Token(7, text, logprob, special)
    event = {"index": 1, "token": {"id": 7, "text": text, "logprob": logprob, "special": special}}
    expected = tgi.frame({**event, "generated_text": None, "details": None})
    assert expected == tgi.EventFrames(GenerateRequest(inputs="x"), cast(OpenRequest, None)).write(0, [token])


# -------------------------------------------------------------------------------------------------- errors


def assert_is_error(answer: httpx2.Response, status: int, error_type: str) -> None:
    assert (answer.status_code, answer.json()["error_type"]) == (status, error_type)
    assert set(answer.json()) == {"error", "error_type"}
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "path",
    "/ /generate /generate_stream /tokenize /chat_tokenize /detokenize /invocations /vertex".split(),
)
def test_bad_bodies_have_their_status_on_every_route(path: str) -> None:
    async def story() -> None:
        async with site(config={"payload_limit": 100}) as it:
            json_type = {"content-type": "application/json"}
            answer = await it.http.post(path, content=b"{", headers=json_type)
            assert_is_error(answer, 400, "validation")
            answer = await it.http.post(path, content=b"{}", headers=json_type)
            assert_is_error(answer, 422, "validation")
            answer = await it.http.post(path, content=b'{"inputs": "\\ud800"}', headers=json_type)
            assert_is_error(answer, 422, "validation")
            answer = await it.http.post(path, content=b"{}", headers={"content-type": "text/plain"})
            assert_is_error(answer, 415, "validation")
            answer = await it.http.post(path, json={"inputs": "x" * 200})
            assert_is_error(answer, 413, "validation")
            assert "100 bytes" in answer.json()["error"]

    asyncio.run(story())


def test_refused_stream_has_a_real_status() -> None:
    async def story() -> None:
        async with site(max_concurrent_requests=0) as it:
            assert_is_error(await it.post("/generate_stream", best_of=2), 422, "validation")
            assert_is_error(await it.post("/generate_stream"), 429, "overloaded")
            assert "retry-after" in (await it.post("/", stream=True)).headers

    asyncio.run(story())


def test_permit_comes_before_validation() -> None:
    async def story() -> None:
        async with site(max_concurrent_requests=0) as it:
            assert_is_error(await it.post("/generate", inputs=""), 429, "overloaded")

    asyncio.run(story())


def test_unknown_paths_and_methods_are_json_too() -> None:
    async def story() -> None:
        async with site() as it:
            assert_is_error(await it.http.get("/nowhere"), 404, "not_found")
            assert_is_error(await it.http.get("/generate"), 405, "method_not_allowed")
            assert_is_error(await it.http.delete("/"), 405, "method_not_allowed")

    asyncio.run(story())


def test_one_request_too_many_is_refused_and_the_others_are_untouched() -> None:
    async def story() -> None:
        shards = fake_shards(make_limits(), step_delay_s=0.005)
        async with site(shards, max_concurrent_requests=4) as it:
            running = [asyncio.create_task(it.post("/generate", max_new_tokens=10)) for _ in range(4)]
            await asyncio.sleep(0.02)
            refused = await it.post("/generate")
            assert_is_error(refused, 429, "overloaded")
            assert refused.headers["retry-after"] == "1"
            assert [answer.status_code for answer in await asyncio.gather(*running)] == [200] * 4
            assert (await it.post("/generate", max_new_tokens=1)).status_code == 200

    asyncio.run(story())


def test_best_of_takes_a_permit_for_each_sample_and_gives_all_back() -> None:
    async def story() -> None:
        async with site(max_concurrent_requests=1) as it:
            assert_is_error(await it.post("/generate", best_of=2, do_sample=True), 429, "overloaded")
            assert (await it.post("/generate", max_new_tokens=1)).status_code == 200

    asyncio.run(story())


def test_failed_step_is_424_before_the_first_token_and_an_event_after_it() -> None:
    async def story() -> None:
        always = dict.fromkeys(range(1, 50), "out of memory")
        async with site(fake_shards(make_limits(), failing_steps=always)) as it:
            answer = await it.post("/generate_stream")
            assert_is_error(answer, 424, "generation")
            assert "out of memory" in answer.json()["error"]
        async with site(fake_shards(make_limits(), failing_steps=always)) as it:
            assert_is_error(await it.post("/generate"), 424, "generation")
            it.shards.failing_steps = {}
            assert (await it.post("/generate", max_new_tokens=2)).status_code == 200
        later = dict.fromkeys(range(3, 50), "out of memory")
        shards = fake_shards(make_limits(), failing_steps=later, step_delay_s=0.01)
        async with site(shards) as it:
            answer = await it.post("/generate_stream", max_new_tokens=9)
            assert answer.status_code == 200
            *tokens, last = events_in(answer.text)
            assert [event["index"] for event in tokens] == [1, 2]
            assert set(last) == {"error", "error_type"}
            assert last["error_type"] == "generation"

    asyncio.run(story())


def test_draining_and_dead_servers_are_unavailable_and_unhealthy() -> None:
    async def story() -> None:
        async with site() as it:
            await it.batcher.drain(1)
            answer = await it.post("/generate")
            assert_is_error(answer, 503, "unavailable")
            assert "retry-after" in answer.headers
            assert_is_error(await it.http.get("/health"), 503, "healthcheck")
        async with site() as it:
            it.shards.die("killed")
            assert_is_error(await it.http.get("/health"), 503, "healthcheck")

    asyncio.run(story())


def test_no_error_repeats_the_prompt() -> None:
    async def story() -> None:
        async with site() as it:
            for parameters in ({"top_p": "SECRET"}, {"stop": ["SECRET"] * 9}, {"max_new_tokens": 10**6}):
                answer = await it.post("/generate", inputs="SECRET", **parameters)
                assert answer.status_code == 422
                assert "SECRET" not in answer.text

    asyncio.run(story())


# ---------------------------------------------------------------------------------------- around the routes


def test_api_key_closes_every_route_but_the_probes() -> None:
    async def story() -> None:
        async with site(config={"api_key": "Sésame"}) as it, in_process(it.app) as http:
            open_paths = set()
            for route in it.app.routes:
                assert isinstance(route, Route)
                for method in route.methods or ():
                    for key in (None, "sésame", "wrong", "é" * 1000, ""):
                        headers = {} if key is None else {"authorization": f"Bearer {key}".encode()}
                        answer = await http.request(method, route.path, headers=headers)
                        if answer.status_code != 401:
                            open_paths.add((method, route.path))
            assert {path for _, path in open_paths} <= {
                "/",
                "/health",
                "/ping",
                "/docs",
                "/docs/swagger-ui.css",
                "/docs/swagger-ui-bundle.js",
                "/api-doc/openapi.json",
                "/openapi.json",
                "/playground/app.css",
                *map("/playground/{}.js".format, "answer app code live parameters server theme".split()),
            }
            assert {method for method, _ in open_paths} == {"GET", "HEAD"}
            by_head = {path for method, path in open_paths if method == "HEAD"}
            assert by_head == {path for _, path in open_paths}
            for path in ("/", "/health", "/ping"):
                assert (await it.http.head(path)).status_code == 200
            assert (await it.http.head("/info")).status_code == 401
            for path in (
                "/nowhere",
                "http://test//generate",
                "/health/",
                "/HEALTH",
                "/metrics",
                "/info",
            ):
                assert (await http.get(path)).status_code == 401
            headers: Any = {"authorization": "bearer Sésame".encode()}
            assert (await http.get("/info", headers=headers)).status_code == 200
            refused = await http.get("/info")
            assert_is_error(refused, 401, "unauthorized")
            assert refused.headers["www-authenticate"] == "Bearer"

    asyncio.run(story())


def test_cors_lets_in_nobody_or_the_chosen_origin() -> None:
    async def story() -> None:
        preflight = {"origin": "http://a", "access-control-request-method": "POST"}
        async with site() as it:
            for answer in (
                await it.http.options("/generate", headers=preflight),
                await it.http.get("/info", headers={"origin": "http://a"}),
                await it.http.post("/generate", json={"inputs": "a"}, headers={"origin": "null"}),
            ):
                assert not [name for name in answer.headers if name.startswith("access-control")]
        async with site(config={"cors_allow_origin": ("*",), "api_key": "k"}) as it:
            answer = await it.http.options("/generate", headers=preflight)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
        async with site(config={"cors_allow_origin": ("http://a",)}) as it:
            answer = await it.http.get("/info", headers={"origin": "http://a"})
            assert answer.headers["access-control-allow-origin"] == "http://a"
            answer = await it.http.get("/info", headers={"origin": "http://b"})
            assert "access-control-allow-origin" not in answer.headers

    asyncio.run(story())


OWN_HOSTS = (
    "localhost LOCALHOST:80 localhost.:3000 app.localhost 127.0.0.1 127.0.0.1:99 127.8.8.8 [::1] [::1]:3000 box box:1"
)
OTHER_HOSTS = (
    "evil.example evil.example:3000 127.0.0.1.evil.example localhost.evil.example 10.0.0.1 0.0.0.0 [::] [::1 ::1 a@b"
)
OTHER_HOSTS += " localhost:x localhost/x [fe80::1] 127.1 2130706433 box.evil.example"


def test_server_on_loopback_answers_to_its_own_names_alone() -> None:
    async def story() -> None:
        config = {"is_on_loopback": True, "hostname": "box", "cors_allow_origin": ("*",)}
        async with site(config=config) as it, in_process(it.app) as http:
            for host in OWN_HOSTS.split():
                assert (await http.get("/health", headers={"host": host})).status_code == 200, host
            for host in (*OTHER_HOSTS.split(), "", " ", "é"):
                for method, path in (("GET", "/health"), ("OPTIONS", "/generate"), ("POST", "/generate")):
                    answer = await http.request(method, path, headers={"host": host.encode()})
                    assert_is_error(answer, 421, "wrong_host")
                    assert "send `Host: localhost`" in answer.json()["error"] and answer.headers["x-request-id"]
            twice = [(b"host", b"localhost"), (b"host", b"evil.example")]
            assert (await http.get("/health", headers=twice)).status_code == 421
            assert b" 200 " in await raw(it.port, b"GET /health HTTP/1.0\r\n\r\n")

    asyncio.run(story())


def test_server_that_others_reach_answers_to_any_name() -> None:
    async def story() -> None:
        async with site(config={"hostname": "0.0.0.0"}) as it, in_process(it.app) as http:
            for host in (*OWN_HOSTS.split(), *OTHER_HOSTS.split()):
                assert (await http.get("/health", headers={"host": host})).status_code == 200

    asyncio.run(story())


def test_request_id_is_echoed_if_it_is_harmless() -> None:
    async def story() -> None:
        async with site() as it, in_process(it.app) as http:
            answer = await http.get("/health", headers={"x-request-id": "my-id_1"})
            assert answer.headers["x-request-id"] == "my-id_1"
            for harmful in ("a b", "x" * 65, "", "a\x1b[31m"):
                answer = await http.get("/nowhere", headers={"x-request-id": harmful})
                assert answer.headers["x-request-id"] not in ("", harmful)

    asyncio.run(story())


def test_same_request_id_on_many_requests_mixes_nothing_up() -> None:
    async def story() -> None:
        async with site(max_concurrent_requests=50) as it:
            body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 3}}
            headers = {"x-request-id": "same"}
            answers = await asyncio.gather(*(it.http.post("/generate", json=body, headers=headers) for _ in range(20)))
            assert len({answer.text for answer in answers}) == 1

    asyncio.run(story())


# --------------------------------------------------------------------------------------------- connections


def test_tokens_arrive_one_by_one_over_a_socket() -> None:
    async def story() -> None:
        shards = fake_shards(make_limits(), step_delay_s=0.02)
        async with site(shards) as it:
            body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 6}}
            async with it.http.stream("POST", "/generate_stream", json=body) as answer:
                chunks = [chunk async for chunk in answer.aiter_raw()]
            assert len(chunks) == 6

    asyncio.run(story())


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_client_that_goes_away_frees_its_place(path: str) -> None:
    async def story() -> None:
        shards = fake_shards(make_limits(), step_delay_s=0.005)
        async with site(shards, max_concurrent_requests=1) as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            body = json.dumps({"inputs": PROMPT, "parameters": {"max_new_tokens": 100}}).encode()
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            while not shards.live_ids:
                await asyncio.sleep(0.001)
            if path == "/generate_stream":
                await reader.readuntil(b"data: ")
            assert (await it.post("/generate")).status_code == 429
            writer.close()
            await it.all_free()
            assert (await it.post("/generate", max_new_tokens=1)).status_code == 200
            metrics = (await it.http.get("/metrics")).text
            assert 'tgi_request_failure{err="dropped"} 1.0' in metrics

    asyncio.run(story())


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_request_of_a_client_that_leaves_is_retired_within_two_steps(path: str) -> None:
    async def story() -> None:
        shards = fake_shards(make_limits(), step_delay_s=0.1)
        async with site(shards) as it:
            _, writer = await asyncio.open_connection("127.0.0.1", it.port)
            body = json.dumps({"inputs": PROMPT, "parameters": {"max_new_tokens": 100}}).encode()
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            while len(shards.requests) < 4:
                await asyncio.sleep(0.001)
            left_at = shards.requests[-1].step
            writer.close()
            await it.all_free()
            [retired_at] = [request.step for request in shards.requests if request.retire]
            assert retired_at - left_at <= 2

    asyncio.run(story())


def test_storm_of_disconnects_leaves_nothing_behind() -> None:
    async def story() -> None:
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

    asyncio.run(story())


async def raw(port: int, data: bytes) -> bytes:
    """Everything that the server says to these bytes until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        async with asyncio.timeout(5):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def test_huge_headers_are_refused() -> None:
    async def story() -> None:
        async with site() as it:
            start = b"GET /health HTTP/1.1\r\nhost: x\r\n"
            for headers in (b"a: " + b"x" * 40_000 + b"\r\n\r\n", b"a: b\r\n" * 101 + b"\r\n", b"a: " + b"x" * 10**6):
                assert (await raw(it.port, start + headers)).startswith(b"HTTP/1.1 431 ") or len(headers) == 10**6 + 3
            assert b" 431 " in await raw(it.port, b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
            ok = await it.http.get("/health", headers={f"h{number}": "x" * 200 for number in range(80)})
            assert ok.status_code == 200

    asyncio.run(story())


SHORT = {"header_timeout": 0.2, "body_timeout": 0.2}


def test_slow_headers_are_cut_off() -> None:
    async def story() -> None:
        async with site(config=SHORT) as it:
            assert (await raw(it.port, b"GET /health HTTP/1.1\r\nhost:")).startswith(b"HTTP/1.1 408 ")
            start = (
                b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
            )
            assert (await raw(it.port, start)).startswith(b"HTTP/1.1 408 ")

    asyncio.run(story())


def test_slow_answer_is_not_cut_off() -> None:
    async def story() -> None:
        shards = fake_shards(make_limits(), step_delay_s=0.1)
        async with site(shards, config=SHORT) as it:
            for _ in range(2):  # the second on the same connection
                assert (await it.post("/generate", max_new_tokens=4)).status_code == 200

    asyncio.run(story())


def test_silent_stream_shows_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        shards = fake_shards(make_limits(), step_delay_s=0.2)
        async with site(shards) as it:
            answer = await it.post("/generate_stream", max_new_tokens=2)
            assert answer.text.count(": ping\n\n") >= 2
            assert len(events_in(answer.text)) == 2

    monkeypatch.setattr("router.event_stream.KEEP_ALIVE_S", 0.05)
    asyncio.run(story())


def test_stream_and_plain_answer_have_the_same_text() -> None:
    async def story() -> None:
        async with site() as it:
            for prompt in ("a", "🙂", "line\nline", "x\0y"):
                plain = (await it.post("/generate", inputs=prompt, max_new_tokens=30)).json()["generated_text"]
                events = events_in((await it.post("/generate_stream", inputs=prompt, max_new_tokens=30)).text)
                assert "".join(event["token"]["text"] for event in events) == plain == events[-1]["generated_text"]

    asyncio.run(story())
