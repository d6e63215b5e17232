"""Grammars that hold an answer to calls of tools, or what is behind its reasoning, in Lark as llguidance has it.

A required call is held from the beginning of the answer, or from the end of its reasoning. A call that is the model's
own choice is held where a function is strict: the text before it is free until the mark that calls begin with, or, in a
format that begins without a mark, until its first character.

Left out: how grammars are compiled and texts followed (`router/grammars`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.chat.arguments import MOST_LOOKED_AT, NOTHING, Arguments
from router.chat.formats import ReasoningFormat, Tags, ToolFormat, Writing
from router.chat.tools import NO_PARAMETERS, Offer, Tool
from router.errors import ValidationError
from router.grammars.json_schema import alone, any_of, moved, typed
from router.requests.grammars import MOST_BYTES, quoted, refuse_size
from router.scheduling.grammar import Grammar, GrammarKind

# JSON as Python writes it, which models have read most.
STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Keywords of a schema that names all arguments in `properties`.
DECLARING = frozenset({"type", "properties", "required", "title", "description", "$schema", "$defs", "definitions"})
ANYTHING = "/(?s:.*)/"
NO_CALL = r"/(\s*[^\s{\[](?s:.*))?/"  # a text that does not begin as JSON
# Of a client's grammar in Lark: what it defines; and its comments, strings, expressions, special tokens and first rule.
DEFINED = re.compile(r"^([A-Za-z_]\w*)(?:\[[^\]\n]*\])?\s*:", re.MULTILINE)
TOKEN = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|<[^<>\n]*>|\bstart\b')
# The names that are defined here.
OURS = re.compile(
    r"answer|words|calls?|call_\d+(_(\d+|other)(_text)*)?|called|unmarked|wanted|(thoughts|up_to)(_text)?|thinking|TEXT|NO_CALL"
)
ESCAPED_SLASH_OR_BREAK = re.compile(r"\\.|/|\n", re.DOTALL)
ON_ONE_LINE = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
BLANKS = r"/\s{0,4}/"
OF_TEXTS = ("pattern", "minLength", "maxLength", "format")  # keywords of schemas that hold texts to something
# Those that hold an object to something, beside its arguments one by one.
OF_OBJECTS = (
    *("anyOf", "oneOf", "allOf", "not", "if", "propertyNames", "minProperties", "maxProperties"),
    *("dependentRequired", "dependentSchemas"),
)
OTHER_NAME = r"/[\w.$-]{1,64}/"  # of an argument that is not declared
WANTED = "wanted"  # the rule for what a client asks for beside calls


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """Makes the grammars of one model. token_ids: of marks that are a token; special: those that are special tokens."""

    reasoning: ReasoningFormat | None
    token_ids: Mapping[str, int]
    special: frozenset[int]

    def calls(self, its: ToolFormat, offered: Offer, *, is_within: bool = False) -> str | None:
        """What holds the answer; None where it is free. is_within: whether the answer begins within reasoning."""
        if not offered.is_held:
            return None
        writing = its.writing(self.token_ids)
        is_required = offered.choice.mode == "required"
        answer = ["answer: calls"] if is_required else self._optional_calls(writing, offered)
        return self._lark([*answer, *self._calls(its, writing, offered)], is_within=is_within)

    def calls_or(self, wanted: Grammar, its: ToolFormat, offered: Offer, *, is_within: bool = False) -> str:
        """What holds an answer to calls or to this grammar, as the model chooses."""
        writing = its.writing(self.token_ids)
        if wanted.kind is GrammarKind.JSON_SCHEMA and not writing.first_mark:
            return self._lark([_json("answer", _call_or(wanted, writing, offered))], is_within=is_within)
        calls = [*self._wanted("words"), _rule(WANTED, wanted), *self._calls(its, writing, offered)]
        return self._lark(["answer: calls | words", *calls], is_within=is_within)

    def behind_reasoning(self, wanted: Grammar, *, is_within: bool) -> str:
        """What holds an answer to this grammar from the end of its reasoning on."""
        return self._lark([*self._wanted("answer"), _rule(WANTED, wanted)], is_within=is_within)

    def _wanted(self, name: str) -> list[str]:
        """The rule for what is wanted, behind the mark that an answer in words begins with."""
        return [f"{name}: {self._written(self._answer_mark)} {WANTED}"]

    @property
    def _answer_mark(self) -> str:
        return self.reasoning.answer if self.reasoning is not None else ""

    def _lark(self, answer: Sequence[str], *, is_within: bool) -> str:
        return "\n".join(["%llguidance {}", *self._start(is_within), *answer, f"TEXT: {ANYTHING}", ""])

    def _start(self, is_within: bool) -> list[str]:
        """The answer, and reasoning before it."""
        its = self.reasoning
        if its is None:
            return ["start: answer"]
        behind = self._written(its.behind)
        thoughts = [
            *self._up_to("thoughts", its.end),
            f"thinking: {self._written(its.begin + its.label)} thoughts {behind}",
        ]
        before = f"thoughts {behind} {BLANKS}" if is_within else f"(thinking {BLANKS})?"
        return [f"start: {before} answer", *thoughts]

    def _optional_calls(self, writing: Writing, offered: Offer) -> list[str]:
        mark = writing.first_mark
        if self._answer_mark:
            return [f"answer: {self._written(self._answer_mark)} TEXT | calls"]
        if not mark:
            return ["answer: NO_CALL | calls", f"NO_CALL: {NO_CALL}"]
        held = f"{self._written(writing.open)} {self._sequence(writing, offered)}" if writing.open_mark else "unmarked"
        several = "called* TEXT" if offered.choice.is_parallel else "TEXT | called"
        return [f"answer: {several}", f"called: up_to {held}", *self._up_to("up_to", mark)]

    def _calls(self, its: ToolFormat, writing: Writing, offered: Offer) -> list[str]:
        """All calls as they are written, and one: with its mark, and without."""
        tools, tags = offered.callable_tools, its.tags if writing.in_tags else None
        opened = self._written(writing.open_mark + writing.open)
        numbers = " | ".join(f"call_{number}" for number in range(len(tools)))
        return [
            f"calls: {opened} {self._sequence(writing, offered)}",
            f"call: {self._written(writing.mark)} unmarked",
            f"unmarked: {numbers}",
            *_bounded(
                line for number, tool in enumerate(tools) for line in self._call(f"call_{number}", writing, tool, tags)
            ),
        ]

    def _sequence(self, writing: Writing, offered: Offer) -> str:
        is_parallel = offered.choice.is_parallel and not writing.is_single
        more = f" ({self._written(writing.between)} call)*" if is_parallel else ""
        return f"call{more} {self._written(writing.close)}"

    def _call(self, name: str, writing: Writing, tool: Tool, tags: Tags | None) -> Iterator[str]:
        """The rule of this name for a call of a tool, and those that it needs."""
        number = '":" /[0-9]{1,3}/' if writing.is_numbered else ""
        before = f"{self._written(writing.begin + tool.name)} {number} {self._written(writing.middle)}"
        behind = self._written(writing.end)
        if tags is None:
            yield f"{name}: {before} %json {json.dumps(schema_of(tool), ensure_ascii=False)} {behind}"
            return
        its = _TaggedCall.of(tool, tags)
        each = []
        for at, key in enumerate(its.known.schemas):
            its.check_name(key)
            each.append(f"{name}_{at}" if key in its.known.required else f"({name}_{at})?")
            yield from self._argument(f"{name}_{at}", its, quoted(key), its.known.of(key), key)
        if (schema := its.known.others) is not None:
            each.append(f"({name}_other)*")
            yield from self._argument(f"{name}_other", its, OTHER_NAME, schema, "that is not declared")
        yield f"{name}: {before} {' '.join(each)} {behind}"

    def _argument(self, rule: str, its: _TaggedCall, name: str, schema: Any, told: str) -> Iterator[str]:
        """The rule for an argument between its tags, and those that it needs. name: in Lark; told: for people."""
        tags = its.tags
        line = "\n" if tags.is_on_lines else ""
        value_of = f"{line}{tags.value}" if tags.value else ""
        before = f"{self._written(tags.key)} {name} {self._written(f'{tags.key_end}{value_of}{its.padding}')}"
        behind = self._written(line)
        if its.is_text(schema, told):
            yield f"{rule}: {before} {rule}_text {behind}"
            yield from self._up_to(f"{rule}_text", tags.value_end)
        else:
            end = self._written(its.padding + tags.value_end)
            yield f"{rule}: {before} {its.value(schema)} {end} {behind}"

    def _up_to(self, name: str, mark: str) -> list[str]:
        """The rule for a text up to and including the first of these marks."""
        id = self.token_ids.get(mark)
        as_text = [f"{name}_text[lazy]: TEXT {quoted(mark)}"]
        if id is None:
            return [f"{name}: {name}_text", *as_text]
        return [f"{name}: TEXT <[{id}]> | {name}_text", *as_text]  # a mark in letters is one for readers too

    def _written(self, text: str) -> str:
        """A text with the marks in it, each of which may be a token."""
        marks = "|".join(map(re.escape, self.token_ids)) or "(?!)"
        return " ".join(self._part(part) for part in re.split(f"({marks})", text) if part)

    def _part(self, part: str) -> str:
        id = self.token_ids.get(part)
        if id is None:
            return quoted(part)
        return f"<[{id}]>" if id in self.special else f"(<[{id}]> | {quoted(part)})"


def _rule(name: str, wanted: Grammar) -> str:
    """The rule of this name for what another grammar holds a text to."""
    match wanted.kind:
        case GrammarKind.JSON_SCHEMA:
            return _json(name, json.loads(wanted.text))
        case GrammarKind.REGEX:
            return f"{name}: {name.upper()}\n{name.upper()}: /{_between_slashes(wanted.text)}/"
        case GrammarKind.LARK:
            return _renamed(wanted.text, name)


def _renamed(grammar: str, name: str) -> str:
    """A client's grammar with another name for `start`. Raises ValidationError for a name that is taken beside it."""
    if (taken := next((found for found in DEFINED.findall(grammar) if OURS.fullmatch(found)), None)) is not None:
        raise ValidationError(f"a grammar beside tools or reasoning has no rule of the name {taken}: rename it")
    return TOKEN.sub(lambda found: name if found.group() == "start" else found.group(), grammar)


