"""OpenAI's routes over fake shards: shapes, stop sequences, several answers, usage, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.router.doubles import fake_shards, make_limits, standing
from tests.router.served import LIMITS, TEMPLATE, replying
from tests.router.site import PROMPT, answering_site, events_in, site

# Tools are shown where the template is tried alone: prompts are short here.
LAST = "{{ messages[-1]['content'] }}{{ tools | tojson if tools and 'zq' in messages[-1]['content'] }}"

CHAT = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
EDITED = "def area(width: float, height: float) -> float:\n    return width * height  # of a rectangle, in m2\n"
COMPLETION = {"prompt": PROMPT, "temperature": 0}


def chunks_of(text: str) -> list[dict[str, Any]]:
    """All chunks of a stream, which must end with [DONE]."""
    frames = [frame for frame in text.split("\n\n") if frame]
    assert frames.pop() == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"]["content"] if "delta" in choice else choice["text"] for choice in choices)


async def test_a_chat_is_answered_in_openai_s_shape(template: str) -> None:
    async with answering_site(template) as it:
        answer = await it.http.post("/v1/chat/completions", json={**CHAT, "model": "anything"})
        assert 200 == answer.status_code
        body = answer.json()
        assert body["id"].startswith("chatcmpl-") and body["created"] > 0
        assert ("chat.completion", "anything") == (body["object"], body["model"])
        expected = {"role": "assistant", "content": "one two"}
        assert [{"index": 0, "message": expected, "logprobs": None, "finish_reason": "stop"}] == body["choices"]
        usage = {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}
        details = {"completion_tokens_details": {"reasoning_tokens": 0}, "prompt_tokens_details": {"cached_tokens": 0}}
        assert {**usage, **details} == body["usage"]
        assert ("5", "8") == (answer.headers["x-prompt-tokens"], answer.headers["x-generated-tokens"])
        assert answer.headers["x-total-time"].isdigit() and answer.headers["x-compute-type"]


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
async def test_a_stream_has_the_text_of_the_whole_answer(template: str, path: str, body: dict[str, Any]) -> None:
    async with answering_site(template) as it:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        answer = await it.http.post(path, json={**body, **options})
        assert "text/event-stream" in answer.headers["content-type"]
        *chunks, last = chunks_of(answer.text)
        assert "one two" == text_of(chunks)
        assert 1 == len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in [*chunks, last]})
        assert ([None] * (len(chunks) - 1) + ["stop"]) == [c["choices"][0]["finish_reason"] for c in chunks]
        assert {None} == {chunk["usage"] for chunk in chunks}
        assert ([], 13) == (last["choices"], last["usage"]["total_tokens"])
        plain = chunks_of((await it.http.post(path, json={**body, "stream": True})).text)
        assert not any("usage" in chunk for chunk in plain)
        if path.endswith("chat/completions"):
            assert {"role": "assistant", "content": ""} == chunks[0]["choices"][0]["delta"]


@pytest.mark.parametrize("stop", ["e t", ["x", "e tw", "e two!"]])
async def test_a_stop_sequence_is_not_part_of_the_text(template: str, stop: str | list[str]) -> None:
    async with answering_site(template) as it:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
            asked = {**body, "stop": stop}
            [choice] = (await it.http.post(path, json=asked)).json()["choices"]
            assert ("on", "stop") == (
                choice.get("text", choice.get("message", {}).get("content")),
                choice["finish_reason"],
            )
            chunks = chunks_of((await it.http.post(path, json={**asked, "stream": True})).text)
            assert ("on", "stop") == (text_of(chunks), chunks[-1]["choices"][0]["finish_reason"])


async def test_the_beginning_of_a_stop_sequence_that_does_not_come_is_shown_at_the_end(template: str) -> None:
    async with answering_site(template) as it:
        asked = {**CHAT, "stop": "two!", "stream": True}
        assert "one two" == text_of(chunks_of((await it.http.post("/v1/chat/completions", json=asked)).text))
        asked |= {"max_tokens": 5}
        chunks = chunks_of((await it.http.post("/v1/chat/completions", json=asked)).text)
        assert ("one t", "length") == (text_of(chunks), chunks[-1]["choices"][0]["finish_reason"])


async def test_several_answers_and_several_prompts_are_told_apart_by_their_index(template: str) -> None:
    async with answering_site(template) as it:
        asked: dict[str, Any] = {"prompt": [PROMPT, PROMPT], "n": 2, "temperature": 0}
        body = (await it.http.post("/v1/completions", json=asked)).json()
        assert [(n, "one two") for n in range(4)] == [(choice["index"], choice["text"]) for choice in body["choices"]]
        assert (10, 32) == (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"])
        chunks = chunks_of((await it.http.post("/v1/completions", json={**asked, "stream": True})).text)
        assert ["one two"] * 4 == [text_of(chunks, index) for index in range(4)]
        assert 4 == sum(chunk["choices"][0]["finish_reason"] == "stop" for chunk in chunks)


async def test_prompts_may_be_token_ids_and_are_echoed(template: str) -> None:
    async with answering_site(template) as it:
        ids = list(PROMPT.encode())
        for prompt, count in ((ids, 1), ([ids], 1), ([ids, ids], 2)):
            body = (await it.http.post("/v1/completions", json={**COMPLETION, "prompt": prompt, "echo": True})).json()
            assert [f"{PROMPT}one two"] * count == [choice["text"] for choice in body["choices"]]
        asked = {**COMPLETION, "echo": True, "stream": True}
        assert f"{PROMPT}one two" == text_of(chunks_of((await it.http.post("/v1/completions", json=asked)).text))


async def test_the_parts_of_a_message_are_one_text_and_the_last_may_be_continued(template: str) -> None:
    async with answering_site(template) as it:
        parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
        asked = {**CHAT, "messages": [{"role": "user", "content": parts}]}
        body = (await it.http.post("/v1/chat/completions", json=asked)).json()
        assert "one two" == body["choices"][0]["message"]["content"]
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "hello"}]
        asked = {**CHAT, "messages": messages, "continue_final_message": True}
        body = (await it.http.post("/v1/chat/completions", json=asked)).json()
        assert "one two" == body["choices"][0]["message"]["content"]


async def test_neutral_values_and_unknown_fields_are_no_reason_to_refuse(template: str) -> None:
    async with answering_site(template) as it:
        neutral = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "logit_bias": {}, "x": 1}
        neutral |= {"presence_penalty": 0.0, "logprobs": False, "user": "me", "stop": None, "n": None, "top_p": 1}
        assert 200 == (await it.http.post("/v1/chat/completions", json={**CHAT, **neutral})).status_code


@pytest.mark.parametrize("changes", [{}, {"logprobs": True}, {"tools": [TOOL]}], ids=str)
async def test_tgi_s_own_client_gets_the_chunks_that_it_reads(template: str, changes: dict[str, Any]) -> None:
    unset = "repetition_penalty frequency_penalty logit_bias logprobs top_logprobs n presence_penalty tools tool_choice"
    body = {**CHAT, **dict.fromkeys(unset.split()), "model": "tgi", "stream": True, **changes}
    Path(template).write_text(
        "{{ messages[-1]['content'] }}{{ tools | tojson if tools and 'zq' in messages[-1]['content'] }}"
    )
    called = '<tool_call>{"name": "look_up", "arguments": {"n": 1}}</tool_call>'
    hermes = {"tool_call_parser": "hermes"} if changes.get("tools") else {}
    async with answering_site(template, answer=called if changes.get("tools") else "one two", **hermes) as it:
        text = (await it.http.post("/v1/chat/completions", json=body)).text
        chunks = events_in(text)  # all of them JSON
        assert {"assistant"} == {chunk["choices"][0]["delta"]["role"] for chunk in chunks}
        if changes.get("tools"):
            calls = [call for chunk in chunks if (call := chunk["choices"][0]["delta"]["tool_calls"])]
            assert "look_up" == calls[0]["function"]["name"]
            assert all(call.keys() >= {"id", "type", "index", "function"} for call in calls)
            assert {"n": 1} == json.loads("".join(call["function"]["arguments"] for call in calls))
        else:
            assert {None} == {chunk["choices"][0]["delta"]["tool_calls"] for chunk in chunks}
            assert "one two" == text_of(chunks)
        other = (await it.http.post("/v1/chat/completions", json={**body, "model": "other"})).text
        assert other.endswith("data: [DONE]\n\n")


async def test_models_are_listed_and_found_by_name(template: str) -> None:
    async with answering_site(template) as it:
        listed = (await it.http.get("/v1/models")).json()
        assert ("list", [("model", "a/model")]) == (
            listed["object"],
            [(model["object"], model["id"]) for model in listed["data"]],
        )
        assert listed["data"][0] == (await it.http.get("/v1/models/a/model")).json()
        missing = await it.http.get("/v1/models/other")
        assert (404, "not_found") == (missing.status_code, missing.json()["error_type"])
        theirs = (await it.http.get("/v1/models/other", headers={"anthropic-version": "2023-06-01"})).json()
        assert ("error", "not_found_error") == (theirs["type"], theirs["error"]["type"])
        batches = await it.http.post("/v1/messages/batches", json={})
        assert (404, True) == (batches.status_code, "`lockstep batch" in batches.json()["error"]["message"])
        others = await it.http.get("/v1/filesystem")
        assert "Not Found: GET /openapi.json lists all routes" == others.json()["error"]["message"]
        nowhere, wrong = await it.http.get("/v1/nothing"), await it.http.get("/v1/completions")
        assert (404, "Not Found: GET /openapi.json lists all routes") == (
            nowhere.status_code,
            nowhere.json()["error"]["message"],
        )
        assert (405, "Method Not Allowed: send POST") == (wrong.status_code, wrong.json()["error"]["message"])


async def test_a_key_that_is_missing_is_refused_in_openai_s_shape(template: str) -> None:
    async with answering_site(template, api_key="secret") as it:
        refused = await it.http.post("/v1/completions", json=COMPLETION)
        assert (401, "invalid_api_key") == (refused.status_code, refused.json()["error"]["code"])
        allowed = await it.http.post("/v1/completions", json=COMPLETION, headers={"authorization": "Bearer secret"})
        assert 200 == allowed.status_code


async def test_the_same_seed_gives_the_same_answers(template: str) -> None:
    async with answering_site(template) as it:
        asked = {**CHAT, "temperature": 1, "seed": 7, "n": 3}
        for _ in range(2):
            await it.http.post("/v1/chat/completions", json=asked)
        seeds = [new.sampling.seed for step in it.shards.requests for new in step.add]
        assert [7, 8, 9] * 2 == seeds
        assert all(new.sampling.do_sample for step in it.shards.requests for new in step.add)


@pytest.mark.parametrize("content", [EDITED, [{"type": "text", "text": part} for part in (EDITED[:60], EDITED[60:])]])
async def test_an_answer_that_was_predicted_comes_in_fewer_steps(tmp_path: Path, content: Any) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    config = {"chat_template": str(tmp_path / "template.jinja"), "reasoning_parser": "none"}
    shards = fake_shards(make_limits(**LIMITS), **replying(lambda _: EDITED), step_delay_s=0.01)
    async with site(shards, config=config, clock=standing, **LIMITS, speculate=8) as it:
        it.http.timeout = 60  # the first chat waits for a process
        num_steps = []
        for more in ({"speculate": 0}, {"prediction": {"type": "content", "content": content}}):
            before = len(shards.requests)
            answer = await it.http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 200, **more})
            assert EDITED == answer.json()["choices"][0]["message"]["content"]
            num_steps.append(len(shards.requests) - before)
        assert answer.json()["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 20
        assert num_steps[1] < num_steps[0] * 3 / 4
        other = {"type": "image", "content": "x"}
        refused = await it.http.post("/v1/chat/completions", json={**CHAT, "prediction": other})
        assert 400 == refused.status_code


async def test_a_model_may_have_any_name_in_a_stream(template: str) -> None:
    """Also that of the mark in whose place a chunk's text is put."""
    async with answering_site(template) as it:
        for path, asked in (
            ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("completions", {}),
        ):
            body = {"prompt": PROMPT, "max_tokens": 8, **asked, "model": "\0", "stream": True}
            answer = await it.http.post(f"/v1/{path}", json=body)
            assert 200 == answer.status_code and '"model":"\\u0000"' in answer.text
            assert answer.text.endswith("[DONE]\n\n")
