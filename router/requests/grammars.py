"""What holds a text: what clients ask for by many names, as one `Grammar`.

TGI's `grammar`, OpenAI's `response_format`, formats of newer APIs, and what vLLM, SGLang and llama.cpp call it. A
constraint that is not looked at is worse than one that is refused: the text comes, and does not keep to it. So what has
no counterpart here is refused by its name.

Left out: what holds an answer to calls of tools (`router/chat/grammars.py`), and compiling (`router/grammars/`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import orjson

from router.errors import ValidationError
from router.grammars.json_schema import typed
from router.requests.schemas import MOST_VALUES, GenerateParameters, GrammarParameters, refuse_excess
from router.scheduling.grammar import Grammar, GrammarKind

MOST_BYTES = 2**16  # of a grammar's text: what takes so many is a program, and compiling it takes a second
ANY_OBJECT = {"type": "object"}
FORMATS = ("text", "json_object", "json_schema", "json", "regex", "lark")
# What other servers call it, and which of the kinds below it is.
NAMES = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_json_object": "json_object",
    "guided_grammar": "grammar", "json_schema": "json", "regex": "regex", "grammar": "grammar", "ebnf": "grammar",
    "structural_tag": "structural_tag",
}  # fmt: skip
NESTED = "structured_outputs"  # vLLM's newer form: an object of kinds
KINDS = ("json", "regex", "choice", "json_object", "grammar", "structural_tag")
LARK = 'is not served: give a Lark grammar, `response_format: {"type": "lark", "value": "start: …"}`'
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
    if len(text.encode()) > MOST_BYTES:
        refuse_size()
    return Grammar(GrammarKind.LARK, text)


def refuse_size() -> NoReturn:
    """Raises ValidationError for what calls are to be held to."""
    raise ValidationError(
        f"the schemas of `tools` make a grammar of more than {MOST_BYTES} bytes, which is too much: offer fewer "
        "functions, or leave `tool_choice`, `strict` and `response_format` out"
    )


def quoted(text: str) -> str:
    """A text as a Lark grammar has it. It is read as JSON, whose lexer takes no delete character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


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


# ------------------------------------------------------------------------------------------------------ TGI's `grammar`


def _grammar(given: GrammarParameters) -> Grammar:
    match given.type:
        case "regex" | "lark":
            if not isinstance(given.value, str):
                raise ValidationError(f"`grammar.value` must be a string for the type {given.type}")
            return Grammar(GrammarKind(given.type), given.value)
        case "json_schema":
            schema = given.value.get("schema") if isinstance(given.value, dict) else None
            if not isinstance(schema, dict):
                raise ValidationError("`grammar.value` must have a `schema`, an object, for the type json_schema")
        case _:
            schema = given.value if isinstance(given.value, dict) else _read(given.value)
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(typed(schema), ensure_ascii=False))


def _read(schema: str) -> dict[str, Any]:
    """A schema that is written as a string. Raises ValidationError for what is no object."""
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


# ---------------------------------------------------------------------------------------------- formats of other APIs


def grammar_of_chat(response_format: Mapping[str, Any] | None, extra: Mapping[str, Any]) -> GrammarParameters | None:
    """What the text is held to, by OpenAI's name or by another server's in `extra`. Raises ValidationError for both."""
    by_format, by_other = grammar_of_format(response_format), constraint_of(extra)
    if by_format is not None and by_other is not None:
        raise ValidationError("`response_format` and another server's name for it are both given: give one")
    return by_format or by_other


def grammar_of_format(given: Mapping[str, Any] | None) -> GrammarParameters | None:
    """What the text is held to; None where it is to nothing. Raises ValidationError.

    `{"type": "json_schema", "json_schema": {"name", "schema"}}` is OpenAI's, `{"type", "value"}` TGI's, and
    `{"type": "json_object", "schema"}` what others made of OpenAI's older one. What `strict` says changes nothing: the
    text always keeps to the schema.
    """
    kind = None if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if kind not in FORMATS:
        raise ValidationError(f"`response_format.type` must be one of {', '.join(FORMATS)}")
    if kind == "json_schema":
        return GrammarParameters(type="json", value=_schema(given))
    value = given.get("value", given.get("schema") if kind == "json_object" else None)
    if kind == "json_object" and value is None:
        return GrammarParameters(type="json", value=ANY_OBJECT)
    if not isinstance(value, str | dict):
        raise ValidationError(f"`response_format.value` is missing, which the type {kind} needs")
    return GrammarParameters(type="json" if kind == "json_object" else kind, value=value)


