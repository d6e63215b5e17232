"""Functions and reasoning in OpenAI's responses: offered, called in whole and streamed answers, refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from router.apis.openai.responses.routes import TOOL
from router.apis.openai.responses.tools import input_of
from tests.router.apis.openai.responses.test_routes import URL, events_of, message, without_id
from tests.router.served import WITH_TOOLS, Served, called, served

PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Of a place",
    "parameters": PARAMETERS,
}
TIME = {"type": "function", "name": "time", "parameters": None, "strict": None}
BODY: dict[str, Any] = {"input": "Rain in Ulm?", "temperature": 0, "tools": [WEATHER, TIME]}
WEATHER_CALL = {"type": "function_call", "status": "completed", "name": "weather", "arguments": '{"place": "Ulm"}'}
TIME_CALL = {"type": "function_call", "status": "completed", "name": "time", "arguments": "{}"}
REASONING = {
    "type": "reasoning",
    "status": "completed",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
}


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert len({item["id"] for item in items}) == len(items)
    return [{name: value for name, value in without_id(item).items() if name != "call_id"} for item in items]


def check_item(events: list[dict[str, Any]], index: int, item: dict[str, Any]) -> None:
    """The events of one item say the same as the item itself."""
    of_item = [event for event in events if event.get("output_index") == index]
    first, *_, last = of_item
    assert ("response.output_item.added", item["id"]) == (first["type"], first["item"]["id"])
    assert "in_progress" == first["item"]["status"]
    assert ("response.output_item.done", item) == (last["type"], last["item"])
    assert {item["id"]} == {event["item_id"] for event in of_item[1:-1]}
    deltas = "".join(event["delta"] for event in of_item if event["type"].endswith(".delta"))
    [done] = [event for event in of_item if event["type"].endswith((".delta", "text.done", "arguments.done"))][-1:]
    if item["type"] == "function_call":
        assert item["arguments"] == deltas == done["arguments"]
        assert (first["item"]["call_id"], item["name"]) == (item["call_id"], done["name"])
    else:
        assert item["content"][0]["text"] == deltas == done["text"]


@pytest.mark.parametrize(
    ("changes", "expected", "status"),
    [
        ({}, [message("I look."), WEATHER_CALL, TIME_CALL], "completed"),
        ({"parallel_tool_calls": False}, [message("I look."), WEATHER_CALL], "completed"),
        ({"tool_choice": "none"}, [message("No tools here.")], "completed"),
        ({"tools": None}, [message("No tools here.")], "completed"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]}},
            [message("No tools here.")],  # as `reply` has it where the model sees no weather
            "completed",
        ),
        ({"instructions": "think"}, [REASONING, message("Well."), WEATHER_CALL], "completed"),
        ({"max_output_tokens": 7}, [message("I look.", "incomplete")], "incomplete"),
        (
            {"max_output_tokens": 62},
            [message("I look."), {**WEATHER_CALL, "status": "incomplete", "arguments": '{"place":'}],
            "incomplete",
        ),
    ],
)
def test_calls_and_reasoning_are_items_whole_and_streamed(
    tooled: Served, changes: dict[str, Any], expected: list[dict[str, Any]], status: str
) -> None:
    body = tooled.http.post(URL, json={**BODY, **changes}).json()
    assert (expected, status) == (without_ids(body["output"]), body["status"])
    events = events_of(tooled.http.post(URL, json={**BODY, **changes, "stream": True}).text)
    last = events[-1]
    assert f"response.{status}" == last["type"]
    assert expected == without_ids(last["response"]["output"])
    for index, item in enumerate(last["response"]["output"]):
        check_item(events, index, item)
    counts = [one["usage"]["output_tokens_details"]["reasoning_tokens"] for one in (body, last["response"])]
    assert counts == [len("<think>Hm.") if "instructions" in changes else 0] * 2


def test_the_model_sees_the_functions_and_the_results(tooled: Served) -> None:
    first = tooled.http.post(URL, json=BODY).json()
    assert [{**TOOL, **WEATHER}, {**TOOL, **TIME}] == first["tools"]
    shown = json.loads(tooled.prompt[: tooled.prompt.index("][") + 1])
    assert ["weather", "time"] == [tool["function"]["name"] for tool in shown]
    assert PARAMETERS == shown[0]["function"]["parameters"]
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "rain"} for call in calls]
    body = {**BODY, "input": [{"role": "user", "content": BODY["input"]}, *first["output"], *results]}
    second = tooled.http.post(URL, json=body).json()
    assert [message("It rains.")] == without_ids(second["output"])
    told = json.loads(tooled.prompt[tooled.prompt.index("][") + 1 :])
    assert ["user", "assistant", "tool", "tool"] == [one["role"] for one in told]


AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Others to ask",
    "tools": [WEATHER, {**WEATHER, "name": "other"}],
}
PATCH = {
    "type": "custom",
    "name": "weather",
    "description": "A patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"},
}


def shown_tools(it: Served) -> list[dict[str, Any]]:
    return [tool["function"] for tool in json.loads(it.prompt[: it.prompt.index("][") + 1])]


def calls_what_it_sees(prompt: str) -> str:
    """The first function that it sees, with a place."""
    if '"role": "tool"' in prompt:
        return "It rains."
    name = json.loads(prompt[: prompt.index("][") + 1])[0]["function"]["name"]
    return f"I look.\n{called(name, place='Ulm', input='*** {1}')}"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("seeing"), calls_what_it_sees, **WITH_TOOLS) as it:
        yield it


def answer_and_stream(it: Served, body: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The items of a whole answer, and the events of a streamed one, whose items are the same but for ids."""
    answer = it.http.post(URL, json=body)
    assert 200 == answer.status_code, answer.text
    events = events_of(it.http.post(URL, json={**body, "stream": True}).text)
    items = answer.json()["output"]
    assert without_ids(items) == without_ids(events[-1]["response"]["output"])
    return items, events


