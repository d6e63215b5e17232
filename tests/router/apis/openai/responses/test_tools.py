"""Functions and reasoning in OpenAI's responses: offered, called in whole and streamed answers, refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.apis.openai.responses.routes import TOOL
from tests.router.apis.openai.responses.test_routes import URL, events_of, message, without_id
from tests.router.served import Served

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
