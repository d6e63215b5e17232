"""Every field of the APIs' published request objects: it has its effect, is refused by name, or changes nothing.

The objects are those of OpenAI's and Anthropic's own Python clients. Each field is sent by itself with a legal value
that is not its default. What is ignored is a table of docs/apis.md, which is generated from the one below.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from router.apis.anthropic.routes import MessagesRequest
from router.apis.openai.requests import ChatRequest, CompletionRequest
from router.apis.openai.responses.routes import ResponsesRequest
from router.requests.schemas import Lenient
from tests.router.doubles import fake_shards, make_limits
from tests.router.served import LIMITS, replying
from tests.router.site import PROMPT, Site, site
from tests.running import ROOT

PAGE = ROOT / "docs" / "apis.md"
TEMPLATE = (
    "{{ messages | tojson }}{{ tools | default('') | tojson }}{{ enable_thinking | default('') }}"
    "{{ reasoning_effort | default('') }}\x01"
)
NOTHING = "does not change the text"
STORED = "nothing is stored"
TIER = "there is one tier"
CACHED = "prefixes are always cached"
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
SAID = [{"role": "user", "content": PROMPT}]


@dataclass(frozen=True)
class Api:
    """Its published fields, what reads them here, a body without any, a value of each, and what changes nothing.

    beside: what a field needs beside it; elsewhere: fields whose effect another test shows.
    """

    path: str
    published: Any  # a TypedDict
    schema: type[Lenient]
    base: Mapping[str, Any]
    values: Mapping[str, Any]
    ignored: Mapping[str, str]
    beside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    @property
    def fields(self) -> list[str]:
        """All that its client knows of."""
        known = self.published.__required_keys__ | self.published.__optional_keys__
        return sorted(known)


GRAMMARS = "tests/system/test_grammars.py"
OF_COMPLETIONS = {
    "frequency_penalty": 0.5, "logit_bias": {"65": -1}, "max_tokens": 3, "model": "any", "n": 2,
    "presence_penalty": 0.5, "seed": 2, "stop": ["e"], "stream": True, "stream_options": {"include_usage": True},
    "temperature": 0, "top_p": 0.5, "user": "me",
}  # fmt: skip
STREAMED = {"stream_options": {"stream": True}}
CHAT = Api(
    "/v1/chat/completions",
    chat_create_params.CompletionCreateParamsStreaming,
    ChatRequest,
    {"messages": SAID, "seed": 1, "max_tokens": 12},
    {
        **OF_COMPLETIONS, "audio": {"format": "mp3", "voice": "a"}, "function_call": {"name": "f"},
        "functions": [FUNCTION], "logprobs": True, "max_completion_tokens": 3, "messages": [*SAID, *SAID],
        "metadata": {"a": "b"}, "modalities": ["audio"], "moderation": {"model": "m"}, "parallel_tool_calls": False,
        "prediction": {"type": "content", "content": "x"}, "prompt_cache_key": "k",
        "prompt_cache_options": {"mode": "explicit"}, "prompt_cache_retention": "24h", "reasoning_effort": "high",
        "response_format": {"type": "json_object"}, "safety_identifier": "me", "service_tier": "flex", "store": True,
        "tool_choice": "none", "tools": [TOOL], "top_logprobs": 2, "verbosity": "low", "web_search_options": {},
    },
    {
        "metadata": STORED, "prompt_cache_key": CACHED, "prompt_cache_options": CACHED,
        "prompt_cache_retention": CACHED, "safety_identifier": NOTHING, "service_tier": TIER, "store": STORED,
        "user": NOTHING,
    },
    {**STREAMED, "tool_choice": {"tools": [TOOL]}, "top_logprobs": {"logprobs": True}},
    {
        "response_format": GRAMMARS, "parallel_tool_calls": "tests/system/test_tools.py",
        "prediction": "tests/router/apis/openai/test_routes.py",
    },
)  # fmt: skip
TEXT = Api(
    "/v1/completions",
    completion_create_params.CompletionCreateParamsStreaming,
    CompletionRequest,
    {"prompt": f"{PROMPT}\x01", "seed": 1, "max_tokens": 12},
    {**OF_COMPLETIONS, "best_of": 2, "echo": True, "logprobs": 2, "prompt": "another\x01", "suffix": "x"},
    {"user": NOTHING},
    STREAMED,
    {"best_of": "tests/router/apis/openai/test_routes.py"},
)  # fmt: skip
RESPONSES = Api(
    "/v1/responses",
    response_create_params.ResponseCreateParamsStreaming,
    ResponsesRequest,
    {"input": PROMPT, "temperature": 0, "max_output_tokens": 12},
    {
        "access_programs": ["p"], "background": True, "background_options": {"x": 1},
        "context_management": [{"type": "compaction"}], "conversation": "c", "frequency_penalty": 0.5,
        "image": {"x": 1}, "include": ["message.output_text.logprobs"], "input": "another",
        "instructions": "Be brief.", "max_output_tokens": 3, "max_tool_calls": 2, "metadata": {"a": "b"},
        "model": "any", "moderation": {"model": "m"}, "parallel_tool_calls": False, "presence_penalty": 0.5,
        "previous_response_id": "r", "prompt": {"id": "p"}, "prompt_cache_key": "k",
        "prompt_cache_options": {"mode": "explicit"}, "prompt_cache_retention": "24h",
        "reasoning": {"effort": "high"}, "safety_identifier": "me", "service_tier": "flex", "store": True,
        "stream": True, "stream_options": {"include_obfuscation": False}, "temperature": 1,
        "text": {"format": {"type": "json_object"}}, "tool_choice": "none",
        "tools": [{"type": "function", **FUNCTION}], "top_logprobs": 2, "top_p": 0.5, "truncation": "auto",
        "user": "me",
    },
    {
        "prompt_cache_options": CACHED, "prompt_cache_retention": CACHED, "service_tier": TIER, "store": STORED,
        "stream_options": "events are not obfuscated", "truncation": "long inputs are refused", "user": NOTHING,
    },
    {"tool_choice": {"tools": [{"type": "function", **FUNCTION}]}, "top_p": {"temperature": 1},
     "top_logprobs": {"include": ["message.output_text.logprobs"]}},
    {"text": GRAMMARS},
)  # fmt: skip
MESSAGES = Api(
    "/v1/messages",
    message_create_params.MessageCreateParamsStreaming,
    MessagesRequest,
    {"messages": SAID, "temperature": 0, "max_tokens": 12},
    {
        "cache_control": {"type": "ephemeral"}, "container": "c", "diagnostics": {"x": 1}, "inference_geo": "eu",
        "max_tokens": 3, "messages": [*SAID, *SAID], "metadata": {"user_id": "me"}, "model": "any",
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        "service_tier": "standard_only", "speed": "fast", "stop_sequences": ["e"], "stream": True,
        "system": "Be brief.", "temperature": 1, "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tool_choice": {"type": "none"},
        "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {}}}], "top_k": 3, "top_p": 0.5,
        "user_profile_id": "u", "workspace_id": "w",
    },
    {
        "cache_control": CACHED, "diagnostics": NOTHING, "metadata": STORED, "service_tier": TIER,
        "speed": "there is one speed", "user_profile_id": NOTHING, "workspace_id": NOTHING,
    },
    {
        "tool_choice": {"tools": [{"name": "f", "input_schema": {"type": "object", "properties": {}}}]},
        "top_k": {"temperature": 1}, "top_p": {"temperature": 1},
    },
    {"output_config": GRAMMARS},
)  # fmt: skip
APIS = [CHAT, TEXT, RESPONSES, MESSAGES]


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
async def test_every_published_field_is_taken_refused_or_known_to_change_nothing(api: Api, tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    assert not set(api.fields) - api.values.keys(), "published since: give each a value, and see what becomes of it"

    config = {"chat_template": str(tmp_path / "template.jinja"), "reasoning_parser": "none"}
    shards = fake_shards(make_limits(**LIMITS), **replying(lambda _: "one two"))
    async with site(shards, config=config, **LIMITS) as it:
        it.http.timeout = 60  # the first chat waits for a process
        usual: dict[str, Any] = {}
        for name in api.fields:
            beside = {**api.base, **api.beside.get(name, {})}
            if (without := json.dumps(beside)) not in usual:
                usual[without] = await effect(it, api, beside)
            status, *found = await effect(it, api, {**beside, name: api.values[name]})
            if name in api.schema.not_served:
                assert 400 == status and f"`{name}` " in found[0], name
            elif name in api.ignored:
                assert [status, *found] == usual[without], name
            elif name not in api.elsewhere:
                assert 200 == status and [status, *found] != usual[without], (name, found)


async def effect(it: Site, api: Api, body: Mapping[str, Any]) -> list[Any]:
    """The status, the answer but for what is always another, and what the shards were asked."""
    num_steps = len(it.shards.requests)
    answer = await it.http.post(api.path, json=body)
    added = [new for step in it.shards.requests[num_steps:] for new in step.add]
    asked = [([*new.token_ids], sampling_of(new, api)) for new in added]
    if "text/event-stream" in answer.headers["content-type"]:
        return [answer.status_code, answer.text.count("data: "), "usage" in answer.text, asked]
    told = answer.json()
    return [answer.status_code, told["error"]["message"]] if told.get("error") else [
        answer.status_code, json.dumps(without_names(told)), asked
    ]  # fmt: skip


def sampling_of(new: Any, api: Api) -> str:
    """How tokens are chosen; a seed is another each time where the API has none."""
    return "\n".join(line for line in str(new.sampling).splitlines() if "seed" in api.fields or "seed" not in line)


NAMES = {"id", "created", "created_at", "completed_at"}


def without_names(value: Any) -> Any:
    """A body without ids and times."""
    if isinstance(value, dict):
        return {name: without_names(inner) for name, inner in value.items() if name not in NAMES}
    return [without_names(one) for one in value] if isinstance(value, list) else value


def table() -> str:
    """What is ignored, as Markdown."""
    rows = ["| Path | Field | Why |", "|---|---|---|"]
    for api in APIS:
        by_reason: dict[str, list[str]] = {}
        for name, reason in sorted(api.ignored.items()):
            by_reason.setdefault(reason, []).append(f"`{name}`")
        rows += [f"| `{api.path}` | {', '.join(names)} | {reason} |" for reason, names in by_reason.items()]
    return "\n".join(rows)


def test_the_page_has_the_fields_that_are_ignored() -> None:
    assert table() in PAGE.read_text(), f"put this into {PAGE.name}:\n{table()}"
