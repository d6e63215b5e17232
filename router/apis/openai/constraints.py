"""What a text is held to, as a grammar: OpenAI's `response_format`, and what vLLM, SGLang and llama.cpp call it.

A constraint that is not looked at is worse than one that is refused: the text comes, and does not keep to it. So what
has no counterpart here is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from router.errors import ValidationError
from router.requests.schemas import GrammarParameters

LARK = 'is not served: give a Lark grammar, `response_format: {"type": "lark", "value": "start: …"}`'
# Each name, and which of the kinds below it is.
NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_json_object": "json_object",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "grammar": "grammar",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
NESTED = "structured_outputs"  # vLLM's newer form: an object of kinds
ANY_OBJECT = {"type": "object"}
KINDS = ("json", "regex", "choice", "json_object", "grammar", "structural_tag")


def constraint_of(extra: Mapping[str, Any]) -> GrammarParameters | None:
    """What the text is held to by one of these names; None: by none. Raises ValidationError for two of them."""
    found = [(name, kind, extra[name]) for name, kind in NAMES.items() if _is_given(extra.get(name))]
    if (nested := extra.get(NESTED)) is not None:
        found += _nested(nested)
    if len(found) > 1:
        names = ", ".join(f"`{name}`" for name, _, _ in found)
        raise ValidationError(f"{names} are several constraints on one text: give one")
    return _grammar(*found[0]) if found else None


def _nested(given: Any) -> list[tuple[str, str, Any]]:
    if not isinstance(given, dict):
        raise ValidationError(f"`{NESTED}` must be an object with one of {', '.join(KINDS)}")
    for name, value in given.items():
        if name not in KINDS and _is_given(value):
            raise ValidationError(f"`{NESTED}.{name[:64]}` is not served: leave it out")
    return [(f"{NESTED}.{kind}", kind, given[kind]) for kind in KINDS if _is_given(given.get(kind))]


def _is_given(value: Any) -> bool:
    return value is not None and value is not False


def _grammar(name: str, kind: str, value: Any) -> GrammarParameters:
    match kind:
        case "json" if isinstance(value, str | dict):
            return GrammarParameters(type="json", value=value)
        case "json_object" if value is True:
            return GrammarParameters(type="json", value=ANY_OBJECT)
        case "regex" if isinstance(value, str):
            return GrammarParameters(type="regex", value=value)
        case "choice" if isinstance(value, list) and value and all(isinstance(one, str) and one for one in value):
            return GrammarParameters(type="lark", value=_one_of(value))
        case "grammar" | "structural_tag":
            raise ValidationError(f"`{name}` {LARK}")
    wanted = {"json": "a JSON schema", "json_object": "true", "regex": "a string", "choice": "a list of texts"}
    raise ValidationError(f"`{name}` must be {wanted[kind]}")


def _one_of(texts: Sequence[str]) -> str:
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(texts))


FORMATS = ("text", "json_object", "json_schema", "json", "regex", "lark")


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
