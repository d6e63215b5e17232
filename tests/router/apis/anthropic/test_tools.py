"""Tools and thinking in Anthropic's messages: offered to the model, called in whole and streamed answers, refused."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from router.apis.anthropic.answers import block_of
from router.chat.pieces import Part
from router.requests.schemas import num_values
from tests.router.apis.anthropic.test_routes import URL, events_of
from tests.router.served import Served

WEATHER = {
    "name": "weather",
    "description": "The weather of a place",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
TIME = {"type": "custom", "name": "time", "input_schema": {"type": "object"}}
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Rain in Ulm?"}],
    "max_tokens": 200,
    "temperature": 0,
    "tools": [WEATHER, TIME],
}


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a client makes of a stream."""
    found: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(found)
            found.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            (_, kind), (field, text) = event["delta"].items()
            name = {"partial_json": "json"}.get(field, field)
            assert kind == {"text": "text_delta", "thinking": "thinking_delta", "json": "input_json_delta"}[name]
            found[event["index"]][name] += text
    for block in found:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
    return found


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


WEATHER_CALL = {"type": "tool_use", "name": "weather", "input": {"place": "Ulm"}}
TIME_CALL = {"type": "tool_use", "name": "time", "input": {}}
LOOK = {"type": "text", "text": "I look."}


@pytest.mark.parametrize(
    ("changes", "expected", "reason"),
    [
        ({}, [LOOK, WEATHER_CALL, TIME_CALL], "tool_use"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, [LOOK, WEATHER_CALL], "tool_use"),
        ({"tool_choice": {"type": "none"}}, [{"type": "text", "text": "No tools here."}], "end_turn"),
        ({"tools": None}, [{"type": "text", "text": "No tools here."}], "end_turn"),
        (
            {"system": "think"},
            [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Well."}, WEATHER_CALL],
            "tool_use",
        ),
        ({"max_tokens": 7}, [LOOK], "max_tokens"),
        ({"max_tokens": 60}, [LOOK, {**WEATHER_CALL, "input": {}}], "max_tokens"),
    ],
)
def test_calls_and_thinking_are_blocks_whole_and_streamed(
    tooled: Served, changes: dict[str, Any], expected: list[dict[str, Any]], reason: str
) -> None:
    body = tooled.http.post(URL, json={**BODY, **changes}).json()
    assert expected == without_ids(body["content"])
    assert reason == body["stop_reason"]
    events = events_of(tooled.http.post(URL, json={**BODY, **changes, "stream": True}).text)
    if changes.get("max_tokens") != 60:  # whose call is cut off within its arguments
        assert expected == without_ids(blocks_of(events))
    assert reason == events[-2]["delta"]["stop_reason"]
    ids = [block["id"] for block in body["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == len(ids) and all(ids)


def test_a_call_has_the_numbers_that_the_model_wrote_and_nothing_that_parsers_refuse() -> None:
    deep = '{"a": ' * 100 + "1" + "}" * 100
    good = ('{"id": 123456789012345678901234567890}', '{"a": 1.0}')
    bad = ("[1]", '{"a": 1', "", '{"a": "\\ud83d"}', '{"a": 1e999}', '{"a": NaN}', deep)
    for written, expected in ((text, text if text in good else "{}") for text in (*good, *bad)):
        block = block_of(Part("call", [written], "it", "f"))
        assert f'{{"type":"tool_use","id":"it","name":"f","input":{expected}}}' == orjson.dumps(block).decode()


def test_the_model_sees_the_tools_and_the_results(tooled: Served) -> None:
    first = tooled.http.post(URL, json=BODY).json()
    shown = json.loads(tooled.prompt[: tooled.prompt.index("][") + 1])
    assert ["weather", "time"] == [tool["function"]["name"] for tool in shown]
    assert WEATHER["input_schema"] == shown[0]["function"]["parameters"]
    calls = [block for block in first["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "rain"} for call in calls]
    messages = [*BODY["messages"], {"role": "assistant", "content": first["content"]}]
    body = {**BODY, "messages": [*messages, {"role": "user", "content": results}]}
    second = tooled.http.post(URL, json=body).json()
    assert [{"type": "text", "text": "It rains."}] == second["content"]
    told = json.loads(tooled.prompt[tooled.prompt.index("][") + 1 :])
    assert ["user", "assistant", "tool", "tool"] == [message["role"] for message in told]
    assert [call["id"] for call in calls] == [message["tool_call_id"] for message in told[2:]]
    counted = tooled.http.post(f"{URL}/count_tokens", json={**body, "max_tokens": None}).json()
    assert {"input_tokens": len(tooled.prompt) + 1} == counted


def messages_in(prompt: str) -> list[dict[str, Any]]:
    return list(json.loads(prompt[prompt.index("][") + 1 :]))


BILLING = "x-anthropic-billing-header: cc_version=2.1.197.{0}; cc_entrypoint=cli; cch={0};"


@pytest.mark.parametrize("is_text", [False, True])
def test_what_claude_code_says_of_its_bills_is_no_part_of_the_prompt(tooled: Served, is_text: bool) -> None:
    """It may change with each request, and the prompt is to begin alike."""
    prompts = []
    for number, is_apart in (("a1b", True), ("c2d", False)):
        line = BILLING.format(number)
        texts = (line, "Be brief.") if is_apart else (f"{line}\nBe brief.",)
        system: Any = f"{line}\nBe brief." if is_text else [{"type": "text", "text": text} for text in texts]
        assert 200 == tooled.http.post(URL, json={**BODY, "system": system}).status_code
        prompts.append(tooled.prompt)
    assert prompts[0] == prompts[1] and {"role": "system", "content": "Be brief."} == messages_in(prompts[0])[0]


THOUGHTS = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "First."}, {"type": "text", "text": "1"}]},
    {"role": "user", "content": [{"type": "text", "text": "two"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Second."},
            {"type": "tool_use", "id": "t", "name": "time", "input": {}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "noon"}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "Third."}, {"type": "text", "text": "2"}]},
    {"role": "user", "content": "three"},
]


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ({"keep": "all"}, ["First.", "Second.", "Third."]),
        ({"keep": {"type": "thinking_turns", "value": 3}}, ["First.", "Second.", "Third."]),
        ({"keep": {"type": "all"}}, ["First.", "Second.", "Third."]),
        ({"keep": {"type": "thinking_turns", "value": 2}}, ["First.", "Second.", "Third."]),
        ({"keep": {"type": "thinking_turns", "value": 1}}, ["Second.", "Third."]),
        ({"keep": None}, ["Second.", "Third."]),
        ({}, ["Second.", "Third."]),  # of the last turn that thought; the question behind it has no answer yet
    ],
)
def test_earlier_thinking_is_left_out_by_turns(tooled: Served, edit: dict[str, Any], expected: list[str]) -> None:
    edits = [{"type": "clear_thinking_20251015", **edit}]
    body = {**BODY, "messages": THOUGHTS, "context_management": {"edits": edits}}
    assert 200 == tooled.http.post(URL, json=body).status_code
    told = messages_in(tooled.prompt)
    assert expected == [one["reasoning_content"] for one in told if "reasoning_content" in one]
    assert ["one", "1", "two", "", "noon", "2", "three"] == [one["content"] for one in told]


