"""The OpenAPI document says what the routes do: which there are, which need a key, and how they answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import pytest
from fastapi.routing import APIRoute

from router.apis.middleware import OPEN_PATHS
from router.apis.serving import ADAPTER_HEADER
from tests.router.apis.openai.test_routes import CHAT, COMPLETION, chunks_of
from tests.router.site import PROMPT, answering_site, assert_is_error, events_in, site

Json = dict[str, Any]


NEWER: list[tuple[str, str, Json]] = [
    ("/v1/messages", "/v1/messages/count_tokens", {"messages": CHAT["messages"], "temperature": 0}),
    ("/v1/responses", "/v1/responses/input_tokens", {"input": PROMPT, "temperature": 0}),
]


def events_of(text: str) -> list[Json]:
    """Of a stream of any API."""
    if "[DONE]" in text:
        return chunks_of(text)
    if "event: " in text:
        return [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line.startswith("data: ")]
    return events_in(text)


def document_of(**config: Any) -> Json:
    async def story() -> Json:
        async with site(config=config) as it:
            one, other = [await it.http.get(path) for path in ("/openapi.json", "/api-doc/openapi.json")]
            assert one.content == other.content and one.headers["content-type"] == "application/json"
            paths: Json = one.json()["paths"]
            assert {
                (path, method.lower())
                for path, method in (
                    (route.path.replace(":path", ""), method)
                    for route in it.app.routes
                    if isinstance(route, APIRoute) and route.include_in_schema
                    for method in route.methods or ()
                )
                if method != "HEAD"
            } == {(path, method) for path, operations in paths.items() for method in operations}
            found: Json = one.json()
            return found

    return asyncio.run(story())


def test_it_names_every_route_and_every_error_of_it() -> None:
    document = document_of()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            statuses = set(operation["responses"])
            assert {"200", "500"} <= statuses and not statuses & {"401", "421"}
            assert ("requestBody" in operation) == (method == "post") == ("429" in statuses)
            assert path.startswith("/v1/") or method == "get" or "422" in statuses
            assert all("x-request-id" in response["headers"] for response in operation["responses"].values())
            for status, response in operation["responses"].items():
                if status != "200":
                    schema = response["content"]["application/json"]["schema"]
                    expected = ["ErrorAnswer" if path.startswith("/v1/") else "ErrorResponse"]
                    expected = ["MessageError"] if path.startswith("/v1/messages") else expected
                    if (path, status) == ("/v1/models/{name}", "404"):  # to each client in its shape
                        expected.append("MessageError")
                    references = [reference for kind in schema.get("anyOf", [schema]) for reference in kind.values()]
                    assert [f"#/components/schemas/{name}" for name in expected] == references
    assert "security" not in str(document)


def test_it_says_where_a_key_is_needed_and_where_only_this_machine_is_let_in() -> None:
    document = document_of(api_key="k", is_on_loopback=True)
    of_anthropic = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    bearer = {"type": "http", "scheme": "bearer"}
    assert {"ApiKey": bearer, "AnthropicApiKey": of_anthropic} == document["components"]["securitySchemes"]
    assert [{"ApiKey": []}, {"AnthropicApiKey": []}] == document["paths"]["/v1/messages"]["post"]["security"]
    assert [{"ApiKey": []}] == document["paths"]["/generate"]["post"]["security"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            is_open = method == "get" and path in OPEN_PATHS
            assert is_open == ("security" not in operation) == ("401" not in operation["responses"])
            assert "421" in operation["responses"]


def schema_of(document: Json, path: str, status: int, media_type: str = "application/json") -> Json:
    """What the document says of an answer, with the components that it refers to."""
    operations = document["paths"][path]
    operation = operations.get("post", operations.get("get"))
    content = operation["responses"][str(status)]["content"][media_type]
    if "itemSchema" not in content:
        return {**content["schema"], "components": document["components"]}
    data = content["itemSchema"]["properties"]["data"]
    [payload] = [kind for kind in data.get("anyOf", [data]) if "contentSchema" in kind]
    return {**payload["contentSchema"], "components": document["components"]}


def validate(told: Any, schema: Json) -> None:
    """Without checking the schema itself, which has all components each time."""
    jsonschema.Draft202012Validator(schema).validate(told)


def last_data_of(document: Json, path: str) -> list[str]:
    """What the last event of a stream may say in place of JSON."""
    content = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    return [kind["const"] for kind in content["itemSchema"]["properties"]["data"].get("anyOf", []) if "const" in kind]


async def test_answers_and_events_are_as_it_says(template: str) -> None:
    async with answering_site(template) as it:
        document = (await it.http.get("/openapi.json")).json()

        async def check(path: str, body: Json | None, status: int = 200) -> None:
            answer = await (it.http.get(path) if body is None else it.http.post(path, json=body))
            assert status == answer.status_code, answer.text
            known = "/v1/models/{name}" if path.startswith("/v1/models/") else path
            if not answer.headers["content-type"].startswith("text/event-stream"):
                validate(answer.json(), schema_of(document, known, status))
                return
            schema = schema_of(document, known, 200, "text/event-stream")
            text = answer.text
            for event in events_of(text):
                validate(event, schema)
            last = text.splitlines()[-2].removeprefix("data: ")
            assert last.startswith("{") or [last] == last_data_of(document, known)

        details = {"details": True, "top_n_tokens": 2, "max_new_tokens": 3}
        sampled = {**details, "best_of": 2, "do_sample": True, "decoder_input_details": True}
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        native = {"inputs": PROMPT, "parameters": details}
        for path in ("/", "/generate", "/invocations"):
            await check(path, native)
            await check(path, {"inputs": PROMPT, "parameters": sampled})
        for path in ("/", "/generate_stream", "/invocations"):
            await check(path, {**native, "stream": True})
        of_text = "/v1/completions"
        for path, body in (("/v1/chat/completions", CHAT), (of_text, {**COMPLETION, "n": 2, "echo": True})):
            for where in (path, "/invocations"):
                await check(where, body)
                await check(where, {**body, "stream": True})
                await check(where, {**body, **usage})
            scored = {**body, "logprobs": True, "top_logprobs": 2} if "chat" in path else {**body, "logprobs": 2}
            await check(path, scored)
            await check(path, {**scored, "stream": True})
            await check(path, {**body, "n": 0}, 400)
        for path, count, body in NEWER:
            await check(path, body)
            await check(path, {**body, "stream": True})
            await check(count, body)
            await check(path, {**body, "temperature": -1}, 400)
        told = {"input": PROMPT, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
        await check("/v1/responses", told)
        await check("/v1/responses", {**told, "stream": True})
        await check(of_text, {**COMPLETION, "logprobs": 2, "echo": True, "max_tokens": 0, "best_of": 2})
        for text in (
            {"inputs": PROMPT},
            {"prompt": PROMPT},
            {"content": PROMPT},
            {"content": PROMPT, "with_pieces": True},
        ):
            await check("/tokenize", text)
        await check("/tokenize", {"messages": CHAT["messages"], "return_token_strs": True})
        await check("/chat_tokenize", CHAT)
        await check("/detokenize", {"ids": [97]})
        await check("/detokenize", {"tokens": [97]})
        await check("/vertex", {"instances": [native, CHAT]})
        for path in ("/info", "/v1/models", "/v1/models/a/model"):
            await check(path, None)
        it.http.headers["anthropic-version"] = "2023-06-01"
        for path in ("/v1/models", "/v1/models/a/model"):
            await check(path, None)
        await check("/v1/models/other", None, 404)
        for path in ("/", "/generate", "/generate_stream", "/tokenize", "/chat_tokenize", "/detokenize", "/vertex"):
            await check(path, {}, 422)


@pytest.mark.parametrize("config", [{}, {"api_key": "k"}])
async def test_head_is_answered_wherever_get_is_and_405_names_what_is(config: Json) -> None:
    async with site(config=config) as it:
        headers = {"authorization": "Bearer k", "x-request-id": "mine"}
        for path in {route.path for route in it.app.routes if isinstance(route, APIRoute)}:
            path = path.replace("{name:path}", "a/model")
            methods = {m for r in it.app.routes if isinstance(r, APIRoute) and r.path == path for m in r.methods or ()}
            answer = await it.http.request("HEAD", path, headers=headers)
            if "POST" in methods and "GET" not in methods:
                assert_allows(answer.headers["allow"], "POST")
                assert 405 == answer.status_code
            else:
                assert (200, b"") == (answer.status_code, answer.content), path
            assert "mine" == answer.headers["x-request-id"]
        for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
            refused = await it.http.request(method, "/", headers=headers)
            assert_is_error(refused, 405, "method_not_allowed")
            assert_allows(refused.headers["allow"], "GET", "HEAD", "POST")
            assert_allows(
                (await it.http.request(method, "/v1/models/a/b", headers=headers)).headers["allow"], "GET", "HEAD"
            )


def assert_allows(header: str, *methods: str) -> None:
    assert set(methods) == set(header.split(", "))


async def test_preflights_pass_for_every_route_without_a_key() -> None:
    async with site(config={"api_key": "k", "cors_allow_origin": ("http://a",)}) as it:
        for route in it.app.routes:
            assert isinstance(route, APIRoute)
            for method in (route.methods or set()) - {"HEAD"}:
                asked = {"origin": "http://a", "access-control-request-method": method}
                asked["access-control-request-headers"] = "authorization, content-type, x-request-timeout-ms"
                path = route.path.replace("{name:path}", "a")
                answer = await it.http.options(path, headers={**asked, "x-request-id": "mine"})
                assert (200, "http://a") == (answer.status_code, answer.headers["access-control-allow-origin"])
                assert "mine" == answer.headers["x-request-id"]
                other = await it.http.options(path, headers={**asked, "origin": "http://b"})
                assert 400 == other.status_code and "access-control-allow-origin" not in other.headers
                assert "Disallowed CORS origin: allowed are origins of --cors-allow-origin" in other.json()["error"]
        answer = await it.http.post(
            "/generate", json={"inputs": PROMPT}, headers={"authorization": "Bearer k", "origin": "http://a"}
        )
        shown = set(answer.headers["access-control-expose-headers"].split(", "))
        others = {"retry-after", "request-id", ADAPTER_HEADER}
        assert {name for name in answer.headers if name.startswith("x-")} | others == shown
        refused = await it.http.post("/vertex", json={}, headers={"origin": "http://a"})
        assert (401, "http://a") == (refused.status_code, refused.headers["access-control-allow-origin"])
