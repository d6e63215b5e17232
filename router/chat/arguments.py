"""What a function's schema says of its arguments, for formats in which these are texts between tags.

A schema comes from a client, so only so much of it is looked at; what lies beyond counts as not known. Left out: what
holds a value to its schema (`grammars.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

from router.grammars.json_schema import place_in

Schema = Mapping[str, Any]
TYPES: Mapping[type, tuple[str, ...]] = {
    dict: ("object",),
    list: ("array",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    type(None): ("null",),
}
NOTHING: Schema = {}  # what a reference to no schema stands for
MOST_REFERENCES = 8  # of a schema to another, one after the other
MOST_LOOKED_AT = 5000  # schemas and values of a function
UNIONS = ("anyOf", "oneOf", "allOf")


class Arguments:
    """Those of one function. root: its parameters, an object. What is found out is kept."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self._num_left = MOST_LOOKED_AT
        self._types: dict[int, set[str]] = {}  # by the id of a schema, which the root keeps
        self._choices: dict[int, list[Any] | None] = {}

    @cached_property
    def schemas(self) -> dict[str, Any]:
        """Each declared argument with its schema, in the root or in one that it is made of."""
        found: dict[str, Any] = {}
        for one, _ in self._parts:
            properties = one.get("properties")
            for name, schema in properties.items() if isinstance(properties, Mapping) else ():
                found.setdefault(name, schema)
        return found

    @cached_property
    def required(self) -> frozenset[str]:
        """The names of those that must be there."""
        lists = (one.get("required") for one, is_certain in self._parts if is_certain)
        return frozenset(name for names in lists if isinstance(names, list) for name in names if isinstance(name, str))

    @cached_property
    def others(self) -> Schema | None:
        """The schema of arguments that are not declared; None: there are none, unless the schema says so."""
        for one, _ in self._parts:
            if one.get("additionalProperties", False) is not False or one.get("patternProperties"):
                return self.resolved(one.get("additionalProperties"))
        return None

    @property
    def own(self) -> Schema:
        """The schema of them all, behind its references."""
        return self.resolved(self.root)

    def of(self, name: str) -> Any:
        """The schema of one argument, as it was given; an empty one where nothing is said."""
        return self.schemas[name] if name in self.schemas else self.others or NOTHING

    def types(self, schema: Any) -> set[str]:
        """The types that values of a schema may have; none: not known."""
        if id(schema) not in self._types:
            each = [_types(one) for one in self.alternatives(schema, lambda one: bool(_types(one))) or ()]
            self._types[id(schema)] = set().union(*each) if all(each) else set()
        return self._types[id(schema)]

    def choices(self, schema: Any) -> list[Any] | None:
        """All values that a schema allows, where it names them; None: others too."""
        if id(schema) not in self._choices:
            each = [_choices(one) for one in self.alternatives(schema, _is_decided) or [NOTHING]]
            found = [value for values in each for value in values or ()]
            self._choices[id(schema)] = None if None in each else found
        return self._choices[id(schema)]

    def alternatives(self, schema: Any, is_one: Callable[[Schema], bool] = lambda one: False) -> list[Schema] | None:
        """The schemas that a union is made of, behind references; `is_one`: of no more. None: it is not known."""
        found: list[Schema] = []
        left, seen = [schema], set[int]()
        while left:
            one = self.resolved(left.pop())
            if id(one) in seen:
                continue
            seen.add(id(one))
            if not self._may_look_at(one):
                return None
            branches = [] if is_one(one) else [branch for _, branch in _branches(one)]
            left += reversed(branches)
            if not branches:
                found.append(one)
        return found

    def resolved(self, found: Any) -> Schema:
        """A schema behind its references to places in the root; `NOTHING` where there is none."""
        for _ in range(MOST_REFERENCES):
            reference = found.get("$ref") if isinstance(found, Mapping) else None
            if not isinstance(reference, str) or not reference.startswith("#"):
                break
            found = place_in(self.root, reference)
        return found if isinstance(found, Mapping) else NOTHING

    @cached_property
    def _parts(self) -> list[tuple[Schema, bool]]:
        """The root, and those that it is made of; whether arguments keep to it in any case."""
        found: list[tuple[Schema, bool]] = []
        left, seen = deque([(self.root, True)]), set[int]()
        while left:
            given, is_certain = left.popleft()
            one = self.resolved(given)
            if id(one) not in seen and self._may_look_at(one):
                seen.add(id(one))
                found.append((one, is_certain))
                left += ((branch, is_certain and union == "allOf") for union, branch in _branches(one))
        return found

    def _may_look_at(self, schema: Schema) -> bool:
        """Whether there are still so many schemas and values to look at as this one has."""
        lists = (schema.get(name) for name in (*UNIONS, "enum", "type"))
        self._num_left -= 1 + sum(len(found) for found in lists if isinstance(found, list))
        return self._num_left >= 0


def kinds_of(value: Any) -> tuple[str, ...]:
    """The types of JSON Schema that a value is of."""
    if isinstance(value, float) and value.is_integer():
        return ("integer", "number")
    return TYPES.get(type(value), ("string",))


def _branches(schema: Schema) -> Iterator[tuple[str, Any]]:
    for union in UNIONS:
        options = schema.get(union)
        yield from ((union, option) for option in (options if isinstance(options, list) else ()))


def _types(schema: Schema) -> set[str]:
    """Those that it names, or its values have."""
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return {one for one in given if isinstance(one, str)}
    return {name for value in _values(schema) or () for name in kinds_of(value)}


def _values(schema: Schema) -> list[Any] | None:
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) and values else None


def _is_decided(schema: Schema) -> bool:
    """Whether its unions say nothing of its choices."""
    return _values(schema) is not None or schema.get("type") == "null" or "allOf" in schema


def _choices(schema: Schema) -> list[Any] | None:
    if (values := _values(schema)) is not None:
        types = _types(schema)
        return [value for value in values if types.intersection(kinds_of(value))] or values
    return [None] if schema.get("type") == "null" else None
