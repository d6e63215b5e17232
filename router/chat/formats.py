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
class Writing:
    """How calls are to be written, exactly.

    Each call is `mark`, `begin`, its name, `middle`, its arguments, `end`; all of them are `open_mark`, `open`, the
    calls with `between` between them, `close`. needs: a mark that only the tokenizers of models that write so have.
    """

    mark: str = ""
    begin: str = '{"name": "'
    middle: str = '", "arguments": '
    end: str = "}"
    open_mark: str = ""
    open: str = ""
    between: str = ""
    close: str = ""
    needs: str = ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How models write a call: `begin`, JSON with the name and the arguments, `end`.

    An answer may also begin with the JSON itself where `is_bare`, and the JSON of several calls may be a list, or have
    `separators` between them. With `is_python`, a list may have calls in Python's notation. With `before_arguments`, a
    call may also be its name, this mark, and its arguments. `around` are marks around all calls that say nothing.
    writings: how a grammar has a model write it; the first whose needs are met.
    """

    begin: str
    end: str = ""
    is_bare: bool = False
    is_python: bool = False
    separators: str = ""
    before_arguments: str = ""
    around: tuple[str, ...] = ()
    writings: tuple[Writing, ...] = (Writing(between="\n"),)
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
    "hermes": ToolFormat(
        "<tool_call>",
        "</tool_call>",
        writings=(Writing("<tool_call>", begin='\n{"name": "', end="}\n</tool_call>", between="\n"),),
    ),
    "llama3": ToolFormat(
        "<|python_tag|>",
        is_bare=True,
        separators=";",
        writings=(Writing(middle='", "parameters": ', between="; "),),
    ),
    "mistral": ToolFormat(
        "[TOOL_CALLS]",
        before_arguments="[ARGS]",
        writings=(
            Writing("[TOOL_CALLS]", begin="", middle="[ARGS]", end="", needs="[ARGS]"),
            Writing(open_mark="[TOOL_CALLS]", open="[", between=", ", close="]"),
        ),
        ids_of_nine=True,
    ),
    "deepseek": ToolFormat(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        before_arguments="<｜tool▁sep｜>",
        around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        writings=(
            Writing(
                "<｜tool▁call▁begin｜>",
                begin="",
                middle="<｜tool▁sep｜>",
                end="<｜tool▁call▁end｜>",
                open_mark="<｜tool▁calls▁begin｜>",
                close="<｜tool▁calls▁end｜>",
            ),
        ),
    ),
    "pythonic": ToolFormat("<|python_start|>", "<|python_end|>", is_bare=True, is_python=True),
    "json": ToolFormat("", is_bare=True, separators=";,"),
}

# What a template with tools of the format has, the first that holds.
SIGNS: Mapping[str, Callable[[str], bool]] = {
    "hermes": lambda template: "<tool_call>" in template and "<function=" not in template,
    "mistral": lambda template: "[TOOL_CALLS]" in template,
    "deepseek": lambda template: "<｜tool▁sep｜>" in template and "```json" not in template,
    "pythonic": lambda template: "<|python_start|>" in template or "[func_name1(" in template,
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
