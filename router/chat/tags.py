"""Arguments of a call that a model writes between tags, one after the other, as JSON.

Texts stand there without quotes, so what a value is depends on the schema of the argument: a text is given out as it
comes, anything else once it is whole, as JSON if it is of a type that the schema has, and as a text if not.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from typing import Any

from router.chat.formats import Tags
from router.chat.streamed_values import Marks, NotThis, Source, Steps, inside_quotes
from router.chat.tools import MOST_NAME

Schema = Mapping[str, Any]
Sink = Callable[[str], None]
TYPES: Mapping[type, tuple[str, ...]] = {
    dict: ("object",),
    list: ("array",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    type(None): ("null",),
}
UNKNOWN = frozenset({"object", "array"})  # what is taken for JSON where the schema says nothing
WORDS = {"True": "true", "False": "false", "None": "null"}  # which models write that have read much Python
MOST_PYTHON = 100_000  # characters of a value in Python's notation
MOST_REFERENCES = 8  # of a schema to another


class TaggedReader:
    """Reads calls from a source. end_mark: of the whole call, where the format has no tag for its end."""

    def __init__(self, source: Source, tags: Tags, end_mark: str) -> None:
        self._source, self._tags = source, tags
        self._ends = tuple(mark for mark in (tags.end, end_mark) if mark)
        inner = (tags.key, *self._ends)
        self._kept_behind_name = inner
        self._behind_name = Marks(inner, tags.name_end) if len(tags.name_end) == 1 else Marks((*inner, tags.name_end))
        self._between = Marks(inner)
        self._key_end = Marks((tags.key_end,))
        self._value_ends = Marks(tuple(dict.fromkeys((tags.padding + tags.value_end, tags.value_end))))

    def name(self) -> Steps[str]:
        """The name, behind its mark. Raises NotThis, and Ended."""
        return (yield from self._word(self._behind_name, self._kept_behind_name, most=MOST_NAME + 2))

    def arguments(self, schema: Schema, sink: Sink) -> Steps[None]:
        """All arguments and what ends them, as one object for the sink. Raises Ended within them."""
        sink("{")
        comma = ""
        while (yield from self._next()) == self._tags.key:
            yield from self._source.accept(self._tags.key)
            key = yield from self._word(self._key_end)
            sink(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
            comma = ", "
            yield from self._value(schema_of_argument(schema, key), sink)
        if self._tags.end:
            yield from self._source.accept(self._tags.end)
        sink("}")

    def _next(self) -> Steps[str]:
        """The next tag, which stays unread; what is in front of it is dropped."""
        mark = ""
        while not mark:
            _, mark = yield from self._source.until(self._between, keeps=(self._tags.key, *self._ends))
        return mark

    def _word(self, marks: Marks, keeps: tuple[str, ...] = (), most: int | None = None) -> Steps[str]:
        """A text up to a mark, without blanks around it. Raises NotThis for more than so many characters."""
        written: list[str] = []
        length, mark = 0, ""
        while not mark:
            text, mark = yield from self._source.until(marks, keeps)
            written.append(text)
            length += len(text)
            if most is not None and length > most:
                raise NotThis
        return "".join(written).strip()

    def _value(self, schema: Schema, sink: Sink) -> Steps[None]:
        tags = self._tags
        if tags.value:
            yield from self._source.skip_blanks()
            yield from self._source.accept(tags.value)
        if tags.padding:
            yield from self._source.accept(tags.padding)
        types = types_of(schema)
        is_text = types == {"string"}
        if is_text:
            sink('"')
        written, mark = [], ""
        while not mark:
            text, mark = yield from self._source.until(self._value_ends)
            if is_text:
                sink(inside_quotes(text))
            else:
                written.append(text)
        sink('"' if is_text else as_json("".join(written), types))


def schema_of_argument(schema: Schema, name: str) -> Schema:
    """What the schema of a function says of one argument, behind references within it; nothing: an empty one."""
    properties = schema.get("properties")
    found: Any = properties.get(name) if isinstance(properties, Mapping) else None
    for _ in range(MOST_REFERENCES):
        reference = found.get("$ref") if isinstance(found, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        found = schema
        for part in reference[2:].split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def types_of(schema: Schema) -> set[str]:
    """The types that values of a schema may have; none: not known."""
    given = schema.get("type")
    found = {given} if isinstance(given, str) else {one for one in given or () if isinstance(one, str)}
    if not found and isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        found = {name for value in values for name in TYPES.get(type(value), ("string",))}
    if not found:
        for name in ("anyOf", "oneOf"):
            options = schema.get(name)
            for one in options if isinstance(options, list) else ():
                found |= types_of(one) if isinstance(one, Mapping) else set()
    return found


def as_json(text: str, types: set[str]) -> str:
    """A value in JSON: as it was written where that is a value of one of the types, and else as a text."""
    wanted = types - {"string"} if types else UNKNOWN
    written = _written(text.strip(), wanted)
    kinds = _kinds_of(written)
    if wanted.intersection(kinds) or (kinds and types and "string" not in types):
        return written
    return json.dumps(text, ensure_ascii=False)


def _written(text: str, wanted: Set[str]) -> str:
    """In JSON what a model may write as Python does: words, and lists and dictionaries where such are wanted."""
    if wanted & UNKNOWN and text[:1] in ("{", "[") and len(text) <= MOST_PYTHON and not _kinds_of(text):
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    return WORDS.get(text, text)


def _kinds_of(text: str) -> tuple[str, ...]:
    """The types that a value in JSON is of; none for what is no JSON, or a text."""
    try:
        return TYPES.get(type(json.loads(text, parse_constant=_refuse)), ())
    except (ValueError, RecursionError):
        return ()


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # NaN and the infinities, which JSON does not have
