"""Anthropic's routes over fake shards: shapes, events, stop reasons, counts, what is refused, keys, errors."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.router.apis.openai.test_routes import told
from tests.router.doubles import fake_shards, make_limits
from tests.router.served import Served, served
from tests.router.site import PROMPT, Site, answering, site

URL = "/v1/messages"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 20}
TELLING = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages | tojson }}"
    "{{ enable_thinking | default('') }}{{ add_generation_prompt }}\x01"
)
PLAIN = "{{ messages[-1]['content'] }}\x01"


def one_two(_: str) -> str:
    return "one two"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Its prompt is the last message alone."""
    with served(tmp_path_factory.mktemp("plain"), one_two, PLAIN) as it:
        yield it


@pytest.fixture(scope="module")
def telling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Its prompt shows all messages."""
    with served(tmp_path_factory.mktemp("telling"), one_two, TELLING) as it:
        yield it


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Wants a key, lets pages of one origin in, and takes short bodies alone."""
    settings: dict[str, Any] = {"api_key": "secret", "cors_allow_origin": ("https://a.page",), "payload_limit": 2000}
    with served(tmp_path_factory.mktemp("guarded"), one_two, PLAIN, **settings) as it:
        yield it


def template_in(folder: Path, text: str = "{{ messages[-1]['content'] }}") -> str:
    path = folder / "template.jinja"
    path.write_text(text)
    return str(path)


def events_of(text: str) -> list[dict[str, Any]]:
    """All events of a stream, each of which must be named after its type."""
    found = []
    for frame in text.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")


def test_a_message_is_answered_in_anthropic_s_shape(plain: Served) -> None:
    answer = plain.http.post(URL, json={**BODY, "model": "any/name", "metadata": {"user_id": "me"}})
    assert 200 == answer.status_code
    body = answer.json()
    assert body.pop("id") == f"msg_{answer.headers['request-id']}"
    counts = {"input_tokens": 6, "output_tokens": 8}
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "any/name",
        "content": [{"type": "text", "text": "one two"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {**counts, **cached},
    }


def test_a_stream_has_the_events_of_the_whole_answer(plain: Served) -> None:
    answer = plain.http.post(URL, json={**BODY, "stream": True})
    assert "text/event-stream" in answer.headers["content-type"]
    events = events_of(answer.text)
    kinds = [event["type"] for event in events if event["type"] != "content_block_delta"]
    ends = ["content_block_stop", "message_delta", "message_stop"]
    assert ["message_start", "content_block_start", *ends] == kinds
    assert "one two" == text_of(events)
    whole = plain.http.post(URL, json=BODY).json()
    begun = events[0]["message"]
    assert ([], None, 0) == (begun["content"], begun["stop_reason"], begun["usage"]["output_tokens"])
    assert (whole["usage"]["input_tokens"], "assistant") == (begun["usage"]["input_tokens"], begun["role"])
    assert {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}} == events[1]
    last = events[-2]
    assert {"stop_reason": "end_turn", "stop_sequence": None} == last["delta"]
    assert whole["usage"] == last["usage"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("one two", "end_turn", None)),
        ({"max_tokens": 5}, ("one t", "max_tokens", None)),
        ({"stop_sequences": ["e t", "zzz"]}, ("on", "stop_sequence", "e t")),
        ({"stop_sequences": ["two!"], "max_tokens": 5}, ("one t", "max_tokens", None)),
        ({"stop_sequences": ["one"]}, ("", "stop_sequence", "one")),
    ],
)
def test_why_an_answer_ended_is_told(
    plain: Served, changes: dict[str, Any], expected: tuple[str, str, str | None]
) -> None:
    body = plain.http.post(URL, json={**BODY, **changes}).json()
    [block] = body["content"]
    assert expected == (block["text"], body["stop_reason"], body["stop_sequence"])
    events = events_of(plain.http.post(URL, json={**BODY, **changes, "stream": True}).text)
    assert expected == (text_of(events), *events[-2]["delta"].values())
    assert ["content_block_start", "content_block_stop"] == [
        event["type"] for event in events if event["type"].startswith("content_block_s")
    ]


