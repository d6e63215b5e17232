"""Arguments of a call that a model writes between tags, one after the other, as JSON.

Texts stand there without quotes, so what a value is depends on the schema of the argument: a text is given out as it
comes, anything else once it is whole, as JSON if it is of a type that the schema has, and as a text if not.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from typing import Any

from router.chat.formats import Tags
from router.chat.streamed_values import Ended, Marks, NotThis, Source, Steps, inside_quotes
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
        self._end_mark = end_mark
        # What ends a value whose tag the model forgot: only where each stands on a line of its own.
        self._next_key = f"{tags.padding}{tags.key}" if tags.padding and tags.end else ""
        self._next_end = f"{tags.padding}{tags.end}" if tags.padding and tags.end else ""
        ends = (f"{tags.padding}{tags.value_end}", tags.value_end, self._next_key, self._next_end)
        self._value_ends = Marks(tuple(dict.fromkeys(mark for mark in ends if mark)))
        self._key_read: str | None = None  # the name of the next argument, where the value before has found it
        self._is_over = False  # a value has found the end of the call

    def name(self) -> Steps[str]:
        """The name, behind its mark, where a call follows: a text may mention one. Raises NotThis, and Ended."""
        name = yield from self._word(self._behind_name, self._kept_behind_name, most=MOST_NAME + 2)
        yield from self._source.skip_blanks()
        if not (yield from self._source.ahead((self._tags.key, *self._ends))):
            raise NotThis
        return name

    def arguments(self, schema: Schema, sink: Sink) -> Steps[None]:
        """All arguments and what ends them, as one object for the sink. Raises Ended within them."""
        sink("{")
        comma = ""
        self._key_read, self._is_over = None, False
        while not self._is_over and (self._key_read is not None or (yield from self._next()) == self._tags.key):
            key, self._key_read = self._key_read, None
            if key is None:
                yield from self._source.accept(self._tags.key)
                key = yield from self._word(self._key_end)
            sink(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
            comma = ", "
            yield from self._value(key, schema, sink)
        if self._tags.end and not self._is_over:
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
            text, mark = yield from self._source.until(marks, keeps, None if most is None else most + 1 - length)
            written.append(text)
            length += len(text)
            if most is not None and length > most:
                raise NotThis
        return "".join(written).strip()

    def _value(self, key: str, root: Schema, sink: Sink) -> Steps[None]:
        tags = self._tags
        if tags.value:
            yield from self._source.skip_blanks()
            yield from self._source.accept(tags.value)
        if tags.padding:
            yield from self._source.accept(tags.padding)
        schema = schema_of_argument(root, key)
        types = types_of(schema, root)
        is_text = types == {"string"}
        if is_text:
            sink('"')
        written: list[str] = []

        def show(text: str) -> None:
            if is_text:
                sink(inside_quotes(text))
            else:
                written.append(text)

        yield from self._up_to_end(root, show)
        sink('"' if is_text else as_json("".join(written), types))

    def _up_to_end(self, root: Schema, show: Sink) -> Steps[None]:
        """A value up to what ends it: its tag, or where the model forgot that, what can only come behind it."""
        while True:
            text, mark = yield from self._source.until(self._value_ends)
            show(text)
            if not mark:
                continue
            if mark == self._next_key:
                key = yield from self._key()
                if key.strip() in _known(root):
                    self._key_read = key.strip()
                    return
                show(f"{mark}{key}{self._tags.key_end}")
            elif mark == self._next_end:
                if (blanks := (yield from self._blanks_before_end())) is None:
                    self._is_over = True
                    return
                show(mark + blanks)
            else:
                return

    def _blanks_before_end(self) -> Steps[str | None]:
        """None where the call's end mark follows, or nothing; else the blanks that were read."""
        self._source.record()
        try:
            yield from self._source.skip_blanks()
            is_end = yield from self._source.ahead((self._end_mark,))
        except Ended:
            is_end = True
        blanks = self._source.recorded()
        return None if is_end else blanks

    def _key(self) -> Steps[str]:
        parts: list[str] = []
        mark = ""
        while not mark:
            text, mark = yield from self._source.until(self._key_end)
            parts.append(text)
        return "".join(parts)


def _known(root: Schema) -> Schema:
    properties = resolved(root, root).get("properties")
    return properties if isinstance(properties, Mapping) else {}


def schema_of_argument(schema: Schema, name: str) -> Schema:
    """What the schema of a function says of one argument, behind references within it; nothing: an empty one."""
    properties = resolved(schema, schema).get("properties")
    return resolved(properties.get(name) if isinstance(properties, Mapping) else None, schema)


def resolved(found: Any, root: Schema) -> Schema:
    """A schema behind its references to places in the root's; an empty one where there is none."""
    for _ in range(MOST_REFERENCES):
        reference = found.get("$ref") if isinstance(found, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        found = root
        for part in reference[1:].split("/")[1:]:
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def types_of(schema: Schema, root: Schema, depth: int = 0) -> set[str]:
    """The types that values of a schema may have; none: not known."""
    found = _types(schema)
    for one in () if found or depth > MOST_REFERENCES else _branches(schema):
        types = types_of(resolved(one, root), root, depth + 1)
        if not types:
            return set()  # one of them may be anything
        found |= types
    return found


def _types(schema: Schema) -> set[str]:
    """Those that it names, or its values have."""
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return {one for one in given if isinstance(one, str)}
    return {name for value in _values(schema) or () for name in TYPES.get(type(value), ("string",))}


def _values(schema: Schema) -> list[Any] | None:
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) and values else None


def _branches(schema: Schema) -> Iterator[Any]:
    for name in ("anyOf", "oneOf", "allOf"):
        options = schema.get(name)
        yield from options if isinstance(options, list) else ()


def choices_of(schema: Schema, root: Schema, depth: int = 0) -> list[Any] | None:
    """All values that a schema allows, where it names them; None: others too."""
    if (values := _values(schema)) is not None:
        types = _types(schema)
        return [value for value in values if types.intersection(TYPES.get(type(value), ("string",)))]
    if schema.get("type") == "null":
        return [None]
    if depth > MOST_REFERENCES or "allOf" in schema or not (branches := list(_branches(schema))):
        return None
    found: list[Any] = []
    for one in branches:
        values = choices_of(resolved(one, root), root, depth + 1)
        if values is None:
            return None
        found += values
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
            written = json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
            written.encode()  # a lone half of a surrogate pair is no text
            return written
    return WORDS.get(text, text)


def _kinds_of(text: str) -> tuple[str, ...]:
    """The types that a value in JSON is of; none for what is no JSON, or a text."""
    try:
        return TYPES.get(type(json.loads(text, parse_constant=_refuse)), ())
    except (ValueError, RecursionError):
        return ()


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # NaN and the infinities, which JSON does not have
