"""Tools that a chat's request offers to the model, which of them it is to call, and what of that is refused.

Left out: what tools look like in each API, how models write calls (`formats.py`), and how those are read
(`reader.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from router.errors import ValidationError

MOST_TOOLS = 512
MOST_CHARACTERS = 512 * 1024  # of all tools as JSON: each request writes them into its prompt
MOST_DEPTH = 64  # of a schema, and of the arguments of a call: far beyond any that people write
MOST_NAME = 128  # characters of a name: as many as Anthropic allows, twice as many as OpenAI
NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MOST_NAME}}}")
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. parameters: the JSON schema of its arguments, an object.

    strict: whether arguments are to keep to the schema, whatever the choice.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it: in OpenAI's shape, with parameters even where there are none."""
        described = {} if self.description is None else {"description": self.description}
        parameters = self.parameters or NO_PARAMETERS
        return {"type": "function", "function": {"name": self.name, **described, "parameters": parameters}}


def tool_in(where: str, given: Mapping[str, Any], schema: str = "parameters") -> Tool:
    """A tool as APIs write it. Raises ValidationError. where: it is in the body; schema: what its schema is called."""
    name, description, strict = given.get("name"), given.get("description"), given.get("strict")
    if not isinstance(name, str):
        nested = f": what is in `{where}.function` goes into `{where}` itself here" if "function" in given else ""
        raise ValidationError(f"`{where}.name` must be a string{nested}")
    if not isinstance(description, str | None):
        raise ValidationError(f"`{where}.description` must be a string")
    if not isinstance(given.get(schema), dict | None):
        raise ValidationError(f"`{where}.{schema}` must be a JSON schema of the type object")
    if not isinstance(strict, bool | None):
        raise ValidationError(f"`{where}.strict` must be true or false")
    return Tool(name, description, given.get(schema), strict is True)


def allowed_of(tools: Sequence[Tool], names: Sequence[Any]) -> list[Tool]:
    """The tools of these names, as a choice lists them. Raises ValidationError for a name that none has."""
    known = {tool.name for tool in tools}
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise ValidationError(
                f"`tool_choice` allows {str(name)[:64]}, which is not among `tools`: name one of them"
            )
    wanted = set(names)
    return [tool for tool in tools if tool.name in wanted]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools the model is to call. name: the one that it must; the mode is `required` then.

    is_parallel: whether one answer may have several calls.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    is_parallel: bool = True


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools of one request that the model gets to see, and what it is to do with them.

    Without tools the model answers in text. Made by `offer`, which checks it.
    """

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """Those that the answer may call."""
        return tuple(tool for tool in self.tools if self.choice.name in (None, tool.name))

    @property
    def is_held(self) -> bool:
        """Whether an answer, or a call in it, is held to the schemas of the tools."""
        return self.choice.mode == "required" or any(tool.strict for tool in self.tools)

    def for_template(self) -> list[dict[str, Any]]:
        """As `ChatTemplate.render` takes them."""
        return [tool.for_template() for tool in self.tools]


def offer(tools: Sequence[Tool], choice: ToolChoice) -> Offer:
    """What the model gets to see. Raises ValidationError.

    With the mode `none` it sees no tools: the surest way that it calls none.
    """
    if len(tools) > MOST_TOOLS:
        raise ValidationError(f"`tools` has {len(tools)} tools: give at most {MOST_TOOLS}")
    seen: set[str] = set()
    for tool in tools:
        _check(tool)
        if tool.name in seen:
            raise ValidationError(f"`tools` has two functions with the name {tool.name}: give each a name of its own")
        seen.add(tool.name)
    if choice.name is not None and choice.name not in seen:
        raise ValidationError(
            f"`tool_choice` is {choice.name[:64]}, which is neither auto, none, required nor the name of one of `tools`"
        )
    if choice.mode == "required" and not tools:
        raise ValidationError("`tool_choice` requires a call, and there are no `tools`: give at least one")
    if (length := sum(len(json.dumps(tool.for_template(), ensure_ascii=False)) for tool in tools)) > MOST_CHARACTERS:
        raise ValidationError(f"`tools` have {length} characters of JSON: give at most {MOST_CHARACTERS}")
    return Offer() if choice.mode == "none" else Offer(tuple(tools), choice)


def _check(tool: Tool) -> None:
    if not NAME.fullmatch(tool.name):
        raise ValidationError(
            f"`tools` has a function with the name {tool.name[:MOST_NAME]!r}, of {len(tool.name)} characters: names "
            f"have 1 to {MOST_NAME} letters, digits, `_` and `-`"
        )
    parameters = tool.parameters or {}
    if parameters.get("type", "object") != "object":
        raise ValidationError(f"the `parameters` of the function {tool.name} must be a JSON schema of the type object")
    if is_deeper(parameters, MOST_DEPTH):
        raise ValidationError(
            f"the `parameters` of the function {tool.name} are nested deeper than {MOST_DEPTH}: flatten the schema"
        )


def is_deeper(value: Any, most: int) -> bool:
    """Whether a value of JSON is nested deeper than so many arrays and objects."""
    level = [value]
    for _ in range(most + 1):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return False
    return True
