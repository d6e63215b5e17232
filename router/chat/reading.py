"""How answers are read, and what holds them to it: `AnswerFormats` of the served model, and `Reading` for a request.

Left out: taking an answer apart (`reader.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from router.chat.arguments import Arguments
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
from router.chat.grammars import AnswerGrammar
from router.chat.pieces import AnswerReader
from router.chat.prompting import knows_tools
from router.chat.reader import Reader, ReadingRules
from router.chat.template import ChatTemplate
from router.chat.tools import Offer
from router.errors import ValidationError
from router.requests.grammars import grammar_of
from router.requests.schemas import PromptRequest
from router.scheduling.grammar import Grammar
from router.text.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """The formats of the served model. tools_name and reasoning_name: in the tables; the latter may be `none`."""

    tools_name: str
    reasoning_name: str
    told_in_words: bool = False  # the template knows no tools, and the model is asked for JSON
    mark_ids: frozenset[int] = frozenset()  # of their marks, those that are special tokens
    token_ids: Mapping[str, int] = field(default_factory=dict)  # mark -> id, of those that are a token of their own

    @classmethod
    def of(
        cls, tools_asked: str, reasoning_asked: str, template: ChatTemplate, tokenizer: ModelTokenizer
    ) -> AnswerFormats:
        """By the settings `tool_call_parser` and `reasoning_parser`, and where they are `auto`, by the template."""
        texts = "\n".join(template.named.values())
        added = {token.content: id for id, token in tokenizer.tokenizer.get_added_tokens_decoder().items()}
        tools = tool_format_name(tools_asked, texts, added)
        reasoning = reasoning_format_name(reasoning_asked, texts)
        told_in_words = tools_asked == AUTO and not knows_tools(texts)
        found = cls(tools, reasoning, told_in_words)
        marks = [*(found.tools.marks if found.tools else ()), *(found.reasoning.marks if found.reasoning else ())]
        ids = {mark: added[mark] for mark in marks if mark in added}
        return cls(tools, reasoning, told_in_words, tokenizer.special_ids.intersection(ids.values()), ids)

    @property
    def tools(self) -> ToolFormat | None:
        """The format of calls; None: none are read. Told in words, a model answers so, or in its own format."""
        if self.tools_name == NONE:
            return None
        its, plain = TOOLS[self.tools_name], TOOLS["json"]
        if not self.told_in_words or its.channels:
            return its
        return replace(its, is_bare=True, may_be_fenced=True, separators=plain.separators, writings=plain.writings)

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """The format of reasoning; None: none is read."""
        return None if self.reasoning_name == NONE else REASONING[self.reasoning_name]

    def facts(self, tools_asked: str, reasoning_asked: str, *, has_template: bool) -> list[tuple[str, str, str]]:
        """Rows of the start-up table: what, which, and why."""
        if not has_template:
            return [("chats", "refused", "the model has no chat template: --chat-template FILE")]
        sources = ["the chat template" if asked == AUTO else "" for asked in (tools_asked, reasoning_asked)]
        return [("tool calls", self.tools_name, sources[0]), ("reasoning", self.reasoning_name, sources[1])]

    def reading(self, offered: Offer) -> Reading | None:
        """How answers to a request with these tools are read; None: as text alone. Raises ValidationError."""
        tools = self.tools if offered.tools else None
        if offered.tools and tools is None:
            raise ValidationError(
                "`tools` are not served by this server: leave them out, or start it without --tool-call-parser none"
            )
        if tools is None and self.reasoning is None:
            return None
        functions = {tool.name: Arguments(tool.parameters or {}) for tool in offered.callable_tools}
        if tools is not None and any(tool.strict for tool in offered.callable_tools):
            tools = tools.written_so(tools.writing(self.token_ids))
        is_held = tools is not None and offered.is_held
        rules = ReadingRules(tools, functions, offered.choice.is_parallel, is_held, self.reasoning)
        return Reading(self, rules, offered)


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers to one request are read, and what holds them to it.

    First `applied_to` its prompt, then `reader` for each answer.
    """

    formats: AnswerFormats
    rules: ReadingRules
    offered: Offer

    def applied_to(self, one: PromptRequest, begun: str = "") -> PromptRequest:
        """The same request with what its readers need. Raises ValidationError.

        begun: what a final message that is continued has of the answer already.
        """
        one = replace(one, shown_marks=one.shown_marks | self.formats.mark_ids)
        wanted = grammar_of(one.given)
        if wanted is not None and self.offered.choice.mode != "required":
            grammar = partial(self._calls_or if self.offered.tools else self._behind_reasoning, wanted, begun)
            return replace(one, answer_grammar=grammar)
        if self.rules.tool_format is None or not self.offered.is_held:
            return one
        if one.given.ignore_eos:
            raise ValidationError(
                "`ignore_eos` is not served where a call of `tools` is required or strict: leave it out"
            )
        return replace(one, answer_grammar=partial(self.call_grammar, begun=begun))

    def call_grammar(self, prompt_end: str, begun: str = "") -> str | None:
        """What holds an answer to its calls, in Lark's notation; None: nothing does. As for `reader`."""
        if (its := self.rules.tool_format) is None:
            return None
        return self._grammar.calls(its, self.offered, is_within=self._is_within(prompt_end, begun))

    def _calls_or(self, wanted: Grammar, begun: str, prompt_end: str) -> str | None:
        """What holds an answer to calls, or else to what the client wants."""
        its = self.rules.tool_format
        assert its is not None, "`AnswerFormats.reading` has refused tools where they are not read"
        return self._grammar.calls_or(wanted, its, self.offered, is_within=self._is_within(prompt_end, begun))

    def _behind_reasoning(self, wanted: Grammar, begun: str, prompt_end: str) -> str | None:
        """What the client wants the answer held to, behind reasoning, which is free, where the model thinks."""
        if self.rules.reasoning is None:
            return None
        return self._grammar.behind_reasoning(wanted, is_within=self._is_within(prompt_end, begun))

    @property
    def _grammar(self) -> AnswerGrammar:
        return AnswerGrammar(self.rules.reasoning, self.formats.token_ids, self.formats.mark_ids)

    def reader(self, prompt_end: str, begun: str, make_id: Callable[[], str]) -> AnswerReader:
        """A reader for one answer.

        make_id: of calls. prompt_end: the last characters of the prompt (`ModelTokenizer.end_of`), which say whether
        the answer begins within reasoning, or behind the mark of an answer in words.
        """
        return Reader(
            self.rules,
            make_id,
            is_reasoning=self._is_within(prompt_end, begun),
            is_wrapped=self._is_wrapped(prompt_end, begun),
        )

    def _is_wrapped(self, prompt_end: str, begun: str) -> bool:
        its = self.rules.reasoning
        if its is None or not its.wrappers:
            return False
        begin, end = its.wrappers
        return begun.rfind(begin) > begun.rfind(end) if begun else prompt_end.rstrip().endswith(begin)

    def _is_within(self, prompt_end: str, begun: str) -> bool:
        its = self.rules.reasoning
        if its is None:
            return False
        if begun:
            return begun.rfind(its.begin) > begun.rfind(its.end)
        return prompt_end.rstrip().removesuffix(its.label.strip()).rstrip().endswith(its.begin)
