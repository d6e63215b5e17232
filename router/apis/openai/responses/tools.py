"""Tools of OpenAI's responses: what the model gets to see of them, and what its calls are named in the answer.

The model sees functions alone. One of a namespace has both names, `NAMESPACE__NAME`. A custom tool, which takes a text
of any kind, is a function with that text as its argument. Tools that OpenAI's servers would run are not shown: an agent
offers them unasked, and the model does without.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from router.chat.streamed_values import NotThis, json_of
from router.chat.tools import MOST_NAME, Offer, Tool, ToolChoice, allowed_of, offer, tool_in
from router.chat.transcript import string_of
from router.errors import ValidationError

Given = Mapping[str, Any]
# Without the date of a version, which some have behind it.
RUN_ELSEWHERE = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search")
INPUT = "input"  # what the text of a custom tool is called
TEXT_ALONE = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
CUT_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{0,3})?\Z")
CUT_PAIR = re.compile("[\ud800-\udbff]\\Z")  # of surrogates


@dataclass(frozen=True, slots=True)
class Named:
    """What a tool is called in the API. is_custom: whether its input is a text, and no JSON."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class Offered:
    """The tools of a request. named: by the names that the model sees, where these or the calls differ."""

    offer: Offer
    named: Mapping[str, Named] = field(default_factory=dict)


def offered(given: Sequence[Given], choice: str | Given, *, is_parallel: bool) -> Offered:
    """What `tools` and `tool_choice` mean. Raises ValidationError."""
    tools: list[Tool] = []
    named: dict[str, Named] = {}
    for where, one, namespace in _listed(given):
        tool, its = _tool(where, one, namespace)
        tools.append(tool)
        if its != Named(tool.name):
            named[tool.name] = its
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        tools, choice = _allowed(tools, choice)
    return Offered(offer(tools, _choice(choice, is_parallel)), named)


def left_out(given: Sequence[Given]) -> list[str]:
    """The types of tools that the model does not get to see, each once."""
    return list(dict.fromkeys(str(one.get("type")) for one in given if is_run_elsewhere(one)))


def is_run_elsewhere(given: Given) -> bool:
    """Whether OpenAI's servers would run a tool."""
    return str(given.get("type")).startswith(RUN_ELSEWHERE)


def shown_name(where: str, name: str, namespace: object) -> str:
    """What the model sees a tool named. Raises ValidationError."""
    if namespace is None:
        return name
    if not isinstance(namespace, str):
        raise ValidationError(f"`{where}.namespace` must be a string")
    between = "" if namespace.endswith("__") else "__"  # which those of MCP servers end with
    return f"{namespace}{between}{name}"


def input_of(arguments: str) -> str:
    """The text of a custom tool's call, as far as it goes. As the model wrote it where that is no object with it."""
    for text in (arguments, f'{arguments}"}}', f'{CUT_ESCAPE.sub("", arguments)}"}}', f"{arguments}}}"):
        with suppress(NotThis, KeyError, TypeError):
            found = json_of(text)[INPUT]
            told = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
            # Half of a surrogate pair is no text.
            return CUT_PAIR.sub("", told).encode(errors="replace").decode()
    return arguments


def _listed(given: Sequence[Given]) -> Iterator[tuple[str, Given, str | None]]:
    """(where in the body, tool, namespace), those of namespaces one by one. Raises ValidationError."""
    for number, one in enumerate(given):
        where = f"tools.{number}"
        if one.get("type") != "namespace":
            if not is_run_elsewhere(one):
                yield where, one, None
            continue
        namespace, inner = string_of(where, one, "name"), one.get("tools")
        if not isinstance(inner, list) or not all(isinstance(tool, dict) for tool in inner):
            raise ValidationError(f"`{where}.tools` must be a list of functions")
        yield from ((f"{where}.tools.{at}", tool, namespace) for at, tool in enumerate(inner))


def _tool(where: str, given: Given, namespace: str | None) -> tuple[Tool, Named]:
    kind = given.get("type")
    if kind == "function":
        tool = tool_in(where, given)
    elif kind == "custom":
        described = {**given, "description": _of_custom(where, given)}
        tool = tool_in(where, described | {"parameters": TEXT_ALONE, "strict": None})
    else:
        raise ValidationError(
            f"`{where}` is of type {str(kind)[:40]}, and only functions, custom tools and namespaces of them are "
            "served: leave it out"
        )
    name = shown_name(where, tool.name, namespace)
    if len(name) > MOST_NAME:
        raise ValidationError(
            f"`{where}` is named {name[:MOST_NAME]}… with its namespace: the model sees at most {MOST_NAME} characters"
        )
    return Tool(name, tool.description, tool.parameters, tool.strict), Named(tool.name, namespace, kind == "custom")


def _of_custom(where: str, given: Given) -> str | None:
    """What the model is told of a custom tool: its description, and the grammar that its input keeps to."""
    description, its = given.get("description"), given.get("format")
    if not isinstance(description, str | None):
        raise ValidationError(f"`{where}.description` must be a string")
    if its is None or (isinstance(its, Mapping) and its.get("type") == "text"):
        return description
    if not isinstance(its, Mapping) or its.get("type") != "grammar":
        raise ValidationError(f"`{where}.format` must be of type text, or a grammar with `syntax` and `definition`")
    syntax, definition = (string_of(f"{where}.format", its, name) for name in ("syntax", "definition"))
    return f"{description or ''}\n`{INPUT}` keeps to this grammar ({syntax}):\n{definition}".lstrip()


def _allowed(tools: Sequence[Tool], given: Given) -> tuple[list[Tool], str]:
    """Some of the tools, and the mode. Raises ValidationError."""
    listed, mode = given.get("tools"), given.get("mode")
    if mode not in ("auto", "required") or not isinstance(listed, list):
        raise ValidationError("`tool_choice` of allowed_tools needs a `mode`, auto or required, and a list of `tools`")
    names = [one if not isinstance(one, Mapping) else _name_in(one) for one in listed if not _is_hidden(one)]
    return allowed_of(tools, names), mode


def _is_hidden(given: object) -> bool:
    return isinstance(given, Mapping) and is_run_elsewhere(given)


def _name_in(given: Given) -> object:
    name = given.get("name")
    return shown_name("tool_choice", name, given.get("namespace")) if isinstance(name, str) else name


def _choice(given: str | Given, is_parallel: bool) -> ToolChoice:
    if isinstance(given, Mapping) and given.get("type") in ("function", "custom"):
        name = shown_name("tool_choice", string_of("tool_choice", given, "name"), given.get("namespace"))
        return ToolChoice("required", name, is_parallel=False)
    match given:
        case "auto" | "none" | "required":
            return ToolChoice(given, is_parallel=is_parallel)
    kind = given if isinstance(given, str) else str(given.get("type"))
    raise ValidationError(f"`tool_choice` is {kind[:40]}: give auto, none, required, or one function by its name")
