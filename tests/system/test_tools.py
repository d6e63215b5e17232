"""Calls of tools that a whole server's model is held to: it writes them, however little it knows of tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import jsonschema
import openai
import pytest

from tests.running import PATIENCE_S, Server

PARAMETERS = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["place", "days"],
    "additionalProperties": False,
}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS, **fields}}


ASKED: dict[str, Any] = {
    "model": "it",
    "messages": [{"role": "user", "content": "Tell me"}],
    "tools": [tool("weather"), tool("time", parameters=None)],
    "max_tokens": 120,
    "parallel_tool_calls": False,
    "seed": 1,
}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(
    scope="module", params=["hermes", *(pytest.param(style, marks=pytest.mark.rest) for style in ("json", "mistral"))]
)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server("--dtype", "float32", "--tool-call-parser", request.param) as running:
        yield running


def answered(server: Server, **changes: Any) -> list[dict[str, Any]]:
    """The choices of an answer."""
    answer = httpx2.post(f"{server.url}/v1/chat/completions", json={**ASKED, **changes}, timeout=PATIENCE_S)
    assert 200 == answer.status_code, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    return choices


def test_a_required_call_is_made(server: Server) -> None:
    for choice in answered(server, tool_choice="required", n=3):
        message = choice["message"]
        assert ("tool_calls", None) == (choice["finish_reason"], message["content"])
        [call] = message["tool_calls"]
        assert call["function"]["name"] in ("weather", "time")
        if call["function"]["name"] == "weather":
            jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)
        else:
            assert "{}" == call["function"]["arguments"]


def test_a_named_function_is_called_whole_and_streamed(server: Server) -> None:
    [choice] = answered(server, tool_choice=NAMED)
    [call] = choice["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", timeout=PATIENCE_S) as client:
        with client.chat.completions.stream(**ASKED, tool_choice=NAMED) as stream:  # type: ignore[arg-type]
            final = stream.get_final_completion().choices[0]
    [streamed] = final.message.tool_calls or ()
    assert call["function"] == {"name": streamed.function.name, "arguments": streamed.function.arguments}
    assert "tool_calls" == final.finish_reason
    [several] = answered(server, tool_choice="required", parallel_tool_calls=True)
    for call in several["message"].get("tool_calls", ()):
        assert call["function"]["name"] in ("weather", "time")


def test_strict_functions_leave_the_text_free(server: Server) -> None:
    for choice in answered(server, tools=[tool("weather", strict=True)], max_tokens=20, n=2):
        assert choice["message"]["content"] or choice["message"].get("tool_calls")


FORMAT = {
    "type": "json_object",
    "schema": {
        "properties": {"mood": {"enum": ["good", "bad"]}},
        "required": ["mood"],
        "additionalProperties": False,
    },
}


def test_an_answer_keeps_to_its_format_or_is_a_call_whole_and_streamed(server: Server) -> None:
    asked = {"response_format": FORMAT, "n": 4, "temperature": 1.5}
    for choice in answered(server, **asked, tool_choice="auto"):
        text, calls = choice["message"]["content"], choice["message"].get("tool_calls")
        assert calls or json.loads(text)["mood"] in ("good", "bad")
    for choice in answered(server, **asked, tool_choice="required"):
        assert choice["message"]["tool_calls"] and choice["message"]["content"] is None
    texts = [choice["message"]["content"] for choice in answered(server, **asked, tool_choice="none")]
    assert all(json.loads(text)["mood"] in ("good", "bad") for text in texts)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", timeout=PATIENCE_S) as client:
        for choice, whole in (("none", texts[0]), ("auto", None)):
            chunks = client.chat.completions.create(
                **{**ASKED, "tool_choice": choice, "response_format": FORMAT, "temperature": 1.5}, stream=True
            )
            deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
            text = "".join(delta.content or "" for delta in deltas)
            assert whole in (None, text)
            assert any(delta.tool_calls for delta in deltas) or json.loads(text)["mood"] in ("good", "bad")


def test_what_cannot_be_held_is_refused_and_nobody_else_notices(server: Server) -> None:
    backwards = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 9, "maximum": 1}},
        "required": ["a"],
    }
    for changes, sentence in (
        ({"tools": [tool("f", parameters=backwards, strict=True)]}, "cannot be held to the schemas of `tools`"),
        ({"ignore_eos": True}, "`ignore_eos` is not served"),
    ):
        asked = {**ASKED, "tool_choice": "required", **changes}
        answer = httpx2.post(f"{server.url}/v1/chat/completions", json=asked, timeout=PATIENCE_S)
        assert (400, "validation") == (answer.status_code, answer.json()["error_type"])
        assert sentence in answer.json()["error"]["message"]
    assert answered(server, tool_choice="none", max_tokens=5)[0]["message"]["content"]