def test_messages_and_blocks_become_what_templates_take(telling: Served) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"place": "Ulm"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]}
    failed = {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such place", "is_error": True}
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "citations": None}]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "d"}, {"type": "text", "text": "e"}, call]},
        {"role": "user", "content": [result, failed, {"type": "text", "text": "f"}]},
    ]
    cached = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    function = {"name": "weather", "arguments": {"place": "Ulm"}}
    expected = [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "a\nb\nc"},
        {
            "role": "assistant",
            "content": "de",
            "reasoning_content": "hm",
            "thinking": "hm",  # the name that some templates have for it, which transformers adds
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "toolu_1", "name": "weather"},
        {"role": "tool", "content": "Error: no such place", "tool_call_id": "toolu_2"},
        {"role": "user", "content": "f"},
    ]

    system = [cached, {"type": "text", "text": "Be kind."}]
    body = {"messages": messages, "system": system, "thinking": {"type": "enabled", "budget_tokens": 2048}}
    assert 200 == telling.http.post(URL, json=body).status_code
    shown, end, variables = telling.prompt.rpartition("]")
    assert expected == json.loads(shown + end)
    assert "TrueTrue" == variables
    body = {"messages": messages[:1], "thinking": {"type": "disabled"}, "system": None}
    assert 200 == telling.http.post(URL, json=body).status_code
    assert '[{"role": "user", "content": "a\\nb"}]FalseTrue' == telling.prompt


def test_a_last_message_of_the_assistant_is_continued(plain: Served) -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROMPT}]
    body = plain.http.post(URL, json={**BODY, "messages": messages}).json()
    assert (PROMPT, [{"type": "text", "text": ""}], 1) == (
        plain.prompt,
        body["content"],
        body["usage"]["output_tokens"],
    )


def test_tokens_are_counted_without_generating(plain: Served) -> None:
    num_steps = len(plain.site.shards.requests)
    for text in (PROMPT, "x" * 60, "y" * 5000):  # the last is longer than what fits
        body = {"messages": [{"role": "user", "content": text}], "model": "m", "tools": []}
        answer = plain.http.post(f"{URL}/count_tokens", json=body)
        assert (200, {"input_tokens": len(text) + 1}) == (answer.status_code, answer.json())
    refused = plain.http.post(f"{URL}/count_tokens", json={"messages": []})
    assert (400, "invalid_request_error") == (refused.status_code, refused.json()["error"]["type"])
    assert num_steps == len(plain.site.shards.requests)


def test_a_count_holds_a_permit_and_keeps_its_deadline(tmp_path: Path) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = template_in(tmp_path, f"{{% if messages[0].content == 'endless' %}}{endless}{{% endif %}}")

    async def story(it: Site) -> None:
        body = {"messages": [{"role": "user", "content": "endless"}]}
        waiting = asyncio.ensure_future(it.http.post(f"{URL}/count_tokens", json=body))
        while it.app.state.services.permits._left:
            await asyncio.sleep(0.001)
        refused = await it.http.post(f"{URL}/count_tokens", json=body)
        assert (429, "rate_limit_error") == (refused.status_code, refused.json()["error"]["type"])
        waiting.cancel()
        while not it.app.state.services.permits._left:
            await asyncio.sleep(0.001)
        late = await it.http.post(f"{URL}/count_tokens", json=body, headers={"x-request-timeout-ms": "300"})
        assert (504, "timeout_error", "timeout") == (
            late.status_code,
            late.json()["error"]["type"],
            late.json()["error_type"],
        )
        assert 1 == it.app.state.services.permits._left

    told(template, story, limits={"max_concurrent_requests": 1})


