"""OpenAI's `/v1/responses` over fake shards: shapes, events, items, what is refused, errors."""

from __future__ import annotations

import json
from typing import Any

from tests.router.served import Served
from tests.router.site import PROMPT

URL = "/v1/responses"
BODY: dict[str, Any] = {"input": PROMPT, "temperature": 0}
LOGPROBS = ["message.output_text.logprobs"]
TOOL = {"type": "function", "name": "f"}


def events_of(text: str) -> list[dict[str, Any]]:
    """All events of a stream, named after their types and numbered from 0."""
    found = []
    for frame in text.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [*range(len(found))] == [event["sequence_number"] for event in found]
    return found


def message(text: str, status: str = "completed") -> dict[str, Any]:
    """An item of the output, without its id."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "status": status, "content": [part]}


def without_id(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name != "id"}


def test_a_response_has_openai_s_shape(plain: Served) -> None:
    asked = {"model": "any/name", "instructions": "Be brief.", "metadata": {"a": "b"}, "max_output_tokens": 20}
    answer = plain.http.post(URL, json={**BODY, **asked, "truncation": "auto"})
    assert 200 == answer.status_code, answer.text
    body = answer.json()
    assert f"resp_{answer.headers['x-request-id']}" == body.pop("id")
    assert 0 < body.pop("created_at") <= body.pop("completed_at")
    [item] = body.pop("output")
    assert item["id"].startswith("msg_") and message("one two") == without_id(item)
    counts = {"input_tokens": 6, "output_tokens": 8, "total_tokens": 14}
    details = {
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    assert {**counts, **details} == body.pop("usage")
    assert body == {
        "object": "response",
        "status": "completed",
        "model": "any/name",
        "background": False,
        "store": False,
        **dict.fromkeys(("error", "incomplete_details", "previous_response_id")),
        "service_tier": "default",
        "truncation": "disabled",
        "temperature": 0,
        "top_p": 1.0,
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "max_output_tokens": 20,
        **dict.fromkeys(("max_tool_calls", "safety_identifier", "prompt_cache_key")),
        **dict.fromkeys(("frequency_penalty", "presence_penalty"), 0.0),
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None},
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
    }


def test_a_response_repeats_what_it_was_asked(plain: Served) -> None:
    told = {
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "max_tool_calls": 3,
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    body = plain.http.post(URL, json={**BODY, **told, "store": True}).json()
    assert told == {name: body[name] for name in told} and body["store"] is False


def test_what_is_not_there_says_why(plain: Served) -> None:
    compact = plain.http.post(f"{URL}/compact", json={})
    assert 404 == compact.status_code and "conversations are not compacted here" in compact.json()["error"]["message"]
    upgrade = plain.http.get(URL)
    assert 405 == upgrade.status_code and "WebSockets are not served here" in upgrade.json()["error"]["message"]


def test_a_stream_tells_the_response_item_by_item(plain: Served) -> None:
    whole = plain.http.post(URL, json=BODY).json()
    answer = plain.http.post(URL, json={**BODY, "stream": True})
    assert "text/event-stream" in answer.headers["content-type"]
    events = events_of(answer.text)
    kinds = [event["type"] for event in events if event["type"] != "response.output_text.delta"]
    parts = ["output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done"]
    assert [f"response.{kind}" for kind in ("created", "in_progress", *parts, "completed")] == kinds
    created, _, added, part = events[:4]
    assert ("in_progress", [], None) == tuple(created["response"][name] for name in ("status", "output", "usage"))
    assert {**message("", "in_progress"), "content": []} == without_id(added["item"])
    assert ("", 0, 0) == (part["part"]["text"], part["output_index"], part["content_index"])
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "one two" == "".join(delta["delta"] for delta in deltas) and len(deltas) == 7
    assert all(delta["item_id"] == added["item"]["id"] and delta["logprobs"] == [] for delta in deltas)
    text, done, item, completed = events[-4:]
    assert "one two" == text["text"] == done["part"]["text"]
    assert message("one two") == without_id(item["item"])
    assert created["response"]["completed_at"] is None
    assert created["response"]["created_at"] <= completed["response"]["completed_at"]
    changing = ("id", "created_at", "completed_at", "output")
    assert {**whole, **{name: completed["response"][name] for name in changing}} == completed["response"]
    assert [item["item"]] == completed["response"]["output"]


def test_log_probabilities_are_those_of_chats_whole_and_streamed(plain: Served) -> None:
    chat = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "logprobs": True, "top_logprobs": 2}
    expected = plain.http.post("/v1/chat/completions", json=chat).json()["choices"][0]["logprobs"]["content"]
    assert "one two" == "".join(entry["token"] for entry in expected) and 2 == len(expected[0]["top_logprobs"])
    asked = {**BODY, "include": LOGPROBS, "top_logprobs": 2}
    whole = plain.http.post(URL, json=asked).json()
    [part] = whole["output"][0]["content"]
    assert ("one two", expected, 2) == (part["text"], part["logprobs"], whole["top_logprobs"])
    events = events_of(plain.http.post(URL, json={**asked, "stream": True}).text)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert expected == [entry for delta in deltas for entry in delta["logprobs"]]
    assert all(delta["delta"] == "".join(entry["token"] for entry in delta["logprobs"]) for delta in deltas)
    text, done, item, completed = events[-4:]
    assert ("one two", expected) == (text["text"], text["logprobs"])
    assert part == done["part"] == item["item"]["content"][0] == completed["response"]["output"][0]["content"][0]


def test_a_response_that_is_too_long_is_incomplete(plain: Served) -> None:
    asked = {**BODY, "max_output_tokens": 3}
    body = plain.http.post(URL, json=asked).json()
    assert ("incomplete", {"reason": "max_output_tokens"}) == (body["status"], body["incomplete_details"])
    assert body["completed_at"] is None
    assert [message("one", "incomplete")] == [without_id(item) for item in body["output"]]
    last = events_of(plain.http.post(URL, json={**asked, "stream": True}).text)[-1]
    assert "response.incomplete" == last["type"]
    assert [message("one", "incomplete")] == [without_id(item) for item in last["response"]["output"]]


def test_items_become_what_templates_take(telling: Served) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"place": "Ulm"}', "id": "fc_1"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
    listed = {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {**message("d"), "id": "msg_1"}
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "user", "content": "c"},
        *(thought, said, call, output, listed),
        {"role": "user", "content": "e"},
    ]
    function = {"name": "weather", "arguments": {"place": "Ulm"}}
    expected = [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "a\nb\nc"},
        {
            "role": "assistant",
            "content": "d",
            "reasoning_content": "hm",
            "thinking": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "weather"},
        {"role": "tool", "content": "sun", "tool_call_id": "c2"},
        {"role": "user", "content": "e"},
    ]
    body = {"input": items, "instructions": "Be brief.", "reasoning": {"effort": "none"}}
    answer = telling.http.post(URL, json=body)
    assert 200 == answer.status_code, answer.text
    shown, end, variables = telling.prompt.rpartition("]")
    assert expected == json.loads(shown + end)
    assert "FalseTrue" == variables
    counted = telling.http.post(f"{URL}/input_tokens", json=body).json()
    assert {"object": "response.input_tokens", "input_tokens": answer.json()["usage"]["input_tokens"]} == counted


def test_null_unknown_and_neutral_fields_are_no_reason_to_refuse(plain: Served) -> None:
    names = "instructions max_output_tokens metadata parallel_tool_calls reasoning store stream temperature text tools"
    neutral: dict[str, Any] = dict.fromkeys([*names.split(), "tool_choice", "top_p", "truncation", "include", "prompt"])
    neutral |= {"service_tier": "auto", "user": "me", "prompt_cache_key": "x", "stream_options": {"x": 1}, "x": [1]}
    for changes in (neutral, {"store": False}, {"include": ["reasoning.encrypted_content"], "background": False}):
        assert 200 == plain.http.post(URL, json={"input": PROMPT, **changes}).status_code


def test_what_a_body_said_is_told_again_only_as_far_as_it_is_short(plain: Served) -> None:
    """A stream tells it three times, and a client that reads what it gets must not be cut off for it."""
    asked = {**BODY, "instructions": "y" * 20_000, "text": {"format": {"type": "text", "x": "z" * 20_000}}}
    answer = plain.http.post(URL, json={**asked, "stream": True})
    assert 200 == answer.status_code, answer.text
    told = events_of(answer.text)[0]["response"]
    assert (None, {"format": {"type": "text"}}) == (told["instructions"], told["text"])
    assert len(answer.text) < 20_000


def test_nothing_is_stored(plain: Served) -> None:
    found = plain.http.post(URL, json=BODY).json()["id"]
    for method, path in (
        ("GET", found),
        ("DELETE", found),
        ("POST", f"{found}/cancel"),
        ("GET", f"{found}/input_items"),
    ):
        answer = plain.http.request(method, f"{URL}/{path}")
        assert (404, "not_found") == (answer.status_code, answer.json()["error_type"])
        assert "responses are not stored here" in answer.json()["error"]["message"]
    assert 405 == plain.http.get(URL).status_code
