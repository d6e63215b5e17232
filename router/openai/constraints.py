"""What other servers call a constraint on the text, as a grammar: vLLM's, SGLang's and llama.cpp's names.

A constraint that is not looked at is worse than one that is refused: the text comes, and does not keep to it. So what
has no counterpart here is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from router.errors import ValidationError
from router.schemas import GrammarParameters

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
