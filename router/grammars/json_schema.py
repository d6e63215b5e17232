"""JSON schemas that are changed before they hold a text: types for those that name none, and one of several.

A schema that speaks of `properties` says nothing about anything but objects, so that by JSON Schema a number keeps to
it. Who writes one means an object (and TGI's own examples name no type), as who speaks of `items` means an array.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

OF_OBJECTS = frozenset({"properties", "required", "additionalProperties", "patternProperties"})
OF_ARRAYS = frozenset({"items", "prefixItems"})
# Where a schema says itself what it allows, of whatever type; of branches, each says it.
SAYING = frozenset({"type", "const", "enum", "$ref", "anyOf", "oneOf", "allOf"})
BRANCHES = ("anyOf", "oneOf", "allOf")
# Keywords whose value is a schema, a list of schemas, or schemas by name. `not` and `if` are left as they are: there a
# narrower schema allows more.
HAVING_ONE = ("additionalProperties", "items", "then", "else", "contains", "additionalItems", "unevaluatedProperties")
HAVING_MANY = ("prefixItems", "items", "anyOf", "oneOf", "allOf")
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def typed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with a type at every level that speaks of properties or items and names none."""
    whole, branches = dict(schema), set[int]()  # those below a type, which is theirs too
    for one in _all(whole):
        if "type" in one or id(one) in branches:
            branches |= {id(branch) for keyword in BRANCHES for branch in _list(one.get(keyword))}
        if not SAYING & one.keys() and id(one) not in branches:
            types = [name for name, words in (("object", OF_OBJECTS), ("array", OF_ARRAYS)) if words & one.keys()]
            if types:
                one["type"] = types[0] if len(types) == 1 else types
    return whole


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def any_of(schemas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The schema that is kept to where one of these is. Their references are to themselves as before."""
    each = {f"it_{number}": moved(schema, f"#/$defs/it_{number}") for number, schema in enumerate(schemas)}
    return {"$defs": each, "anyOf": [{"$ref": f"#/$defs/{name}"} for name in each]}


def moved(schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The schema as part of another one, at this place there: its references to its own root follow it."""
    whole = dict(schema)
    for one in _all(whole):
        if isinstance(reference := one.get("$ref"), str) and reference.startswith("#"):
            one["$ref"] = place + reference[1:]
    return whole


def _all(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A schema and all within it, each of which may be changed. Not by recursion: its client decides how deep it is."""
    left = [whole]
    while left:
        one = left.pop()
        left += _copied(one)
        yield one


def _copied(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas within a schema, each of them a copy from now on."""
    for keyword in HAVING_ONE:
        if isinstance(schema.get(keyword), dict):
            schema[keyword] = dict(schema[keyword])
            yield schema[keyword]
    for keyword in HAVING_MANY:
        if isinstance(schema.get(keyword), list):
            schema[keyword] = [dict(one) if isinstance(one, dict) else one for one in schema[keyword]]
            yield from (one for one in schema[keyword] if isinstance(one, dict))
    for keyword in BY_NAME:
        if isinstance(schema.get(keyword), dict):
            schema[keyword] = {
                name: dict(one) if isinstance(one, dict) else one for name, one in schema[keyword].items()
            }
            yield from (one for one in schema[keyword].values() if isinstance(one, dict))
