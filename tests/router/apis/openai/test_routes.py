"""OpenAI's routes over fake shards: shapes, stop sequences, several answers, usage, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.router.doubles import fake_shards, make_limits
from tests.router.site import PROMPT, Site, answering, events_in, site

CHAT = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
COMPLETION = {"prompt": PROMPT, "temperature": 0}


def told(
    template: str,
    story: Callable[[Site], Awaitable[None]],
    answer: str = "one two",
    limits: Mapping[str, int] | None = None,
    **config: Any,
) -> None:
    async def whole() -> None:
        shards = fake_shards(make_limits(), **answering(answer))
        async with site(shards, config={"chat_template": template, **config}, **(limits or {})) as it:
            it.http.timeout = 60  # the first chat waits for a process
            await story(it)
            await it.all_free()

    asyncio.run(whole())


def chunks_of(text: str) -> list[dict[str, Any]]:
    """All chunks of a stream, which must end with [DONE]."""
    frames = [frame for frame in text.split("\n\n") if frame]
    assert frames.pop() == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"]["content"] if "delta" in choice else choice["text"] for choice in choices)


def test_a_chat_is_answered_in_openai_s_shape(template: str) -> None:
    async def story(it: Site) -> None:
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

    told(template, story)


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
def test_a_stream_has_the_text_of_the_whole_answer(template: str, path: str, body: dict[str, Any]) -> None:
    async def story(it: Site) -> None:
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

    told(template, story)


@pytest.mark.parametrize("stop", ["e t", ["x", "e tw", "e two!"]])
def test_a_stop_sequence_is_not_part_of_the_text(template: str, stop: str | list[str]) -> None:
    async def story(it: Site) -> None:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
            asked = {**body, "stop": stop}
            [choice] = (await it.http.post(path, json=asked)).json()["choices"]
            assert ("on", "stop") == (
                choice.get("text", choice.get("message", {}).get("content")),
                choice["finish_reason"],
            )
            chunks = chunks_of((await it.http.post(path, json={**asked, "stream": True})).text)
            assert ("on", "stop") == (text_of(chunks), chunks[-1]["choices"][0]["finish_reason"])

    told(template, story)


def test_the_beginning_of_a_stop_sequence_that_does_not_come_is_shown_at_the_end(template: str) -> None:
    async def story(it: Site) -> None:
        asked = {**CHAT, "stop": "two!", "stream": True}
        assert "one two" == text_of(chunks_of((await it.http.post("/v1/chat/completions", json=asked)).text))
        asked |= {"max_tokens": 5}
        chunks = chunks_of((await it.http.post("/v1/chat/completions", json=asked)).text)
        assert ("one t", "length") == (text_of(chunks), chunks[-1]["choices"][0]["finish_reason"])

    told(template, story)


def test_several_answers_and_several_prompts_are_told_apart_by_their_index(template: str) -> None:
    async def story(it: Site) -> None:
        asked: dict[str, Any] = {"prompt": [PROMPT, PROMPT], "n": 2, "temperature": 0}
        body = (await it.http.post("/v1/completions", json=asked)).json()
        assert [(n, "one two") for n in range(4)] == [(choice["index"], choice["text"]) for choice in body["choices"]]
        assert (10, 32) == (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"])
        chunks = chunks_of((await it.http.post("/v1/completions", json={**asked, "stream": True})).text)
        assert ["one two"] * 4 == [text_of(chunks, index) for index in range(4)]
        assert 4 == sum(chunk["choices"][0]["finish_reason"] == "stop" for chunk in chunks)

    told(template, story)


def test_prompts_may_be_token_ids_and_are_echoed(template: str) -> None:
    async def story(it: Site) -> None:
        ids = list(PROMPT.encode())
        for prompt, count in ((ids, 1), ([ids], 1), ([ids, ids], 2)):
            body = (await it.http.post("/v1/completions", json={**COMPLETION, "prompt": prompt, "echo": True})).json()
            assert [f"{PROMPT}one two"] * count == [choice["text"] for choice in body["choices"]]
        asked = {**COMPLETION, "echo": True, "stream": True}
        assert f"{PROMPT}one two" == text_of(chunks_of((await it.http.post("/v1/completions", json=asked)).text))

    told(template, story)


def test_the_parts_of_a_message_are_one_text_and_the_last_may_be_continued(template: str) -> None:
    async def story(it: Site) -> None:
        parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
        asked = {**CHAT, "messages": [{"role": "user", "content": parts}]}
        body = (await it.http.post("/v1/chat/completions", json=asked)).json()
        assert "one two" == body["choices"][0]["message"]["content"]
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "hello"}]
        asked = {**CHAT, "messages": messages, "continue_final_message": True}
        body = (await it.http.post("/v1/chat/completions", json=asked)).json()
        assert "one two" == body["choices"][0]["message"]["content"]

    told(template, story)


@pytest.mark.parametrize(
    ("path", "changes", "sentence"),
    [
        ("/v1/chat/completions", {"messages": []}, "`messages` is empty"),
        ("/v1/chat/completions", {"messages": None}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ("/v1/chat/completions", {"max_tokens": 0}, "`max_tokens` must be strictly positive"),
        ("/v1/chat/completions", {"max_tokens": 1000}, "prompt tokens + `max_tokens` must be <= 128"),
        ("/v1/chat/completions", {"temperature": -1}, "`temperature` must be strictly positive"),
        ("/v1/chat/completions", {"n": 17}, "`n` must be > 0 and <= 16. Given: 17"),
        ("/v1/chat/completions", {"model": "x" * 257}, "`model`: string should have at most 256 characters"),
        ("/v1/chat/completions", {"response_format": {"type": "xml"}}, "`response_format.type` must be one of text,"),
        ("/v1/completions", {"response_format": {"type": "json_schema"}}, "must have a `schema`, an object"),
        ("/v1/completions", {"response_format": {"type": "regex"}}, "`response_format.value` is missing"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"messages": 1}}, "not the template's own"),
        ("/v1/chat/completions", {"continue_final_message": True}, "last message of the role assistant"),
        ("/v1/completions", {"prompt": []}, "`prompt` has 0 prompts"),
        ("/v1/completions", {"prompt": ["a"] * 5}, "`prompt` has 5 prompts: give 1 to 4"),
        ("/v1/completions", {"prompt": [999]}, "has token 999"),
        ("/v1/completions", {"prompt": [2**32 - 1], "echo": True}, "has token 4294967295"),
        ("/v1/completions", {"prompt": [2**32 - 1], "echo": True, "stream": True}, "has token 4294967295"),
        ("/v1/completions", {"prompt": [-1]}, "prompt"),
        ("/v1/completions", {"suffix": "x"}, "`suffix` is not served"),
    ],
)
def test_what_is_wrong_is_400_in_openai_s_shape(
    template: str, path: str, changes: dict[str, Any], sentence: str
) -> None:
    async def story(it: Site) -> None:
        for stream in (False, True):
            body = {**(CHAT if "chat" in path else COMPLETION), **changes, "stream": stream}
            answer = await it.http.post(path, json=body)
            assert 400 == answer.status_code
            told = answer.json()
            assert ("invalid_request_error", "validation") == (told["error"]["type"], told["error_type"])
            assert sentence in told["error"]["message"] and "`truncate`" not in told["error"]["message"]
            is_long = "<= 128" in sentence
            assert told["error"]["code"] == ("context_length_exceeded" if is_long else None)

    told(template, story, max_client_batch_size=4)


def test_a_context_that_is_too_long_is_told_in_the_words_that_clients_look_for(template: str) -> None:
    async def story(it: Site) -> None:
        for path, long, words in (
            (
                "/v1/completions",
                {"prompt": "a" * 20, "max_tokens": 200},
                "However, you requested 220 tokens (20 in the",
            ),
            ("/v1/completions", {"prompt": "a" * 100}, "of which a prompt may have 64. However, your prompt has 100"),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "a" * 100}]},
                "However, your prompt has",
            ),
            ("/v1/responses", {"input": "a" * 100}, "However, your prompt has"),
        ):
            error = (await it.http.post(path, json=long)).json()["error"]
            assert error["message"].startswith("This model's maximum context length is 128 tokens")
            assert words in error["message"] and "context_length_exceeded" == error["code"]
        error = (await it.http.post("/generate", json={"inputs": "a" * 100})).json()["error"]
        assert error.startswith("Input validation error: `inputs` must have less than 65 tokens. Given: 100")

    told(template, story)


def test_neutral_values_and_unknown_fields_are_no_reason_to_refuse(template: str) -> None:
    async def story(it: Site) -> None:
        neutral = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "logit_bias": {}, "x": 1}
        neutral |= {"presence_penalty": 0.0, "logprobs": False, "user": "me", "stop": None, "n": None, "top_p": 1}
        assert 200 == (await it.http.post("/v1/chat/completions", json={**CHAT, **neutral})).status_code

    told(template, story)


def test_parameters_reach_the_shards(template: str) -> None:
    async def story(it: Site) -> None:
        asked = {
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "logit_bias": {"65": -1},
            "min_p": 0.25,
            "top_k": 9,
        }
        await it.http.post("/v1/chat/completions", json={**CHAT, **asked, "temperature": 0.5, "top_p": 0.75})
        await it.http.post("/v1/chat/completions", json={**CHAT, **asked, "ignore_eos": True, "max_tokens": 20})
        drawn, greedy = (new.sampling for step in it.shards.requests for new in step.add)
        assert (True, 0.5, 0.75, 9, 0.25) == (drawn.do_sample, drawn.temperature, drawn.top_p, drawn.top_k, drawn.min_p)
        for sampling in (drawn, greedy):
            assert (0.5, -0.5) == (sampling.presence_penalty, sampling.frequency_penalty)
            assert [65] == [*sampling.bias_ids]
        assert (False, 0, 1.0) == (greedy.do_sample, greedy.top_k, greedy.top_p)

    told(template, story)


@pytest.mark.parametrize("changes", [{}, {"logprobs": True}, {"tools": [TOOL]}], ids=str)
def test_tgi_s_own_client_gets_the_chunks_that_it_reads(template: str, changes: dict[str, Any]) -> None:
    unset = "repetition_penalty frequency_penalty logit_bias logprobs top_logprobs n presence_penalty tools tool_choice"
    body = {**CHAT, **dict.fromkeys(unset.split()), "model": "tgi", "stream": True, **changes}
    Path(template).write_text("{{ messages[-1]['content'] }}{% if tools %}{% endif %}")

    async def story(it: Site) -> None:
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

    called = '<tool_call>{"name": "look_up", "arguments": {"n": 1}}</tool_call>'
    hermes = {"tool_call_parser": "hermes"} if changes.get("tools") else {}
    told(template, story, answer=called if changes.get("tools") else "one two", **hermes)


@pytest.mark.aside
@pytest.mark.parametrize("config", [{"request_timeout": 0.3}, {}])
def test_a_chat_whose_prompt_is_being_made_has_its_permit_and_its_deadline(
    template: str, config: dict[str, float]
) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    Path(template).write_text(f"{{% if messages[0].content == 'endless' %}}{endless}{{% endif %}}")

    async def story(it: Site) -> None:
        body = {"messages": [{"role": "user", "content": "endless"}]}
        waiting = asyncio.ensure_future(it.http.post("/v1/chat/completions", json=body))
        while not it.metrics.request_count._value.get():
            await asyncio.sleep(0.001)
        refused = await it.http.post("/v1/chat/completions", json=body)
        assert (429, "overloaded") == (refused.status_code, refused.json()["error_type"])
        answer = await waiting
        assert (504 if config else 400) == answer.status_code
        label = "timeout" if config else "validation"
        assert f'tgi_request_failure{{err="{label}"}} 1.0' in (await it.http.get("/metrics")).text

    told(template, story, limits={"max_concurrent_requests": 1}, **config)


def test_models_are_listed_and_found_by_name(template: str) -> None:
    async def story(it: Site) -> None:
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

    told(template, story)


def test_a_key_that_is_missing_is_refused_in_openai_s_shape(template: str) -> None:
    async def story(it: Site) -> None:
        refused = await it.http.post("/v1/completions", json=COMPLETION)
        assert (401, "invalid_api_key") == (refused.status_code, refused.json()["error"]["code"])
        allowed = await it.http.post("/v1/completions", json=COMPLETION, headers={"authorization": "Bearer secret"})
        assert 200 == allowed.status_code

    told(template, story, api_key="secret")


async def test_an_error_after_the_first_token_is_an_event_with_done_behind_it(template: str) -> None:
    shards = fake_shards(make_limits(), deaths={3}, **answering("one two"))
    async with site(shards, config={"chat_template": template}) as it:
        answer = await it.http.post("/v1/completions", json={**COMPLETION, "stream": True})
        chunks = chunks_of(answer.text)
        assert "one"[: len(text_of(chunks[:-1]))] == text_of(chunks[:-1])
        assert ("server_error", "generation") == (chunks[-1]["error"]["type"], chunks[-1]["error_type"])


def test_the_same_seed_gives_the_same_answers(template: str) -> None:
    async def story(it: Site) -> None:
        asked = {**CHAT, "temperature": 1, "seed": 7, "n": 3}
        for _ in range(2):
            await it.http.post("/v1/chat/completions", json=asked)
        seeds = [new.sampling.seed for step in it.shards.requests for new in step.add]
        assert [7, 8, 9] * 2 == seeds
        assert all(new.sampling.do_sample for step in it.shards.requests for new in step.add)

    told(template, story)
