"""OpenAI's `response_format` as a grammar: its own nesting, and TGI's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.errors import ValidationError
from router.schemas import GrammarParameters

ANY_OBJECT = {"type": "object"}
KINDS = ("text", "json_object", "json_schema", "json", "regex", "lark")


def grammar_of_format(given: Mapping[str, Any] | None) -> GrammarParameters | None:
    """What the text is held to; None where it is to nothing. Raises ValidationError.

    `{"type": "json_schema", "json_schema": {"name", "schema"}}` is OpenAI's, `{"type", "value"}` TGI's, and
    `{"type": "json_object", "schema"}` what others made of OpenAI's older one. What `strict` says changes nothing: the
    text always keeps to the schema.
    """
    kind = None if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if kind not in KINDS:
        raise ValidationError(f"`response_format.type` must be one of {', '.join(KINDS)}")
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