@pytest.mark.parametrize("keep", [0, "", [], {}, False, {"value": 0}, {"value": True}, "some"])
def test_how_much_thinking_is_kept_must_be_said(tooled: Served, keep: object) -> None:
    edits = [{"type": "clear_thinking_20251015", "keep": keep}]
    refused = tooled.http.post(URL, json={**BODY, "context_management": {"edits": edits}})
    sentence = "`context_management.edits.0.keep` must be all, or thinking_turns with a `value` of 1 or more"
    assert (400, f"Input validation error: {sentence}") == (refused.status_code, refused.json()["error"]["message"])


def test_tools_that_anthropic_would_run_are_not_shown(tooled: Served) -> None:
    elsewhere = [{"type": "web_search_20260209", "name": "web_search"}, {"type": "tool_search_tool_regex_20251119"}]
    assert 200 == tooled.http.post(URL, json={**BODY, "tools": [*elsewhere, WEATHER]}).status_code
    shown = json.loads(tooled.prompt[: tooled.prompt.index("][") + 1])
    assert ["weather"] == [tool["function"]["name"] for tool in shown]


def test_what_a_tool_shows_is_told_where_it_is_no_text(tooled: Served) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    said = [{"type": "text", "text": "a.png:"}, image]
    result = {"type": "tool_result", "tool_use_id": "t", "content": said}
    body = {**BODY, "messages": [*THOUGHTS[:4], {"role": "user", "content": [result]}]}
    assert 200 == tooled.http.post(URL, json=body).status_code
    assert "a.png:\n[image left out: this model reads text alone]" == messages_in(tooled.prompt)[-1]["content"]


def test_a_last_message_that_says_nothing_is_no_beginning_of_the_answer(tooled: Served) -> None:
    for end in ("", " \n"):
        messages = [*THOUGHTS[:3], {"role": "assistant", "content": end}]
        assert 200 == tooled.http.post(URL, json={**BODY, "messages": messages}).status_code
        ended = tooled.prompt
        assert 200 == tooled.http.post(URL, json={**BODY, "messages": THOUGHTS[:3]}).status_code
        assert ended == tooled.prompt


def test_a_conversation_has_as_many_values_as_its_prompt_may_be_long(tooled: Served) -> None:
    """An agent's grows by dozens with each call."""
    call = {"type": "tool_use", "id": "t", "name": "time", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "noon"}
    rounds = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}] * 640
    body = {"messages": [THOUGHTS[0], *rounds]}
    assert 10_000 < num_values(json.dumps(body).encode(), 10**6) < 12_000
    answer = tooled.http.post(f"{URL}/count_tokens", json=body)  # here a token is a character: it is too long
    assert "values" not in answer.text and "tokens" in answer.text
    more = {"messages": [THOUGHTS[0], *rounds, *rounds]}
    refused = tooled.http.post(f"{URL}/count_tokens", json=more)
    assert (400, True) == (refused.status_code, "or shorten it" in refused.json()["error"]["message"])