def _json(name: str, schema: Mapping[str, Any]) -> str:
    return f"{name}: %json {json.dumps({'x-guidance': STYLE, **schema}, ensure_ascii=False)}"


def _call_or(wanted: Grammar, writing: Writing, offered: Offer) -> dict[str, Any]:
    """The schema of a call that is JSON from its first character, or of what is wanted.

    As one schema, because a lexer that has read the beginning of both cannot go back; so there is one call at most.
    """
    schemas = []
    for tool in offered.callable_tools:
        call = json.loads(f"{writing.begin}{tool.name}{writing.middle}null{writing.end}")
        keys = {
            key: moved(_arguments(tool), f"#/properties/{key}") if value is None else {"const": value}
            for key, value in call.items()
        }
        schemas.append({"type": "object", "properties": keys, "required": [*keys], "additionalProperties": False})
    schema = json.loads(wanted.text)
    style = {name: schema.pop(name) for name in ("x-guidance",) if name in schema}  # which is heard at the root alone
    return {**style, **any_of([schema, *schemas])}


def _arguments(tool: Tool) -> dict[str, Any]:
    """The schema of a call's arguments within another schema, where nothing of it may be left out by the compiler.

    So of a function that is not strict, the names of its arguments alone.
    """
    schema = schema_of(tool)
    if not tool.strict and isinstance(properties := schema.get("properties"), dict):
        schema = {**schema, "properties": {key: {} for key in properties}}
    kept = ("type", "properties", "required", "additionalProperties")
    return {name: schema[name] for name in schema if name != "x-guidance" and (tool.strict or name in kept)}


