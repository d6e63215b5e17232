"""SageMaker's `/invocations` and Vertex AI's `/vertex`: the shapes of others, answered by the same routes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.apis.openai.test_routes import CHAT, COMPLETION, chunks_of, text_of
from tests.router.site import PROMPT, answering_site, assert_is_error, events_in

GENERATE = {"inputs": PROMPT}


async def test_invocations_answers_each_body_as_its_own_route_does(template: str) -> None:
    async with answering_site(template) as it:

        async def post(**body: Any) -> Any:
            answer = await it.http.post("/invocations", json=body)
            assert 200 == answer.status_code, answer.text
            return answer

        plain = await post(**GENERATE)
        assert [{"generated_text": "one two"}] == plain.json()
        assert "5" == plain.headers["x-prompt-tokens"] and plain.headers["x-compute-type"]
        assert "one two" == events_in((await post(**GENERATE, stream=True)).text)[-1]["generated_text"]
        chat = (await post(**CHAT)).json()
        assert ("chat.completion", "one two") == (chat["object"], chat["choices"][0]["message"]["content"])
        assert "one two" == text_of(chunks_of((await post(**CHAT, stream=True)).text))
        completion = (await post(**COMPLETION)).json()
        assert ("text_completion", "one two") == (completion["object"], completion["choices"][0]["text"])
        both = await post(**GENERATE, messages=[], prompt="x")
        assert [{"generated_text": "one two"}] == both.json()


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "invalid JSON: EOF"),
        (b"[" * 2000, 422, "the body is nested more than 128 levels deep: flatten it"),
        (b"[]", 422, "input should be an object"),
        (b"{}", 422, "none of `inputs`, `messages` and `prompt`: give one of them"),
        (b'{"foo": 1}', 422, "none of `inputs`, `messages` and `prompt`: give one of them"),
        (b'{"messages": 1}', 422, "`messages`: input should be a valid"),
        (b'{"prompt": {}}', 422, "`prompt"),
    ],
)
async def test_invocations_refuses_what_is_none_of_them(template: str, body: bytes, status: int, words: str) -> None:
    async with answering_site(template) as it:
        answer = await it.http.post("/invocations", content=body, headers={"content-type": "application/json"})
        assert_is_error(answer, status, "validation")
        assert words in answer.json()["error"]


async def test_a_key_s_request_is_counted_once(template: str) -> None:
    async with answering_site(template, api_key="k") as it:
        headers = {"authorization": "Bearer k"}
        assert 401 == (await it.http.post("/invocations", json=CHAT)).status_code
        assert 200 == (await it.http.post("/invocations", json=CHAT, headers=headers)).status_code
        metrics = (await it.http.get("/metrics", headers=headers)).text
        assert 'tgi_key_request_count{key="default"} 1.0' in metrics


async def test_vertex_answers_a_text_for_each_instance(template: str) -> None:
    async with answering_site(template) as it:
        short = {"inputs": PROMPT, "parameters": {"max_new_tokens": 3, "return_full_text": True}}
        best = {"inputs": PROMPT, "parameters": {"best_of": 2, "do_sample": True, "max_new_tokens": 2}}
        answer = await it.http.post("/vertex", json={"instances": [GENERATE, best, short, {**CHAT, "max_tokens": 5}]})
        assert 200 == answer.status_code, answer.text
        assert {"predictions": ["one two", "on", "helloone", "one t"]} == answer.json()
        assert ("20", "18", "15") == tuple(
            answer.headers[f"x-{name}"] for name in ("prompt-tokens", "generated-tokens", "compute-characters")
        )
        assert answer.headers["x-total-time"].isdigit() and answer.headers["x-compute-type"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"instances": []}, "`instances` has 0 instances: give 1 to 4 (max_client_batch_size)"),
        ({"instances": [GENERATE] * 5}, "`instances` has 5 instances"),
        ({"instances": [GENERATE, {"inputs": 3}]}, "`instances.1.inputs`: input should be a valid string"),
        ({"instances": [{}]}, "`instances.0.inputs`: field required"),
        ({"instances": [3]}, "`instances.0`: "),
        ({"instances": [{**GENERATE, "stream": True}]}, "`instances.0.stream` is true"),
        ({"instances": [{**CHAT, "n": 2}]}, "`instances.0.n` is 2"),
        ({"instances": [{**CHAT, "logprobs": True}]}, "`instances.0.logprobs` is not served on /vertex"),
        ({"instances": [GENERATE, {**GENERATE, "parameters": {"top_p": 3.0}}]}, "`top_p`"),
        ({"instances": [{**CHAT, "tools": [{"type": "function"}]}]}, "`tools`"),
        ({}, "`instances`"),
    ],
)
async def test_vertex_refuses_with_the_place(template: str, body: dict[str, Any], words: str) -> None:
    async with answering_site(template) as it:
        answer = await it.http.post("/vertex", json=body)
        assert_is_error(answer, 422, "validation")
        assert words in answer.json()["error"]


async def test_vertex_takes_a_permit_for_each_instance(template: str) -> None:
    async with answering_site(template, limits={"max_concurrent_requests": 1}) as it:
        assert_is_error(await it.http.post("/vertex", json={"instances": [GENERATE] * 2}), 429, "overloaded")
        assert 200 == (await it.http.post("/vertex", json={"instances": [GENERATE]})).status_code