def _schema(given: Mapping[str, Any]) -> str | dict[str, Any]:
    """OpenAI nests it under `json_schema.schema`, TGI under `value.schema` or gives it as the value."""
    nested = given.get("json_schema", given.get("value"))
    if isinstance(nested, Mapping) and "schema" in nested and ("name" in nested or isinstance(nested["schema"], dict)):
        nested = nested["schema"]
    elif "json_schema" in given:
        nested = None
    if not isinstance(nested, str | dict):
        raise ValidationError("`response_format.json_schema` must have a `schema`, an object")
    return nested


def grammar_of_flat_format(
    where: str, given: Mapping[str, Any] | None, kinds: Sequence[str]
) -> GrammarParameters | None:
    """The same of `{"type": "json_schema", "schema"}`, as newer APIs have it. Raises ValidationError.

    where: it is in the body. kinds: that it may be.
    """
    if given is None:
        return None
    kind, schema = given.get("type"), given.get("schema")
    if kind not in kinds:
        one_of = "one of " if len(kinds) > 1 else ""
        raise ValidationError(f"`{where}.type` is {str(kind)[:40]}: give {one_of}{', '.join(kinds)}")
    if kind != "json_schema":
        return grammar_of_format({"type": kind})
    if not isinstance(schema, dict):
        raise ValidationError(f"`{where}.schema` must be a JSON schema, an object")
    return GrammarParameters(type="json", value=schema)


# ------------------------------------------------------------------------------------------------ other servers' names


def constraint_of(extra: Mapping[str, Any]) -> GrammarParameters | None:
    """What the text is held to by one of these names; None: by none. Raises ValidationError for two of them."""
    found = [(name, kind, extra[name]) for name, kind in NAMES.items() if _is_given(extra.get(name))]
    if (nested := extra.get(NESTED)) is not None:
        found += _nested(nested)
    if len(found) > 1:
        names = ", ".join(f"`{name}`" for name, _, _ in found)
        raise ValidationError(f"{names} are several constraints on one text: give one")
    return _constraint(*found[0]) if found else None


def _nested(given: Any) -> list[tuple[str, str, Any]]:
    if not isinstance(given, dict):
        raise ValidationError(f"`{NESTED}` must be an object with one of {', '.join(KINDS)}")
    for name, value in given.items():
        if name not in KINDS and _is_given(value):
            raise ValidationError(f"`{NESTED}.{name[:64]}` is not served: leave it out")
    return [(f"{NESTED}.{kind}", kind, given[kind]) for kind in KINDS if _is_given(given.get(kind))]


def _is_given(value: Any) -> bool:
    return value is not None and value is not False


def _constraint(name: str, kind: str, value: Any) -> GrammarParameters:
    match kind:
        case "json" if isinstance(value, str | dict):
            return GrammarParameters(type="json", value=value)
        case "json_object" if value is True:
            return GrammarParameters(type="json", value=ANY_OBJECT)
        case "regex" if isinstance(value, str):
            return GrammarParameters(type="regex", value=value)
        case "choice" if isinstance(value, list) and value and all(isinstance(one, str) and one for one in value):
            texts = [quoted(text) for text in dict.fromkeys(value)]
            return GrammarParameters(type="lark", value=f"start: {' | '.join(texts)}")
        case "grammar" | "structural_tag":
            raise ValidationError(f"`{name}` {LARK}")
    wanted = {"json": "a JSON schema", "json_object": "true", "regex": "a string", "choice": "a list of texts"}
    raise ValidationError(f"`{name}` must be {wanted[kind]}")