def blocks(role: str, *found: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "?"}, {"role": role, "content": [*found]}]}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"messages": []}, "no message of the user: give at least one"),
        ({"messages": None}, "messages"),
        ({"messages": [], "system": "x"}, "no message of the user"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "`messages.0.role` is boss: give one of user, assistant"),
        (
            blocks("user", {"type": "image", "source": {}}),
            "`messages.1.content.0` is of type image: of the role user, the",
        ),
        (blocks("user", {"type": "document", "source": {}}), "is of type document"),
        (blocks("user", {"type": "tool_use", "id": "1", "name": "f", "input": {}}), "is of type tool_use"),
        (blocks("assistant", {"type": "tool_result", "tool_use_id": "1"}), "is of type tool_result"),
        (blocks("assistant", {"type": "server_tool_use", "id": "1"}), "is of type server_tool_use"),
        (blocks("user", {"type": ["x"] * 50}), "text and tool_result alone"),
        (blocks("user", {"type": "text"}), "`messages.1.content.0.text` must be a string"),
        (blocks("assistant", {"type": "tool_use", "id": "1", "name": "f", "input": "x"}), "0.input` must be an object"),
        (blocks("user", {"type": "tool_result", "content": "x"}), "0.tool_use_id` must be a string"),
        (blocks("user", {"type": "tool_result", "tool_use_id": "1", "content": 5}), "0.content` must be a text or"),
        (
            blocks("user", {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}),
            "`messages.1.content.0.content.0` is of type image, and the model reads text alone",
        ),
        ({"system": [{"type": "image"}]}, "`system.0` is of type image"),
        ({"model": "x" * 257}, "`model`: string should have at most 256 characters"),
        ({"max_tokens": 0}, "`max_tokens` must be strictly positive"),
        ({"max_tokens": 4500}, "prompt tokens + `max_tokens` must be <= 4500"),
        ({"temperature": 1.5}, "`temperature` must be >= 0 and <= 1. Given: 1.5"),
        ({"temperature": -0.1}, "`temperature` must be >= 0 and <= 1. Given: -0.1"),
        ({"temperature": 1, "top_p": 1.5}, "`top_p`"),
        ({"top_k": -1}, "`top_k` must be >= 0"),
        ({"stop_sequences": [""]}, "`stop_sequences` has an empty sequence"),
        ({"stop_sequences": ["x"] * 5}, "`stop_sequences` supports up to 4"),
        ({"thinking": {"type": "sometimes"}}, "`thinking.type` is sometimes: give one of enabled"),
        ({"container": "c"}, "`container` is not served"),
        ({"mcp_servers": [{}]}, "`mcp_servers` is not served"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "`output_config.format.schema` must be a JSON schema"),
        ({"output_config": {"format": {"type": "xml"}}}, "`output_config.format.type` is xml: give json_schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"enum": ["x" * 70_000]}}}},
            "`output_config.format` has 70",
        ),
    ],
)
def test_what_is_wrong_is_400_in_anthropic_s_shape(plain: Served, changes: dict[str, Any], sentence: str) -> None:
    for stream in (False, True):
        answer = plain.http.post(URL, json={**BODY, **changes, "stream": stream})
        assert 400 == answer.status_code, answer.text
        body = answer.json()
        assert {"type", "error", "error_type"} == set(body)
        assert ("error", "invalid_request_error", "validation") == (
            body["type"],
            body["error"]["type"],
            body["error_type"],
        )
        assert sentence in body["error"]["message"] and "`truncate`" not in body["error"]["message"]


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(plain: Served) -> None:
    for changes, words in (
        ({"max_tokens": 4500}, r"input length and `max_tokens` exceed context limit: \d+ \+ 4500 > 4500\. "),
        ({"messages": [{"role": "user", "content": "a" * 5000}]}, r"prompt is too long: \d+ tokens > \d+ maximum\. "),
    ):
        error = plain.http.post(URL, json={**BODY, **changes}).json()["error"]
        assert re.match(words, error["message"]), error


def test_null_unknown_and_neutral_fields_are_no_reason_to_refuse(plain: Served) -> None:
    names = "system stop_sequences stream top_p top_k metadata tools tool_choice thinking output_config container"
    neutral: dict[str, Any] = dict.fromkeys(names.split())
    neutral |= {"service_tier": "auto", "mcp_servers": [], "context_management": None, "x": {"y": [1]}}
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "some-beta"}
    assert 200 == plain.http.post(URL, json={**BODY, **neutral}, headers=headers).status_code
    lenient = {name: value for name, value in BODY.items() if name != "max_tokens"}
    assert 200 == plain.http.post(URL, json=lenient).status_code


