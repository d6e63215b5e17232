"""How models write calls of tools and reasoning: one entry of a table for each format, and how a model's is recognised.

A model writes what its chat template taught it, so the template's own text says which format is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around what a model thinks before it answers. `sign`: what a template of such models has.

    label: what follows `begin` and is no thought. behind: what the model writes between its thoughts and what follows.
    answer: what an answer in words begins with. wrappers: marks around it that say nothing. channels: marks of a model
    that writes all it says as messages with a header, in the format harmony.
    """

    begin: str
    end: str
    sign: str
    label: str = ""
    behind: str = ""
    answer: str = ""
    wrappers: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """All of them."""
        return self.channels or (self.begin, self.end, *self.wrappers)


@dataclass(frozen=True, slots=True)
class Tags:
    """How a call is written whose arguments are not JSON, but each between tags, texts without quotes.

    A call is `name`, its name, `name_end`, the arguments, `end`. An argument is `key`, its name, `key_end`,
    `value`, what it is, `value_end`. padding: what is around a value and no part of it; writes_padding: whether a
    grammar has it written. is_on_lines: whether arguments, and values behind their keys, stand on lines of their
    own. Where `name` is empty, the mark in front of the call is enough; where `end` is, the mark behind it.
    """

    name: str
    name_end: str
    key: str
    key_end: str
    value_end: str
    value: str = ""
    end: str = ""
    padding: str = ""
    writes_padding: bool = True
    is_on_lines: bool = True


@dataclass(frozen=True, slots=True)
class Writing:
    """How calls are to be written, exactly.

    Each call is `mark`, `begin`, its name, `middle`, its arguments, `end`; all of them are `open_mark`, `open`, the
    calls with `between` between them, `close`. needs: a mark that only the tokenizers of models that write so have.
    is_numbered: the name is followed by a colon and the number of the call. is_single: an answer has one call at most.
    in_tags: the arguments are written in the tags of the format.
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
    is_numbered: bool = False
    is_single: bool = False
    in_tags: bool = False

    @property
    def first_mark(self) -> str:
        """What calls begin with, if with a mark."""
        return self.open_mark or self.mark


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How models write a call: `begin`, JSON with the name and the arguments, `end`.

    An answer may also begin with the JSON itself where `is_bare`, and the JSON of several calls may be a list, or have
    `separators` between them. Where it `may_be_fenced`, all that may stand in a block of code. With `is_python`, a list
    may have calls in Python's notation. With `quote`, a call may be written as Gemma 4 does, which has this mark around
    texts and none around names. With `before_arguments`, a call may also be its name, behind `before_name`, this mark,
    and its arguments. With `tags`, a call may have its arguments in tags. `around` are marks around all calls that say
    nothing, and `within` those inside a call. behind_arguments: characters between arguments and `end`. writings: how a
    grammar has a model write it; the first whose needs are met. channels: as of a `ReasoningFormat`.
    """

    begin: str
    end: str = ""
    is_bare: bool = False
    may_be_fenced: bool = False
    is_python: bool = False
    quote: str = ""
    separators: str = ""
    before_name: str = ""
    before_arguments: str = ""
    behind_arguments: str = "}]"
    around: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    tags: Tags | None = None
    begins_with_names: bool = True  # a call may lack the mark in front of a name that has tags
    channels: tuple[str, ...] = ()
    writings: tuple[Writing, ...] = (Writing(between="\n"),)
    ids_of_nine: bool = False  # its templates want ids of calls that are 9 letters or digits
    ids_of_names: bool = False  # they want `functions.NAME:NUMBER`

    def writing(self, tokens: Container[str]) -> Writing:
        """How a model calls whose tokenizer has these marks."""
        return next(one for one in self.writings if not one.needs or one.needs in tokens)

    def written_so(self, writing: Writing) -> ToolFormat:
        """The same without what a grammar that has calls written so does not hold."""
        has_mark = bool(writing.first_mark)
        return replace(
            self,
            begins_with_names=False,
            is_bare=self.is_bare and not has_mark,
            may_be_fenced=False,
            begin=self.begin if has_mark else "",
        )

    @property
    def marks(self) -> tuple[str, ...]:
        """All of them."""
        tags = self.tags
        inner = (tags.key, tags.key_end, tags.value, tags.value_end) if tags else ()
        found = (
            self.begin,
            self.end,
            self.before_arguments,
            self.quote,
            *self.around,
            *self.within,
            *self.channels,
            *inner,
        )
        return tuple(mark for mark in found if mark)


