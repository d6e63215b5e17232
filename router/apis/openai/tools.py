"""Tools and calls in the shapes of OpenAI's chats, to and from the words of `router/chat`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from router.chat import prompting
from router.chat.tools import MOST_DEPTH, Offer, Tool, ToolChoice, allowed_of, is_deeper, offer, tool_in
from router.errors import ValidationError
from router.requests.schemas import MOST_VALUES, refuse_excess_within

Json = dict[str, Any]


def tools_of(given: Sequence[Mapping[str, Any]], choice: str | Json | None, *, is_parallel: bool) -> Offer:
    """What `tools` offer, and `tool_choice` lets the model choose. Raises ValidationError."""
    tools = [_tool(f"tools.{number}", one) for number, one in enumerate(given)]
    return offer(*_chosen(tools, choice, is_parallel))


def _tool(where: str, given: Mapping[str, Any]) -> Tool:
    if given.get("type", "function") != "function":
        raise ValidationError(f"`{where}` is of type {str(given['type'])[:64]}: functions alone are served")
    function = given.get("function")
    if not isinstance(function, dict):
        raise ValidationError(f"`{where}.function` is missing: give an object with a `name`")
    schema = "parameters" if "parameters" in function else "arguments"  # TGI takes both names
    return tool_in(f"{where}.function", function, schema)


def _chosen(tools: list[Tool], given: str | Json | None, is_parallel: bool) -> tuple[list[Tool], ToolChoice]:
    """The tools and the choice of a `tool_choice`: a mode, a name, or one of OpenAI's objects."""
    if given is None or given == "auto":
        return tools, ToolChoice("auto", is_parallel=is_parallel)
    if given == "none":
        return tools, ToolChoice("none")
    if given == "required":
        return tools, ToolChoice("required", is_parallel=is_parallel)
    if isinstance(given, str):
        return tools, ToolChoice("required", given, is_parallel=False)
    if given.get("type") == "allowed_tools":
        return _allowed(tools, given.get("allowed_tools"), is_parallel)
    function = given.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if given.get("type", "function") != "function" or not isinstance(name, str):
        raise ValidationError(
            '`tool_choice` must be "auto", "none", "required", or {"type": "function", "function": {"name": a name}}'
        )
    return tools, ToolChoice("required", name, is_parallel=False)


def _allowed(tools: list[Tool], given: Any, is_parallel: bool) -> tuple[list[Tool], ToolChoice]:
    """Some of the tools, each named as in `tools`."""
    listed = given.get("tools") if isinstance(given, dict) else None
    if not isinstance(listed, list) or given.get("mode") not in ("auto", "required"):
        raise ValidationError('`tool_choice.allowed_tools` needs a `mode`, "auto" or "required", and a list of `tools`')
    functions = [one.get("function") for one in listed if isinstance(one, dict)]
    names = [one.get("name") for one in functions if isinstance(one, dict)]
    return allowed_of(tools, names), ToolChoice(given["mode"], is_parallel=is_parallel)


def refuse_excess_of_calls(given: Iterable[Mapping[str, Any]]) -> None:
    """Raises ValidationError where the texts of arguments have more values together than a body may have."""
    functions = [one.get("function") for one in given]
    texts = [one.get("arguments") for one in functions if isinstance(one, dict)]
    refuse_excess_within((text.encode() for text in texts if isinstance(text, str)), MOST_VALUES)


def calls_of(where: str, given: Sequence[Mapping[str, Any]]) -> list[Json]:
    """The `tool_calls` of a message, as templates take them. Raises ValidationError."""
    return [_call(f"{where}.{number}", one) for number, one in enumerate(given)]


def _call(where: str, given: Mapping[str, Any]) -> Json:
    function, id = given.get("function"), given.get("id")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise ValidationError(f"`{where}.function` must be an object with a `name` and `arguments`")
    if not isinstance(id, str | None):
        raise ValidationError(f"`{where}.id` must be a string")
    return prompting.call(id, name, _arguments(f"{where}.function.arguments", function.get("arguments")))


def _arguments(where: str, given: Any) -> Json:
    """An object, or a text of JSON that has one, as OpenAI's clients send it."""
    value = given or {}
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except ValueError:
            raise ValidationError(
                f"`{where}` is not JSON: send the arguments as the model gave them, or {{}}"
            ) from None
    if not isinstance(value, dict):
        raise ValidationError(f"`{where}` must be an object of JSON, as a text")
    if is_deeper(value, MOST_DEPTH):
        raise ValidationError(f"`{where}` is nested deeper than {MOST_DEPTH}: flatten it")
    return value
