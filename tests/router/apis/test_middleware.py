"""The layers around the routes: keys, other origins, the Host header, request ids."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.routing import Route

from tests.router.site import PROMPT, assert_is_error, in_process, raw, site


async def test_api_key_closes_every_route_but_the_probes() -> None:
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
            *("/", "/health", "/ping", "/docs", "/docs/swagger-ui.css", "/docs/swagger-ui-bundle.js"),
            *("/api-doc/openapi.json", "/openapi.json", "/playground/app.css"),
            *map("/playground/{}.js".format, "answer app code live parameters server theme".split()),
        }
        assert {method for method, _ in open_paths} == {"GET", "HEAD"}
        by_head = {path for method, path in open_paths if method == "HEAD"}
        assert by_head == {path for _, path in open_paths}
        for path in ("/", "/health", "/ping"):
            assert (await it.http.head(path)).status_code == 200
        assert (await it.http.head("/info")).status_code == 401
        for path in ("/nowhere", "http://test//generate", "/health/", "/HEALTH", "/metrics", "/info"):
            assert (await http.get(path)).status_code == 401
        headers: Any = {"authorization": "bearer Sésame".encode()}
        assert (await http.get("/info", headers=headers)).status_code == 200
        refused = await http.get("/info")
        assert_is_error(refused, 401, "unauthorized")
        assert refused.headers["www-authenticate"] == "Bearer"


async def test_cors_lets_in_nobody_or_the_chosen_origin() -> None:
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


OWN_HOSTS = (
    "localhost LOCALHOST:80 localhost.:3000 app.localhost 127.0.0.1 127.0.0.1:99 127.8.8.8 [::1] [::1]:3000 box box:1"
)
OTHER_HOSTS = (
    "evil.example evil.example:3000 127.0.0.1.evil.example localhost.evil.example 10.0.0.1 0.0.0.0 [::] [::1 ::1 a@b"
)
OTHER_HOSTS += " localhost:x localhost/x [fe80::1] 127.1 2130706433 box.evil.example"


async def test_server_on_loopback_answers_to_its_own_names_alone() -> None:
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


async def test_server_that_others_reach_answers_to_any_name() -> None:
    async with site(config={"hostname": "0.0.0.0"}) as it, in_process(it.app) as http:
        for host in (*OWN_HOSTS.split(), *OTHER_HOSTS.split()):
            assert (await http.get("/health", headers={"host": host})).status_code == 200


async def test_request_id_is_echoed_if_it_is_harmless() -> None:
    async with site() as it, in_process(it.app) as http:
        answer = await http.get("/health", headers={"x-request-id": "my-id_1"})
        assert answer.headers["x-request-id"] == "my-id_1"
        for harmful in ("a b", "x" * 65, "", "a\x1b[31m"):
            answer = await http.get("/nowhere", headers={"x-request-id": harmful})
            assert answer.headers["x-request-id"] not in ("", harmful)


async def test_same_request_id_on_many_requests_mixes_nothing_up() -> None:
    async with site(max_concurrent_requests=50) as it:
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 3}}
        headers = {"x-request-id": "same"}
        answers = await asyncio.gather(*(it.http.post("/generate", json=body, headers=headers) for _ in range(20)))
        assert len({answer.text for answer in answers}) == 1