CHANNELS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
OF_FUNCTIONS = Tags("<function=", ">", "<parameter=", ">", "</parameter>", end="</function>", padding="\n")
OF_KEYS = Tags("", "\n", "<arg_key>", "</arg_key>", "</arg_value>", value="<arg_value>")
OF_INVOKES = Tags('<invoke name="', '">', '<parameter name="', '">', "</parameter>", end="</invoke>")

REASONING: Mapping[str, ReasoningFormat] = {
    "answer": ReasoningFormat("<think>", "</think>", sign="<answer>", wrappers=("<answer>", "</answer>")),
    "response": ReasoningFormat("<think>", "</think>", sign="<response>", wrappers=("<response>", "</response>")),
    "think": ReasoningFormat("<think>", "</think>", sign="</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", sign="[THINK]"),
    "seed": ReasoningFormat("<seed:think>", "</seed:think>", sign="</seed:think>"),
    "thought": ReasoningFormat("<thought>", "</thought>", sign="</thought>"),
    "granite": ReasoningFormat(
        "Here is my thought process:", "Here is my response:", sign="Here is my thought process:"
    ),
    "gemma": ReasoningFormat("<|channel>", "<channel|>", sign="<|channel>thought", label="thought\n"),
    "command": ReasoningFormat(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        sign="<|START_RESPONSE|>",
        answer="<|START_RESPONSE|>",
        wrappers=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "harmony": ReasoningFormat(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        sign="<|channel|>analysis",
        behind="<|start|>assistant",
        answer="<|channel|>final<|message|>",
        channels=CHANNELS,
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
        within=("[CALL_ID]",),
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
    "deepseek_v3": ToolFormat(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        before_name="function<｜tool▁sep｜>",
        before_arguments="```json",
        behind_arguments="}]`",
        around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        within=("<｜tool▁sep｜>",),
        writings=(
            Writing(
                "<｜tool▁call▁begin｜>",
                begin="function<｜tool▁sep｜>",
                middle="\n```json\n",
                end="\n```<｜tool▁call▁end｜>",
                open_mark="<｜tool▁calls▁begin｜>",
                between="\n",
                close="<｜tool▁calls▁end｜>",
            ),
        ),
    ),
    "kimi": ToolFormat(
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        before_name="functions.",
        before_arguments="<|tool_call_argument_begin|>",
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_section_begin|>"),
        writings=(
            Writing(
                "<|tool_call_begin|>",
                begin="functions.",
                middle="<|tool_call_argument_begin|>",
                is_numbered=True,
                end="<|tool_call_end|>",
                open_mark="<|tool_calls_section_begin|>",
                close="<|tool_calls_section_end|>",
            ),
        ),
        ids_of_names=True,
    ),
    "qwen3_coder": ToolFormat(
        "<tool_call>",
        "</tool_call>",
        tags=OF_FUNCTIONS,
        writings=(
            Writing(
                "<tool_call>",
                begin="\n<function=",
                middle=">\n",
                end="</function>\n</tool_call>",
                between="\n",
                in_tags=True,
            ),
        ),
    ),
    "seed": ToolFormat(
        "<seed:tool_call>",
        "</seed:tool_call>",
        tags=replace(OF_FUNCTIONS, writes_padding=False),
        writings=(
            Writing(
                "<seed:tool_call>",
                begin="\n<function=",
                middle=">\n",
                end="</function>\n</seed:tool_call>",
                between="\n",
                in_tags=True,
            ),
        ),
    ),
    "glm": ToolFormat(
        "<tool_call>",
        "</tool_call>",
        tags=OF_KEYS,
        writings=(Writing("<tool_call>", begin="", middle="\n", end="</tool_call>", between="\n", in_tags=True),),
    ),
    "glm47": ToolFormat(
        "<tool_call>",
        "</tool_call>",
        tags=replace(OF_KEYS, is_on_lines=False),
        writings=(Writing("<tool_call>", begin="", middle="", end="</tool_call>", in_tags=True),),
    ),
    "minimax": ToolFormat(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        tags=OF_INVOKES,
        writings=(
            Writing(
                begin='\n<invoke name="',
                middle='">\n',
                end="</invoke>",
                open_mark="<minimax:tool_call>",
                close="\n</minimax:tool_call>",
                in_tags=True,
            ),
        ),
    ),
    "harmony": ToolFormat(
        "",
        channels=CHANNELS,
        writings=(
            Writing(
                "<|channel|>",
                begin="commentary to=functions.",
                middle=" <|constrain|>json<|message|>",
                end="",
                is_single=True,
            ),
        ),
    ),
    "gemma": ToolFormat(
        "<|tool_call>",
        "<tool_call|>",
        before_name="call:",
        quote='<|"|>',
        writings=(Writing("<|tool_call>", end="}<tool_call|>"),),
    ),
    "command": ToolFormat(
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        writings=(
            Writing(
                begin='    {"tool_call_id": "0", "tool_name": "',
                middle='", "parameters": ',
                open_mark="<|START_ACTION|>",
                open="[\n",
                between=",\n",
                close="\n]<|END_ACTION|>",
            ),
        ),
    ),
    "granite": ToolFormat(
        "<|tool_call|>", is_bare=True, writings=(Writing(open_mark="<|tool_call|>", open="[", between=", ", close="]"),)
    ),
    "nemotron": ToolFormat(
        "<TOOLCALL>",
        "</TOOLCALL>",
        writings=(Writing(open_mark="<TOOLCALL>", open="[", between=", ", close="]</TOOLCALL>"),),
    ),
    "hunyuan": ToolFormat(
        "<tool_calls>",
        "</tool_calls>",
        writings=(Writing(open_mark="<tool_calls>", open="[", between=", ", close="]</tool_calls>"),),
    ),
    "olmo3": ToolFormat(
        "<function_calls>",
        "</function_calls>",
        is_python=True,
        writings=(Writing(open_mark="<function_calls>", open="[", between=", ", close="]</function_calls>"),),
    ),
    "lfm2": ToolFormat(
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        is_python=True,
        writings=(Writing("<|tool_call_start|>", end="}<|tool_call_end|>"),),
    ),
    "pythonic": ToolFormat("<|python_start|>", "<|python_end|>", is_bare=True, is_python=True, separators=";,"),
    "json": ToolFormat("", is_bare=True, may_be_fenced=True, separators=";,"),
}

# What a template with tools of the format has, the first that holds.
SIGNS: Mapping[str, Callable[[str], bool]] = {
    "harmony": lambda template: "<|channel|>commentary" in template,
    "seed": lambda template: "<seed:tool_call>" in template,
    "minimax": lambda template: "<minimax:tool_call>" in template,
    "kimi": lambda template: "<|tool_call_argument_begin|>" in template,
    "glm47": lambda template: "</arg_key><arg_value>" in template,
    "glm": lambda template: "<arg_key>" in template,
    "qwen3_coder": lambda template: "<tool_call>" in template and "<function=" in template,
    "hermes": lambda template: "<tool_call>" in template,
    "mistral": lambda template: "[TOOL_CALLS]" in template,
    "deepseek": lambda template: "<｜tool▁sep｜>" in template and "```json" not in template,
    "deepseek_v3": lambda template: "<｜tool▁sep｜>" in template,
    "gemma": lambda template: "<|tool_call>" in template,
    "command": lambda template: "<|START_ACTION|>" in template,
    "granite": lambda template: "<|tool_call|>" in template,
    "nemotron": lambda template: "<TOOLCALL>" in template,
    "hunyuan": lambda template: "<tool_calls>" in template,
    "olmo3": lambda template: "<function_calls>" in template,
    "lfm2": lambda template: "<|tool_call_start|>" in template,
    "pythonic": lambda template: "<|python_start|>" in template or "[func_name1(" in template,
    "llama3": lambda template: (
        "<|python_tag|>" in template or ('"parameters"' in template and "<|start_header_id|>" in template)
    ),
}


def tool_format_name(asked: str, templates: str, tokens: Container[str] = ()) -> str:
    """The name in TOOLS for a setting of `tool_call_parser`. templates: the text of the model's chat templates.

    tokens: added to the vocabulary, which tell where templates do not. A model whose format is not known calls tools in
    plain JSON.
    """
    if asked != AUTO:
        return asked
    by_token = "lfm2" if TOOLS["lfm2"].begin in tokens else "json"
    return next((name for name, is_its in SIGNS.items() if is_its(templates)), by_token)


def reasoning_format_name(asked: str, templates: str) -> str:
    """The name in REASONING for a setting of `reasoning_parser`, or `none`."""
    if asked != AUTO:
        return asked
    return next((name for name, its in REASONING.items() if its.sign in templates), NONE)
