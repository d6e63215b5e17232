"""Anthropic's routes over fake shards: shapes, events, stop reasons, counts, what is refused, keys, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from router.apis.anthropic.answers import error_body
from router.errors import GenerationError
from tests.router.served import LAST_ALONE, Served, one_two, served
from tests.router.site import PROMPT

URL = "/v1/messages"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 20}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Wants a key, lets pages of one origin in, and takes short bodies alone."""
    settings: dict[str, Any] = {"api_key": "secret", "cors_allow_origin": ("https://a.page",), "payload_limit": 2000}
    with served(tmp_path_factory.mktemp("guarded"), one_two, LAST_ALONE, **settings) as it:
        yield it


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


def test_null_unknown_and_neutral_fields_are_no_reason_to_refuse(plain: Served) -> None:
    names = "system stop_sequences stream top_p top_k metadata tools tool_choice thinking output_config container"
    neutral: dict[str, Any] = dict.fromkeys(names.split())
    neutral |= {"service_tier": "auto", "mcp_servers": [], "context_management": None, "x": {"y": [1]}}
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "some-beta"}
    assert 200 == plain.http.post(URL, json={**BODY, **neutral}, headers=headers).status_code
    lenient = {name: value for name, value in BODY.items() if name != "max_tokens"}
    assert 200 == plain.http.post(URL, json=lenient).status_code


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
    assert ("api_error", "generation") == (
        (failed := error_body(GenerationError("x")))["error"]["type"],
        failed["error_type"],
    )


def test_a_page_of_an_allowed_origin_may_send_what_anthropic_s_client_sends(guarded: Served) -> None:
    asked = "content-type,x-api-key,anthropic-version,anthropic-dangerous-direct-browser-access,x-stainless-os"
    headers = {"origin": "https://a.page", "access-control-request-method": "POST"}
    headers["access-control-request-headers"] = asked
    answer = guarded.http.options(URL, headers=headers)
    assert 200 == answer.status_code, answer.text
