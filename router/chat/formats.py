"""How models write calls of tools and reasoning: one entry of a table for each format, and how a model's is recognised.

A model writes what its chat template taught it, so the template's own text says which format is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around what a model thinks before it answers. `sign`: what a template of such models has."""

    begin: str
    end: str
    sign: str

    @property
    def marks(self) -> tuple[str, ...]:
        """Both."""
        return (self.begin, self.end)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a call is written: `begin`, JSON with the name and the arguments, `end`.

    An answer may also begin with the JSON itself where `is_bare`, and the JSON of several calls may be a list, or have
    `separators` between them. With `before_arguments`, a call may also be its name, this mark, and its arguments.
    `around` are marks around all calls, or within one, that say nothing.
    """

    begin: str
    end: str = ""
    is_bare: bool = False
    separators: str = ""
    before_arguments: str = ""
    around: tuple[str, ...] = ()
    arguments_key: str = "arguments"  # which the model was taught; the other one is read too
    ids_of_nine: bool = False  # its templates want ids of calls that are 9 letters or digits

    @property
    def marks(self) -> tuple[str, ...]:
        """All of them."""
        found = (self.begin, self.end, self.before_arguments, *self.around)
        return tuple(mark for mark in found if mark)


REASONING: Mapping[str, ReasoningFormat] = {
    "think": ReasoningFormat("<think>", "</think>", sign="</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", sign="[THINK]"),
    "seed": ReasoningFormat("<seed:think>", "</seed:think>", sign="</seed:think>"),
    "thought": ReasoningFormat("<thought>", "</thought>", sign="</thought>"),
    "granite": ReasoningFormat(
        "Here is my thought process:", "Here is my response:", sign="Here is my thought process:"
    ),
}

TOOLS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>"),
    "llama3": ToolFormat("<|python_tag|>", is_bare=True, separators=";", arguments_key="parameters"),
    "mistral": ToolFormat("[TOOL_CALLS]", before_arguments="[ARGS]", ids_of_nine=True),
    "deepseek": ToolFormat(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        before_arguments="<｜tool▁sep｜>",
        around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "json": ToolFormat("", is_bare=True, separators=";,"),
}

# What a template with tools of the format has, the first that holds.
SIGNS: Mapping[str, Callable[[str], bool]] = {
    "hermes": lambda template: "<tool_call>" in template and "<function=" not in template,
    "mistral": lambda template: "[TOOL_CALLS]" in template,
    "deepseek": lambda template: "<｜tool▁sep｜>" in template and "```json" not in template,
    "llama3": lambda template: (
        "<|python_tag|>" in template or ('"parameters"' in template and "<|start_header_id|>" in template)
    ),
}


def tool_format_name(asked: str, templates: str) -> str:
    """The name in TOOLS for a setting of `tool_call_parser`. templates: the text of the model's chat templates.

    A model whose format is not known calls tools in plain JSON.
    """
    if asked != AUTO:
        return asked
    return next((name for name, is_its in SIGNS.items() if is_its(templates)), "json")


def reasoning_format_name(asked: str, templates: str) -> str:
    """The name in REASONING for a setting of `reasoning_parser`, or `none`."""
    if asked != AUTO:
        return asked
    return next((name for name, its in REASONING.items() if its.sign in templates), NONE)