def test_parameters_reach_the_shards(plain: Served) -> None:
    num_steps = len(plain.site.shards.requests)
    asked = {"top_p": 0.75, "top_k": 9}
    plain.http.post(URL, json={**BODY, **asked, "temperature": 0.5})
    plain.http.post(URL, json={**BODY, **asked})
    plain.http.post(URL, json={**BODY, "temperature": None, "top_k": 0})
    steps = plain.site.shards.requests[num_steps:]
    drawn, greedy, neutral = (new.sampling for step in steps for new in step.add)
    assert (True, 0.5, 0.75, 9) == (drawn.do_sample, drawn.temperature, drawn.top_p, drawn.top_k)
    assert (False, 0, 1.0) == (greedy.do_sample, greedy.top_k, greedy.top_p)
    assert (True, 1.0, 1.0, 0) == (neutral.do_sample, neutral.temperature, neutral.top_p, neutral.top_k)


def test_a_key_may_come_as_x_api_key_on_these_paths_alone(guarded: Served) -> None:
    for path in (URL, f"{URL}/count_tokens"):
        cases: list[tuple[dict[str, Any], int]] = [
            ({}, 401),
            ({"x-api-key": "secret"}, 200),
            ({"x-api-key": "Secret"}, 401),
            ({"x-api-key": "sécret".encode()}, 401),
            ({"authorization": "Bearer secret"}, 200),
            ({"authorization": "Bearer wrong", "x-api-key": "secret"}, 200),
            ({"authorization": "secret"}, 401),
        ]
        for headers, status in cases:
            answer = guarded.http.post(path, json=BODY, headers=headers)
            assert status == answer.status_code, headers
            if status == 401:
                told = answer.json()["error"]
                assert "authentication_error" == told["type"] and "`x-api-key: KEY`" in told["message"]
    native = {"inputs": PROMPT}
    assert 401 == guarded.http.post("/generate", json=native, headers={"x-api-key": "secret"}).status_code
    asked = {"prompt": PROMPT}
    assert 200 == guarded.http.post("/v1/completions", json=asked, headers={"x-api-key": "secret"}).status_code
    assert [401, 200] == [
        guarded.http.get("/v1/models", headers={"x-api-key": key}).status_code for key in ("Secret", "secret")
    ]


def test_errors_of_http_have_anthropic_s_shape(guarded: Served) -> None:
    guarded.http.headers["x-api-key"] = "secret"
    plain = guarded.http.post(URL, content=b"{", headers={"content-type": "text/plain"})
    for answer, status, kind in (
        (guarded.http.get(URL), 405, "invalid_request_error"),
        (guarded.http.get(f"{URL}/batches"), 404, "not_found_error"),
        (guarded.http.post(URL, json={**BODY, "x": "y" * 3000}), 413, "request_too_large"),
        (plain, 415, "invalid_request_error"),
    ):
        assert (status, "error", kind) == (
            answer.status_code,
            answer.json()["type"],
            answer.json()["error"]["type"],
        )
    del guarded.http.headers["x-api-key"]


async def test_an_error_after_the_first_token_is_an_event(tmp_path: Path) -> None:
    shards = fake_shards(make_limits(), deaths={3}, **answering("one two"))
    async with site(shards, config={"chat_template": template_in(tmp_path)}) as it:
        it.http.timeout = 60
        events = events_of((await it.http.post(URL, json={**BODY, "stream": True})).text)
        assert ["message_start", "content_block_start"] == [event["type"] for event in events[:2]]
        assert ("error", "generation") == (events[-1]["type"], events[-1]["error_type"])
        assert "api_error" == events[-1]["error"]["type"] and "generation" in events[-1]["error"]["message"]


def test_a_page_of_an_allowed_origin_may_send_what_anthropic_s_client_sends(guarded: Served) -> None:
    asked = "content-type,x-api-key,anthropic-version,anthropic-dangerous-direct-browser-access,x-stainless-os"
    headers = {"origin": "https://a.page", "access-control-request-method": "POST"}
    headers["access-control-request-headers"] = asked
    answer = guarded.http.options(URL, headers=headers)
    assert 200 == answer.status_code, answer.text
