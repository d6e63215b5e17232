"""Nearly right conversations by the thousand: each is translated for a template, or refused in our words."""

from __future__ import annotations

import json
from copy import deepcopy
from random import Random
from typing import Any

import orjson
from hypothesis import settings

from router.apis.anthropic import routes as anthropic
from router.apis.anthropic.routes import MessagesRequest
from router.apis.openai.responses import routes as responses
from router.apis.openai.responses.routes import ResponsesRequest, echo_of
from router.chat.tools import Offer
from router.chat.transcript import Transcript
from router.errors import RouterError
from router.requests import schemas
from tests.router.apis.anthropic.test_tools import TIME, WEATHER
from tests.router.apis.error_bodies import INTERNALS
from tests.router.apis.openai.responses.test_tools import TIME as TIME_FUNCTION
from tests.router.apis.openai.responses.test_tools import WEATHER as WEATHER_FUNCTION

IMAGE: dict[str, Any] = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
OTHER_TOOLS: list[dict[str, Any]] = [
    {"type": "namespace", "name": "agents", "description": "x", "tools": [TIME_FUNCTION]},
    {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"}},
    {"type": "web_search"},
]
MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "b"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "c", "signature": "d"},
                {"type": "redacted_thinking", "data": "e"},
                {"type": "text", "text": "f"},
                {"type": "tool_use", "id": "t", "name": "weather", "input": {"place": "Ulm"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "g"}, IMAGE]},
                {"type": "tool_result", "tool_use_id": "u", "content": "h", "is_error": True},
            ],
        },
    ],
    "tools": [WEATHER, TIME, {"type": "web_search_20260209", "name": "web_search"}],
    "context_management": {
        "edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}]
    },
    "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"format": None, "effort": "low"},
    "stop_sequences": ["x"],
    "temperature": 0.5,
    "metadata": {"user_id": "u"},
}
RESPONSE: dict[str, Any] = {
    "model": "m",
    "instructions": "a",
    "input": [
        {"role": "developer", "content": "b"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "c"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "d"}]},
        {"type": "function_call", "call_id": "t", "name": "weather", "arguments": '{"place": "Ulm"}'},
        {"type": "function_call_output", "call_id": "t", "output": [{"type": "input_text", "text": "e"}]},
        {"type": "function_call", "call_id": "u", "name": "time", "namespace": "agents", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "v", "name": "patch", "input": "X"},
        {"type": "custom_tool_call_output", "call_id": "v", "output": [{"type": "input_image"}]},
    ],
    "tools": [WEATHER_FUNCTION, TIME_FUNCTION, *OTHER_TOOLS],
    "tool_choice": {"type": "function", "name": "weather"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "max_output_tokens": 5,
    "temperature": 0.5,
    "truncation": "auto",
}
DEEP = json.loads("[" * 90 + "]" * 90)
VALUES: list[Any] = [None, True, 0, -1, 2**64, 1e308, "", "x" * 5000, "\x00\ud7ff", [], [[]], {}, {"type": []}, DEEP]
VALUES += ["text", "tool_use", "function", "{}", "[1]", {"type": "text", "text": 5}, {"role": "user", "content": None}]


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where all values are."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, one in inner for place in places_in(one, (*path, key)))]


def changed(body: dict[str, Any], random: Random) -> Any:
    """The same with one or two values changed, doubled or left out."""
    body = deepcopy(body)
    for _ in range(random.randint(1, 2)):
        *path, key = random.choice(places_in(body)[1:])
        inner: Any = body
        for step in path:
            inner = inner[step]
        match random.randrange(3):
            case 0 if isinstance(inner, dict):
                del inner[key]
            case 1 if isinstance(inner, list):
                inner.extend(inner)
            case _:
                inner[key] = deepcopy(random.choice(VALUES))
    return body


def translated(body: MessagesRequest | ResponsesRequest) -> tuple[Transcript, Offer]:
    """All that a route does before it opens a request."""
    body.refuse_what_is_not_served()
    if isinstance(body, MessagesRequest):
        anthropic.variables_of(body)
        anthropic.parameters_of(body)
        return anthropic.transcript_of(body), anthropic.offer_of(body)
    responses.variables_of(body)
    responses.parameters_of(body)
    orjson.dumps(echo_of(body))
    return responses.transcript_of(body), responses.offered_of(body).offer


def test_nearly_right_conversations_are_translated_or_refused() -> None:
    num_refused = num_translated = 0
    for seed in range(10 * settings().max_examples):
        random = Random(seed)
        schema: Any = random.choice((MessagesRequest, ResponsesRequest))
        given = changed(MESSAGES if schema is MessagesRequest else RESPONSE, random)
        try:
            transcript, offered = translated(schemas.parse(schema, json.dumps(given).encode()))
            json.dumps([transcript.messages(), offered.for_template()])  # as they go to the process that renders
            num_translated += 1
        except RouterError as error:
            num_refused += 1
            assert len(str(error)) < 600 and not INTERNALS.search(str(error)), (seed, str(error))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {given}") from error
    assert min(num_refused, num_translated) > 2 * settings().max_examples
