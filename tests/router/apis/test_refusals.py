"""What is wrong with a body is one sentence that names it as its client wrote it, in the shape of the client's API.

Rules on parameters that all APIs share are held by `tests/router/requests/test_validation.py`; here are those that an
API has of its own, and that the others' names are translated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.router.served import Served, served
from tests.router.site import PROMPT

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
SAID = [{"role": "user", "content": PROMPT}]
FUNCTION = {"name": "weather", "description": "?", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
FLAT = {"type": "function", **FUNCTION}
OF_ANTHROPIC = {"name": "weather", "input_schema": {"type": "object"}}
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SAID, "temperature": 0, "tools": [TOOL]},
    TEXT: {"prompt": PROMPT, "temperature": 0},
    MESSAGES: {"messages": SAID, "temperature": 0, "tools": [OF_ANTHROPIC]},
    RESPONSES: {"input": PROMPT, "temperature": 0, "tools": [FLAT]},
}
LOGPROBS = ["message.output_text.logprobs"]
LARGE = {"type": "json_schema", "schema": {"enum": ["x" * 70_000]}}


def allowed(*names: Any, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def called(arguments: Any, **fields: Any) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}, **fields}
    return {"messages": [*SAID, {"role": "assistant", "content": None, "tool_calls": [call]}]}


def blocks(role: str, *found: Any) -> dict[str, Any]:
    return {"messages": [*SAID, {"role": role, "content": [*found]}]}


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [*SAID, fields]}


def flat_call(arguments: Any) -> dict[str, Any]:
    return item(type="function_call", call_id="1", name="f", arguments=arguments)


OF_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "`messages` is empty"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    ({"max_tokens": 0}, "`max_tokens` must be strictly positive"),
    ({"max_tokens": 5000}, "prompt tokens + `max_tokens` must be <= 4500"),
    ({"temperature": -1}, "`temperature` must be >= 0. Given: -1.0"),
    ({"n": 17}, "`n` must be > 0 and <= 16. Given: 17"),
    ({"model": "x" * 257}, "`model`: string should have at most 256 characters"),
    ({"response_format": {"type": "xml"}}, "`response_format.type` must be one of text,"),
    ({"chat_template_kwargs": {"messages": 1}}, "not the template's own"),
    ({"continue_final_message": True}, "last message of the role assistant"),
    ({"chat_template": "{{ 1 }}"}, "`chat_template` is not served: the server has its own"),
    ({"best_of": 2}, "`best_of` is not served in chats: ask for `n` answers"),
    ({"echo": True}, "`echo` is not served"),
    ({"top_logprobs": 2}, "`top_logprobs` is 2 without `logprobs`"),
    ({"logprobs": True, "top_logprobs": 21}, "`top_logprobs` must be >= 0 and <= 20"),
    ({"logprobs": True, "top_logprobs": -1}, "`top_logprobs` must be >= 0 and <= 20"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "include_reasoning": False}, "leave it or `include_reasoning` out"),
    ({"functions": [FUNCTION]}, "`functions` is not served: send its successor, `tools`"),
    ({"function_call": {"name": "x"}}, "`function_call` is not served: send its successor, `tool_choice`"),
    ({"tools": [{"type": "custom"}]}, "`tools.0` is of type custom"),
    ({"tools": [{"type": "function"}]}, "`tools.0.function` is missing"),
    ({"tools": [{"function": {"name": 5}}]}, "`tools.0.function.name` must be a string"),
    ({"tools": [{"function": {"name": "a b"}}]}, "names have 1 to 128 letters"),
    ({"tools": [{"function": {"name": "x" * 129}}]}, "names have 1 to 128 letters"),
    ({"tools": [TOOL, TOOL]}, "two functions with the name weather"),
    ({"tools": [{"function": {"name": f"f{n}"}} for n in range(513)]}, "has 513 tools: give at most 512"),
    ({"tools": [{"function": {"name": "f", "description": 5}}]}, "description` must be a string"),
    ({"tools": [{"function": {"name": "f", "description": "x" * 600_000}}]}, "characters of JSON: give at most"),
    ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "must be a JSON schema"),
    ({"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]}, "of the type object"),
    ({"tools": [{"function": {"name": "f", "strict": "yes"}}]}, "strict` must be true or false"),
    ({"tool_choice": "other"}, "`tool_choice` is other, which is neither auto, none, required nor the name"),
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "`tool_choice` is x, which is neither"),
    ({"tool_choice": {"type": "function"}}, "`tool_choice` must be"),
    ({"tool_choice": {"type": "allowed_tools"}}, "`tool_choice.allowed_tools` needs a `mode`"),
    ({"tool_choice": allowed({})}, "`tool_choice` allows {}"),
    ({"tool_choice": allowed("x")}, "`tool_choice` allows x"),
    ({"tools": [], "tool_choice": "required"}, "there are no `tools`"),
    (called(5), "must be an object of JSON"),
    (called('{"a":' * 70 + "1" + "}" * 70), "is nested deeper than 64"),
    (called(f"[{'1,' * 20_000}1]"), "has more than 10000 values"),
    (called("{}", function="f"), "`messages.1.tool_calls.0.function` must be an object"),
    (called("{}", id=5), "`messages.1.tool_calls.0.id` must be a string"),
]
OF_TEXTS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema"}}, "must have a `schema`, an object"),
    ({"response_format": {"type": "regex"}}, "`response_format.value` is missing"),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "are both given: give one"),
    ({"prompt": []}, "`prompt` has 0 prompts"),
    ({"prompt": ["a"] * 5}, "`prompt` has 5 prompts: give 1 to 4"),
    ({"prompt": [999]}, "has token 999"),
    ({"prompt": [2**32 - 1], "echo": True}, "has token 4294967295"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": None}, "`prompt`: input should be a valid string"),
    ({"suffix": "x"}, "`suffix` is not served"),
    ({"return_token_ids": True}, "`return_token_ids` is not served"),
    ({"structured_outputs": {"x": 1}}, "`structured_outputs.x` is not served"),
    ({"logit_bias": {"x": 1}}, "has the key 'x', which is no token id"),
    ({"stream_options": {"include_usage": 5}}, "`stream_options.include_usage`: "),
    ({"logprobs": 21}, "`logprobs` must be >= 0 and <= 20 (max_top_n_tokens). Given: 21"),
    ({"logprobs": -1}, "`logprobs` must be >= 0 and <= 20"),
    ({"logprobs": "x"}, "logprobs"),
    ({"max_tokens": 0}, "`max_tokens` is 0, so that nothing would be answered"),
    ({"max_tokens": -1, "echo": True}, "`max_tokens` must be strictly positive"),
    ({"best_of": 2, "n": 3}, "`best_of` must be >= `n`, here 3. Given: 2"),
    ({"best_of": 17}, "`best_of` must be <= 16 (max_n). Given: 17"),
    ({"best_of": 0}, "`best_of` must be >= `n`"),
]
OF_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "no message of the user: give at least one"),
    ({"messages": None}, "messages"),
    ({"messages": [], "system": "x"}, "no message of the user"),
    ({"messages": [{"role": "boss", "content": "x"}]}, "`messages.0.role` is boss: give one of user, assistant"),
    (blocks("user", {"type": "image"}), "`messages.1.content.0` is of type image: of the role user, the"),
    (blocks("user", {"type": "tool_use", "id": "1", "name": "f", "input": {}}), "is of type tool_use"),
    (blocks("assistant", {"type": "tool_result", "tool_use_id": "1"}), "is of type tool_result"),
    (blocks("user", {"type": ["x"] * 50}), "text and tool_result alone"),
    (blocks("user", {"type": "text"}), "`messages.1.content.0.text` must be a string"),
    (blocks("assistant", {"type": "tool_use", "id": "1", "name": "f", "input": "x"}), "0.input` must be an object"),
    (blocks("user", {"type": "tool_result", "content": "x"}), "0.tool_use_id` must be a string"),
    (blocks("user", {"type": "tool_result", "tool_use_id": "1", "content": 5}), "0.content` must be a text or"),
    (
        blocks("user", {"type": "tool_result", "tool_use_id": "1", "content": [{"type": 5}]}),
        "`messages.1.content.0.content.0` is of type 5, and the model reads text alone",
    ),
    ({"context_management": {"edits": [{"type": "compact"}]}}, "`context_management.edits.0` is of type compact"),
    (
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": {"value": 0}}]}},
        "`context_management.edits.0.keep` must be",
    ),
    ({"system": [{"type": "image"}]}, "`system.0` is of type image"),
    ({"max_tokens": 5000}, "prompt tokens + `max_tokens` must be <= 4500"),
    ({"temperature": 1.5}, "`temperature` must be >= 0 and <= 1. Given: 1.5"),
    ({"top_k": -1}, "`top_k` must be >= 0"),
    ({"stop_sequences": [""]}, "`stop_sequences` has an empty sequence"),
    ({"thinking": {"type": "sometimes"}}, "`thinking.type` is sometimes: give one of enabled"),
    ({"container": "c"}, "`container` is not served"),
    ({"output_config": {"effort": "some"}}, "`output_config.effort` is some: give one of low, medium, high"),
    ({"mcp_servers": [{}]}, "`mcp_servers` is not served"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "`output_config.format.schema` must be a JSON schema"),
    ({"output_config": {"format": {"type": "xml"}}}, "`output_config.format.type` is xml: give json_schema"),
    ({"tools": None, "output_config": {"format": LARGE}}, "`output_config.format` has 70"),
    ({"tools": [{"type": "bash_20250124", "name": "x"}]}, "`tools.0` is of type bash_20250124, and only tools of the"),
    ({"tools": [{"type": "web_search_1"}], "tool_choice": {"type": "any"}}, "there are no `tools`"),
    ({"tools": [{"name": "f"}]}, "`tools.0.input_schema` must be a JSON schema of the type object"),
    ({"tool_choice": {"type": "some"}}, "`tool_choice.type` is some: give auto, any, tool or none"),
    ({"tool_choice": {"type": "tool"}}, "`tool_choice.name` must be a string"),
    ({"tool_choice": {"type": "tool", "name": "other"}}, "`tool_choice` is other, which is neither"),
    ({"tools": None, "tool_choice": {"type": "any"}}, "there are no `tools`"),
]
NAMESPACE = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "time"}]}
OF_RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "no message of the user: give at least one"),
    ({"input": 5}, "input"),
    (item(role="boss", content="x"), "`input.1.role` is boss"),
    (item(role="user", content=5), "`input.1.content` must be a text or a list of parts"),
    (item(role="user", content=[{"type": "input_image"}]), "`input.1.content.0` is of type input_image, and the"),
    (item(type="item_reference", id="x"), "`input.1` refers to an item that is stored"),
    (item(type="web_search_call", id="x"), "`input.1` is of type web_search_call"),
    (flat_call({}), "`input.1.arguments` must be a string"),
    (flat_call(f'{{"x":{"[" * 99 + "]" * 99}}}'), "deeper than 64"),
    (flat_call(f"[{'1,' * 20000}1]"), "more than 10000 values"),
    (item(type="function_call_output", output="x"), "`input.1.call_id` must be a string"),
    ({"previous_response_id": "resp_1"}, "`previous_response_id` needs responses that are stored"),
    ({"background": True}, "`background` needs responses that are stored"),
    ({"prompt": {"id": "x"}}, "`prompt` is not served"),
    ({"top_logprobs": 2}, "`top_logprobs` is 2, and `include` has no message.output_text.logprobs: add it"),
    (
        {"tools": [], "include": LOGPROBS, "top_logprobs": 99},
        "`top_logprobs` must be >= 0 and <= 20 (max_top_n_tokens)",
    ),
    ({"include": LOGPROBS}, "`include` has message.output_text.logprobs, which answers that may"),
    ({"text": {"format": {"type": "xml"}}}, "`text.format.type` is xml: give one of text, json_object, "),
    ({"text": {"format": {"type": "json_schema"}}}, "`text.format.schema` must be a JSON schema, an object"),
    ({"tools": [], "text": {"format": LARGE}}, "`text.format` has 70"),
    ({"max_output_tokens": 0}, "`max_output_tokens` must be strictly positive"),
    ({"max_output_tokens": 5000}, "prompt tokens + `max_output_tokens` must be <= 4500"),
    ({"metadata": {"x": "y" * 513}}, "`metadata` may have 16 pairs"),
    ({"metadata": {"x": 1}}, "metadata.x"),
    ({"reasoning": {"effort": "x" * 65}}, "reasoning.effort"),
    ({"tools": [{"type": "local_shell"}]}, "`tools.0` is of type local_shell, and only functions, custom tools"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "there are no `tools`"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "`tools.0.tools` must be a list of functions"),
    ({"tools": [{"type": "namespace", "tools": []}]}, "`tools.0.name` must be a string"),
    ({"tools": [NAMESPACE | {"name": "n" * 123}]}, "with its namespace: the model sees at most 128 characters"),
    ({"tools": [NAMESPACE | {"name": "a b"}]}, "names have 1 to 128 letters"),
    ({"tools": [NAMESPACE, NAMESPACE]}, "two functions with the name n__time"),
    ({"tools": [{"type": "custom", "name": "x", "description": 5}]}, "`tools.0.description` must be a string"),
    ({"tools": [{"type": "custom", "name": "x", "format": {"type": "xml"}}]}, "`tools.0.format` must be of type text"),
    ({"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar"}}]}, "`tools.0.format.syntax` must be a"),
    (item(type="custom_tool_call", call_id="1", name="x"), "`input.1.input` must be a string"),
    (item(type="custom_tool_call", call_id="1", name="x", namespace=5), "`input.1.namespace` must be a string"),
    ({"tools": [{"type": "function"}]}, "`tools.0.name` must be a string"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "what is in `tools.0.function` goes into `tools.0`"),
    ({"tool_choice": "some"}, "`tool_choice` is some: give auto, none, required, or one function by its name"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "needs a `mode`, auto or required, and a list"),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "other"}]}},
        "`tool_choice` allows other, which is not among `tools`",
    ),
    ({"tool_choice": {"type": "web_search"}}, "`tool_choice` is web_search"),
    ({"tool_choice": {"type": "function"}}, "`tool_choice.name` must be a string"),
]
WRONG = [
    *((CHAT, *one) for one in OF_CHATS),
    *((TEXT, *one) for one in OF_TEXTS),
    *((MESSAGES, *one) for one in OF_MESSAGES),
    *((RESPONSES, *one) for one in OF_RESPONSES),
]


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = {"tool_call_parser": "hermes", "max_client_batch_size": 4}
    with served(tmp_path_factory.mktemp("refusing"), lambda _: "one two", **settings) as site:
        yield site


@pytest.mark.parametrize(("path", "changes", "sentence"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_400_in_the_shape_of_its_api(
    it: Served, path: str, changes: dict[str, Any], sentence: str
) -> None:
    num_steps = len(it.site.shards.requests)
    for stream in (False, True):
        answer = it.http.post(path, json={**BASES[path], **changes, "stream": stream})
        assert 400 == answer.status_code, answer.text
        body = answer.json()
        assert ("invalid_request_error", "validation") == (body["error"]["type"], body["error_type"])
        assert sentence in body["error"]["message"] and "`truncate`" not in body["error"]["message"]
        if path == MESSAGES:
            assert {"type", "error", "error_type"} == set(body) and "error" == body["type"]
        else:
            is_long = "tokens` must be <= 4500" in sentence
            assert body["error"]["code"] == ("context_length_exceeded" if is_long else None)
    assert num_steps == len(it.site.shards.requests)


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(it: Served) -> None:
    long = [{"role": "user", "content": "a" * 5000}]
    known = r"This model's maximum context length is 4500 tokens"
    for path, changes, words in (
        (TEXT, {"prompt": "a" * 20, "max_tokens": 5000}, rf"{known}\. However, you requested 5020 tokens \(20 in the"),
        (TEXT, {"prompt": "a" * 4100}, rf"{known}, of which a prompt may have 4000. However, your prompt has 4100"),
        (CHAT, {"messages": long}, rf"{known}.*However, your prompt has"),
        (RESPONSES, {"input": "a" * 5000}, rf"{known}.*However, your prompt has"),
        (MESSAGES, {"max_tokens": 5000}, r"input length and `max_tokens` exceed context limit: \d+ \+ 5000 > 4500\. "),
        (MESSAGES, {"messages": long}, r"prompt is too long: \d+ tokens > \d+ maximum\. "),
    ):
        error = it.http.post(path, json={**BASES[path], "tools": [], **changes}).json()["error"]
        assert re.match(words, error["message"]), error
    error = it.http.post("/generate", json={"inputs": "a" * 4100}).json()["error"]
    assert error.startswith("Input validation error: `inputs` must have less than 4001 tokens. Given: 4100")
