"""Schemas that name no type get the one that they speak of, at every level where they are schemas and nowhere else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.grammars.json_schema import any_of, typed

A = {"properties": {"a": {"type": "integer"}}}
A_TYPED = {"type": "object", **A}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (A, A_TYPED),
        ({"required": ["a"]}, {"type": "object", "required": ["a"]}),
        ({"additionalProperties": A}, {"type": "object", "additionalProperties": A_TYPED}),
        ({"patternProperties": {"^a": A}}, {"type": "object", "patternProperties": {"^a": A_TYPED}}),
        ({"items": A}, {"type": "array", "items": A_TYPED}),
        ({"prefixItems": [A, True]}, {"type": "array", "prefixItems": [A_TYPED, True]}),
        ({"properties": {}, "items": {}}, {"type": ["object", "array"], "properties": {}, "items": {}}),
        ({"allOf": [A, {"required": ["a"]}]}, {"allOf": [A_TYPED, {"type": "object", "required": ["a"]}]}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [A_TYPED, {"type": "null"}]}),
        ({"$defs": {"x": A}, "$ref": "#/$defs/x"}, {"$defs": {"x": A_TYPED}, "$ref": "#/$defs/x"}),
        ({"properties": {"properties": A}}, {"type": "object", "properties": {"properties": A_TYPED}}),
        ({"type": "string", "format": "path"}, {"type": "string"}),  # which says nothing that a text could be held to
        ({"anyOf": [{"type": "string", "format": "uuid"}]}, {"anyOf": [{"type": "string", "format": "uuid"}]}),
        ({"properties": {"format": A}}, {"type": "object", "properties": {"format": A_TYPED}}),
    ],
)
def test_types_are_those_that_a_schema_speaks_of(given: dict[str, Any], expected: dict[str, Any]) -> None:
    before = json.dumps(given)
    assert expected == typed(given)
    assert before == json.dumps(given)  # which is the client's


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"type": ["object", "null"], "required": ["a"]},
        {"const": {"properties": {}}},
        {"enum": [{"items": []}], "required": ["a"]},
        {"$ref": "#/a", "properties": {}},
        {"type": ["object", "null"], "properties": {}, "anyOf": [{"required": ["a"]}, {"allOf": [{"items": {}}]}]},
        {"anyOf": [{"type": "string"}, {"type": "array"}], "additionalProperties": False},
        {"not": {"required": ["a"]}},
        {"if": {"required": ["a"]}, "default": {"properties": 1}, "examples": [{"items": 2}]},
        {"type": "object", "properties": ["a"], "required": 3, "items": 4, "anyOf": {"a": 1}},
    ],
)
def test_what_says_what_it_allows_is_left_as_it_is(given: dict[str, Any]) -> None:
    assert given == typed(given)


def test_schemas_refer_to_themselves_wherever_they_stand() -> None:
    tree = {"properties": {"next": {"$ref": "#"}, "leaf": {"$ref": "#/$defs/leaf"}}, "$defs": {"leaf": {"const": 1}}}
    away = {"$ref": "https://example.org/schema"}
    found = any_of([tree, away, {"enum": [{"$ref": "#"}]}])
    assert [{"$ref": "#/$defs/it_0"}, {"$ref": "#/$defs/it_1"}, {"$ref": "#/$defs/it_2"}] == found["anyOf"]
    first, second, third = found["$defs"].values()
    assert {"next": {"$ref": "#/$defs/it_0"}, "leaf": {"$ref": "#/$defs/it_0/$defs/leaf"}} == first["properties"]
    assert (away, {"enum": [{"$ref": "#"}]}) == (second, third)


def test_it_may_be_as_deep_as_it_likes() -> None:
    schema: dict[str, Any] = {}
    for _ in range(50_000):
        schema = {"items": schema}
    found, depth = typed(schema), 0
    while "items" in found:
        assert "array" == found["type"]
        found, depth = found["items"], depth + 1
    assert 50_000 == depth
