"""How a served model's answers are read, and those to one request.

The marks of a format may be special tokens, which are no part of a text. Those of a model's formats are made part of it
(`Asked.shown_marks`), and its reader takes them out again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from router.chat.call_grammar import CallGrammar
from router.chat.formats import (
    AUTO,
    NONE,
    REASONING,
    TOOLS,
    ReasoningFormat,
    ToolFormat,
    reasoning_format_name,
    tool_format_name,
)
from router.chat.pieces import AnswerReader
from router.chat.reader import Manner, Reader
from router.chat.template import ChatTemplate
from router.chat.tools import Offer
from router.errors import ValidationError
from router.text import ModelTokenizer


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers to one request are read: `reader` for each of them.

    shown_marks: special tokens that the readers need to see in the text (`Asked.shown_marks`).
    """

    manner: Manner
    shown_marks: frozenset[int]

    def reader(self, prompt_end: str, begun: str = "") -> AnswerReader:
        """A reader for one answer.

        prompt_end: the last characters of the prompt (`ModelTokenizer.end_of`), which say whether the answer begins
        within reasoning. begun: what a final message that is continued has of the answer already.
        """
        its = self.manner.reasoning
        if its is None:
            return Reader(self.manner)
        is_within = begun.rfind(its.begin) > begun.rfind(its.end) if begun else prompt_end.rstrip().endswith(its.begin)
        return Reader(self.manner, is_within)


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """The formats of the served model. tools_name and reasoning_name: in the tables; the latter may be `none`."""

    tools_name: str
    reasoning_name: str
    mark_ids: frozenset[int] = frozenset()  # of their marks, those that are special tokens
    token_ids: Mapping[str, int] = field(default_factory=dict)  # mark -> id, of those that are a token of their own

    @classmethod
    def of(
        cls, tools_asked: str, reasoning_asked: str, template: ChatTemplate, tokenizer: ModelTokenizer
    ) -> AnswerFormats:
        """By the settings `tool_call_parser` and `reasoning_parser`, and where they are `auto`, by the template."""
        texts = "\n".join(template.named.values())
        tools = tool_format_name(tools_asked, texts)
        reasoning = reasoning_format_name(reasoning_asked, texts)
        found = cls(tools, reasoning)
        marks = [*(found.tools.marks if found.tools else ()), *(found.reasoning.marks if found.reasoning else ())]
        added = {token.content: id for id, token in tokenizer.tokenizer.get_added_tokens_decoder().items()}
        ids = {mark: added[mark] for mark in marks if mark in added}
        return cls(tools, reasoning, tokenizer.special_ids.intersection(ids.values()), ids)

    @property
    def tools(self) -> ToolFormat | None:
        """The format of calls; None: none are read."""
        return None if self.tools_name == NONE else TOOLS[self.tools_name]

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """The format of reasoning; None: none is read."""
        return None if self.reasoning_name == NONE else REASONING[self.reasoning_name]

    def facts(self, tools_asked: str, reasoning_asked: str) -> list[tuple[str, str, str]]:
        """Rows of the start-up table: what, which, and why."""
        sources = ["the chat template" if asked == AUTO else "" for asked in (tools_asked, reasoning_asked)]
        return [("tool calls", self.tools_name, sources[0]), ("reasoning", self.reasoning_name, sources[1])]

    def grammar(self, offered: Offer, *, is_within: bool = False) -> str | None:
        """What holds an answer to its calls, in Lark's notation; None where nothing does.

        is_within: whether the prompt ends within reasoning.
        """
        if self.tools is None:
            return None
        return CallGrammar(self.tools, self.reasoning, self.token_ids, self.mark_ids).text(offered, is_within=is_within)

    def reading(self, offered: Offer) -> Reading | None:
        """How answers to a request with these tools are read; None: as text alone. Raises ValidationError."""
        tools = self.tools if offered.tools else None
        if offered.tools and tools is None:
            raise ValidationError(
                "`tools` are not served by this server: leave them out, or start it without --tool-call-parser none"
            )
        if tools is None and self.reasoning is None:
            return None
        names = frozenset(tool.name for tool in offered.callable_tools)
        manner = Manner(tools, names, offered.choice.is_parallel, self.reasoning)
        return Reading(manner, self.mark_ids)
