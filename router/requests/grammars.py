"""What holds the text of a request: a client's grammar in TGI's shapes, or one that tools and reasoning need."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson

from router.errors import ValidationError
from router.grammars.json_schema import typed
from router.requests.schemas import MOST_VALUES, GenerateParameters, GrammarParameters, refuse_excess
from router.scheduling.grammar import Grammar, GrammarKind

MOST_BYTES = 2**16  # of a grammar's text: what takes so many is a program, and compiling it takes a second

# What the compiler says, where the grammar is one that tools or a response format need behind reasoning.
OF_TOOLS = {
    "grammar is not valid": "the answer cannot be held to the schemas of `tools` or `response_format`",
    "grammar is not supported": "an answer cannot be held to `tools`",
    "leave `grammar` out": "leave `tool_choice` and `strict` out",
}


def grammar_of(given: GenerateParameters) -> Grammar | None:
    """What the text is held to, if anything. Raises ValidationError; whether it is a good one is found out later."""
    if given.grammar is None:
        return None
    if given.ignore_eos:
        raise ValidationError("`ignore_eos` and `grammar` exclude each other: a grammar says where the text may end")
    return _bounded(_grammar(given.grammar))


def answer_grammar_of(text: str | None) -> Grammar | None:
    """What holds an answer beside what the client gives as its grammar. Raises ValidationError."""
    if text is None:
        return None
    if (size := len(text.encode())) > MOST_BYTES:
        raise ValidationError(
            f"the schemas of `tools` make a grammar of {size} bytes, and {MOST_BYTES} are allowed: offer fewer "
            "functions, or leave `tool_choice`, `strict` and `response_format` out"
        )
    return Grammar(GrammarKind.LARK, text)


@contextmanager
def renaming_errors(*, is_held: bool) -> Iterator[None]:
    """Speak of functions where their grammar, and none of the client's, is wrong. is_held: whether it is theirs."""
    try:
        yield
    except ValidationError as error:
        if not is_held:
            raise
        detail = str(error).removeprefix("Input validation error: ")
        for ours, theirs in OF_TOOLS.items():
            detail = detail.replace(ours, theirs)
        raise ValidationError(detail) from None


def _grammar(given: GrammarParameters) -> Grammar:
    match given.type:
        case "regex" | "lark":
            if not isinstance(given.value, str):
                raise ValidationError(f"`grammar.value` must be a string for the type {given.type}")
            return Grammar(GrammarKind(given.type), given.value)
        case "json_schema":
            return Grammar(GrammarKind.JSON_SCHEMA, _text(_named(given.value)))
    return Grammar(GrammarKind.JSON_SCHEMA, _text(given.value))


def _named(value: str | dict[str, Any]) -> str | dict[str, Any]:
    """The schema of TGI's `{"name", "schema"}`."""
    schema = value.get("schema") if isinstance(value, dict) else None
    if not isinstance(schema, dict):
        raise ValidationError("`grammar.value` must have a `schema`, an object, for the type json_schema")
    return schema


def _text(schema: str | dict[str, Any]) -> str:
    """A schema, or its JSON, as JSON with all types. Raises ValidationError for what is no object."""
    return json.dumps(typed(schema if isinstance(schema, dict) else _read(schema)), ensure_ascii=False)


def _read(schema: str) -> dict[str, Any]:
    _bounded(Grammar(GrammarKind.JSON_SCHEMA, schema))
    refuse_excess(schema.encode(errors="replace"), MOST_VALUES, "`grammar.value`")
    try:
        found = orjson.loads(schema)  # no half of a surrogate pair, which is no text
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise ValidationError(
            "grammar is not valid: `value` must be a JSON schema, an object or one written as a string"
        )
    return found


def _bounded(grammar: Grammar) -> Grammar:
    size = len(grammar.text.encode(errors="replace"))
    if size > MOST_BYTES:
        raise ValidationError(f"`grammar.value` has {size} bytes: give at most {MOST_BYTES}")
    return grammar
