"""Changes to JSON schemas before they constrain a text: types where none is named, unions, and parts by themselves.

By JSON Schema, `properties` constrains objects alone, so that a number satisfies such a schema, too. Its author means
an object (TGI's own examples name no type), as `items` means an array.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

OF_OBJECTS = frozenset({"properties", "required", "additionalProperties", "patternProperties"})
OF_ARRAYS = frozenset({"items", "prefixItems"})
# Keywords of schemas that need no type added: they name the values, or refer to schemas that have one.
HAVING_VALUES = frozenset({"type", "const", "enum", "$ref", "anyOf", "oneOf", "allOf"})
# What a text may be held to, by llguidance; of numbers a format says nothing either.
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri unknown".split())
BRANCHES = ("anyOf", "oneOf", "allOf")
# Keywords whose value is a schema, a list of schemas, or schemas by name. `not` and `if` are left as they are: there a
# narrower schema allows more.
HAVING_ONE = ("additionalProperties", "items", "then", "else", "contains", "additionalItems", "unevaluatedProperties")
HAVING_MANY = ("prefixItems", "items", "anyOf", "oneOf", "allOf")
MOST_REFERENCE = 1000  # characters of a reference that is followed
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def typed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with a type at every level that has keywords of objects or arrays and names none.

    Formats of texts that no grammar has are left out: they tell people what a text is, and hold nothing.
    """
    whole, branches = dict(schema), set[int]()  # of schemas with a type, which holds for them too
    for one in _all(whole):
        if isinstance(one.get("format"), str) and one["format"] not in FORMATS:
            del one["format"]
        if "type" in one or id(one) in branches:
            branches |= {id(branch) for keyword in BRANCHES for branch in _list(one.get(keyword))}
        if not HAVING_VALUES & one.keys() and id(one) not in branches:
            types = [name for name, words in (("object", OF_OBJECTS), ("array", OF_ARRAYS)) if words & one.keys()]
            if types:
                one["type"] = types[0] if len(types) == 1 else types
    return whole


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def any_of(schemas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The schema that is satisfied where one of these is; their references are moved with them."""
    each = {f"it_{number}": moved(schema, f"#/$defs/it_{number}") for number, schema in enumerate(schemas)}
    return {"$defs": each, "anyOf": [{"$ref": f"#/$defs/{name}"} for name in each]}


def moved(schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The schema for a place in another one, with its references to its own root changed."""
    whole = dict(schema)
    for one in _all(whole):
        if isinstance(reference := one.get("$ref"), str) and reference.startswith("#"):
            one["$ref"] = place + reference[1:]
    return whole


def alone(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """A schema that stands within a root, by itself: with each schema there that it refers to, and those that do.

    What refers to nothing stays as it is, so that an error names it as the client does.
    """
    names: dict[str, str] = {}  # by reference
    left: list[tuple[str, Any]] = []  # names, and what they stand for

    def renamed(one: Mapping[str, Any]) -> dict[str, Any]:
        whole = dict(one)
        for inner in _all(whole):
            reference = inner.get("$ref")
            if not isinstance(reference, str) or not reference.startswith("#"):
                continue
            if reference not in names and (target := place_in(root, reference)) is not None:
                names[reference] = f"r{len(names)}"
                left.append((names[reference], target))
            if reference in names:
                inner["$ref"] = f"#/$defs/{names[reference]}"
        return whole

    found, kept = renamed(schema), {}
    while left:
        name, target = left.pop()
        kept[name] = renamed(target) if isinstance(target, Mapping) else target
    return {**found, "$defs": kept} if names else found


def place_in(root: Any, reference: str) -> Any:
    """What a reference such as `#/$defs/a` points to; None: nothing. RFC 6901, in the fragment of an address."""
    if len(reference) > MOST_REFERENCE:
        return None
    found = root
    for part in _path_of(reference):
        if isinstance(found, Mapping):
            found = found.get(part)
        elif isinstance(found, list) and part.isdecimal() and int(part[:9]) < len(found):
            found = found[int(part[:9])]
        else:
            return None
    return found


def _path_of(reference: str) -> list[str]:
    """The keys on the way of a reference into its own root."""
    return [unquote(part).replace("~1", "/").replace("~0", "~") for part in reference[1:].split("/")[1:]]


def _all(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A schema and all within it, each of which may be changed. Without recursion: a client decides how deep it is."""
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