def test_functions_of_a_namespace_are_called_by_both_names(seeing: Served) -> None:
    body = {**BODY, "tools": [AGENTS, TIME]}
    items, events = answer_and_stream(seeing, body)
    assert ["agents__weather", "agents__other", "time"] == [tool["name"] for tool in shown_tools(seeing)]
    call = items[1]
    assert ("function_call", "weather", "agents") == (call["type"], call["name"], call["namespace"])
    check_item(events, 1, events[-1]["response"]["output"][1])
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}]
    history = [{"role": "user", "content": BODY["input"]}, *items, *results]
    again, _ = answer_and_stream(seeing, {**body, "input": history})
    assert [message("It rains.")] == without_ids(again)
    assert (
        '"name": "agents__weather", "arguments": {"place"' in seeing.prompt and '"name": "weather"' not in seeing.prompt
    )


@pytest.mark.parametrize("namespace", ["mcp__files__", None])
def test_a_namespace_may_end_with_what_is_between(seeing: Served, namespace: str | None) -> None:
    tools = [WEATHER] if namespace is None else [{**AGENTS, "name": namespace}]
    items, _ = answer_and_stream(seeing, {**BODY, "tools": tools})
    assert f"{namespace or ''}weather" == shown_tools(seeing)[0]["name"]
    assert ("weather", namespace) == (items[-1]["name"], items[-1].get("namespace"))


def test_a_custom_tool_is_called_with_a_text(seeing: Served) -> None:
    body = {**BODY, "tools": [PATCH]}
    items, events = answer_and_stream(seeing, body)
    [shown] = shown_tools(seeing)
    assert {"input"} == set(shown["parameters"]["properties"]) and "A patch\n`input` keeps to" in shown["description"]
    assert "(lark):\nstart: /x+/" in shown["description"]
    call = items[1]
    assert call["id"].startswith("ctc_")
    expected = {"type": "custom_tool_call", "status": "completed", "name": "weather", "input": "*** {1}"}
    assert [expected] == without_ids([call])
    kinds = [event["type"] for event in events if event.get("output_index") == 1]
    stages = ("delta", "done")
    told = [f"response.custom_tool_call_input.{stage}" for stage in stages]
    assert ["response.output_item.added", *told, "response.output_item.done"] == kinds
    assert ["*** {1}"] * 2 == [event.get("delta") or event.get("input") for event in events if event["type"] in told]
    assert list(range(len(events))) == [event["sequence_number"] for event in events]
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": [{"type": "input_image"}]}
    history = [{"role": "user", "content": BODY["input"]}, *items, result]
    again, _ = answer_and_stream(seeing, {**body, "input": history})
    assert [message("It rains.")] == without_ids(again)
    assert '"arguments": {"input": "*** {1}"}' in seeing.prompt
    assert "[input_image left out: this model reads text alone]" in seeing.prompt


def test_what_is_no_text_of_a_custom_tool_is_told_as_it_was_written() -> None:
    assert ["x", "x", "5", '{"inp', "[]"] == [
        input_of(text) for text in ('{"input": "x"}', '{"input": "x', '{"input": 5}', '{"inp', "[]")
    ]


@pytest.mark.parametrize(
    "cut", ["\\", "\\u", "\\u00f", "\\ud83d", "\\uD83D", "\\ud83d\\", "\\ud83d\\u", "\\ud83d\\ude0"]
)
def test_a_text_that_was_cut_off_within_a_character_is_told_without_it(cut: str) -> None:
    assert "line\n" == input_of(f'{{"input": "line\\n{cut}')
    assert "\\" == input_of('{"input": "\\\\') and "\\u12" == input_of('{"input": "\\\\u12')
    assert "x?ab" == input_of('{"input": "x\\ud83dab')


def test_tools_that_openai_would_run_are_not_shown(tooled: Served) -> None:
    elsewhere = [{"type": "web_search"}, {"type": "image_generation"}, {"type": "web_search_preview_2025_03_11"}]
    body = tooled.http.post(URL, json={**BODY, "tools": [*elsewhere, WEATHER]}).json()
    assert ["weather"] == [tool["name"] for tool in shown_tools(tooled)]
    assert 4 == len(body["tools"])
    alone = tooled.http.post(URL, json={**BODY, "tools": elsewhere}).json()
    assert [message("No tools here.")] == without_ids(alone["output"])
    some = {"type": "allowed_tools", "mode": "auto", "tools": [elsewhere[0], {"type": "function", "name": "time"}]}
    assert 200 == tooled.http.post(URL, json={**BODY, "tool_choice": some}).status_code


@pytest.mark.parametrize("arguments", ["{", "", " ", "null", "[1]", '"x"', '{"a": NaN}'])
def test_a_conversation_outlives_arguments_that_are_none(tooled: Served, arguments: str) -> None:
    """The model may have written them so, or have been cut off within them, and was believed when it did."""
    call = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": arguments}
    result = {"type": "function_call_output", "call_id": "1", "output": "That was no JSON."}
    answer = tooled.http.post(URL, json={**BODY, "input": [{"role": "user", "content": "x"}, call, result]})
    assert 200 == answer.status_code, answer.text
    assert '"arguments": {}' in tooled.prompt
    function = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [function]},
        {"role": "tool", "tool_call_id": "1", "content": "That was no JSON."},
    ]
    answer = tooled.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 20})
    assert 200 == answer.status_code, answer.text
    assert '"arguments": {}' in tooled.prompt