def schema_of(tool: Tool) -> dict[str, Any]:
    """What a function's arguments keep to. Of a function that is not strict, what a grammar cannot say is left out.

    Only arguments that it declares come, unless it says that others may: they would be of no use, and a model may never
    come to the end of them.
    """
    parameters = typed(NO_PARAMETERS if tool.parameters is None else tool.parameters)
    closed = {"additionalProperties": False} if parameters.keys() <= DECLARING else {}
    return {**closed, **parameters, "type": "object", "x-guidance": {**STYLE, "lenient": not tool.strict}}


@dataclass(frozen=True, slots=True)
class _TaggedCall:
    """A call whose arguments stand between tags. style: of values in JSON."""

    tool: Tool
    tags: Tags
    known: Arguments
    style: Mapping[str, Any]

    @classmethod
    def of(cls, tool: Tool, tags: Tags) -> _TaggedCall:
        """Raises ValidationError for what a call of a strict function is not held to."""
        schema = schema_of(tool)
        its = cls(tool, tags, Arguments(schema), {"x-guidance": schema.pop("x-guidance")})
        if not tool.strict:
            return its
        if missing := its.known.required - its.known.schemas.keys():
            raise its._refused(f"requires {min(missing)[:64]}, which is not in `properties`: add it")
        if its.known.others is not None:
            raise its._refused(
                "takes arguments that are not in `properties`, and between tags they might repeat others: set "
                "`additionalProperties` to false, or leave `strict` out"
            )
        if (keyword := next((one for one in OF_OBJECTS if one in its.known.own), None)) is not None:
            raise its._refused(
                f"has `{keyword}` beside its `properties`, to which arguments between tags are not held: "
                "leave it or `strict` out"
            )
        return its

    @property
    def padding(self) -> str:
        """What is written around values."""
        return self.tags.padding if self.tags.writes_padding else ""

    def check_name(self, name: str) -> None:
        """Raises ValidationError for a name that no tag can have."""
        if not name or name != name.strip() or self.tags.key_end in name:
            raise self._refused(
                f"has an argument of the name {name[:64]!r}, which a tag cannot have: leave out blanks around it and "
                f"{self.tags.key_end}"
            )

    def is_text(self, schema: Any, told: str) -> bool:
        """Whether a value may be any text, as it is. Raises ValidationError for what such a one is not held to."""
        types, choices = self.known.types(schema), self.known.choices(schema)
        if choices or (types and "string" not in types):
            return False
        alternatives = self.known.alternatives(schema) if self.tool.strict else []
        if alternatives is None:
            raise self._refused(
                f"has more than {MOST_LOOKED_AT} schemas and values: offer fewer, or leave `strict` out"
            )
        for one in alternatives:
            if "$ref" in one or (one is NOTHING and isinstance(schema, Mapping) and "$ref" in schema):
                raise self._refused(f"has an argument {told[:64]} whose schema is not there: define it in `$defs`")
            if (keyword := next((name for name in OF_TEXTS if name in one), None)) is not None:
                raise self._refused(
                    f"has an argument {told[:64]} with `{keyword}`, to which a text between tags is not held: "
                    "leave it or `strict` out"
                )
        return True

    def value(self, schema: Any) -> str:
        """In Lark, a value that is no text, or one of some."""
        if not (choices := self.known.choices(schema)):
            held = {**alone(schema, self.known.root), **self.style}
            return f"%json {json.dumps(held, ensure_ascii=False)}"
        texts = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in choices]
        readable = [text for text in dict.fromkeys(texts) if self.tags.value_end not in text]
        return f"({' | '.join(map(quoted, readable or texts))})"

    def _refused(self, why: str) -> ValidationError:
        kind = "strict function" if self.tool.strict else "function"
        return ValidationError(f"the {kind} {self.tool.name} {why}")


def _bounded(lines: Iterable[str]) -> Iterator[str]:
    """The lines, as long as they are no more than a grammar may have. Raises ValidationError."""
    size = 0
    for line in lines:
        size += len(line)
        if size > MOST_BYTES:
            refuse_size()
        yield line


def _between_slashes(expression: str) -> str:
    """A regular expression as Lark has it between slashes: on one line, with its own slashes escaped."""
    return ESCAPED_SLASH_OR_BREAK.sub(lambda found: ON_ONE_LINE.get(found[0], found[0]), expression)
