"""Arguments of a call that a model writes between tags, one after the other, as JSON.

Texts stand there without quotes, so what a value is depends on the schema of the argument: a text is given out as it
comes, anything else once it is whole, as JSON if it is of a type that the schema has, and as a text if not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Set
from contextlib import suppress

from router.chat.arguments import TYPES, Arguments, Schema, kinds_of
from router.chat.formats import Tags
from router.chat.streamed_values import (
    WORDS,
    Ended,
    Marks,
    NotThis,
    Sink,
    Source,
    Steps,
    inside_quotes,
    json_of,
    value_in_python,
)
from router.chat.tools import MOST_NAME

UNKNOWN = frozenset({"object", "array"})  # what is taken for JSON where the schema says nothing
MOST_PYTHON = 100_000  # characters of a value in Python's notation
QUOTES = re.compile(r'\\.?|"', re.DOTALL)


class TaggedReader:
    """Reads calls from a source. end_mark: of the whole call, where the format has no tag for its end."""

    def __init__(self, source: Source, tags: Tags, end_mark: str) -> None:
        self._source, self._tags = source, tags
        self._ends = tuple(mark for mark in (tags.end, end_mark) if mark)
        self._inner = (tags.key, *self._ends)
        behind = (self._inner, tags.name_end) if len(tags.name_end) == 1 else ((*self._inner, tags.name_end), "")
        self._behind_name = Marks(*behind)
        self._between = Marks(self._inner)
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
        name, _ = yield from self._source.text_up_to(self._behind_name, self._inner, MOST_NAME + 2)
        yield from self._source.skip_blanks()
        if not (yield from self._source.ahead(self._inner)):
            raise NotThis
        return name.strip()

    def arguments(self, schema: Schema, sink: Sink) -> Steps[None]:
        """All arguments and what ends them, as one object for the sink. Raises Ended within them."""
        sink("{")
        known, comma = Arguments(schema), ""
        self._key_read, self._is_over = None, False
        while not self._is_over and (self._key_read is not None or (yield from self._next()) == self._tags.key):
            key, self._key_read = self._key_read, None
            if key is None:
                yield from self._source.accept(self._tags.key)
                key, _ = yield from self._source.text_up_to(self._key_end)
                key = key.strip()
            sink(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
            comma = ", "
            yield from self._value(key, known, sink)
        if self._tags.end and not self._is_over:
            yield from self._source.accept(self._tags.end)
        sink("}")

    def _next(self) -> Steps[str]:
        """The next tag, which stays unread; what is in front of it is dropped."""
        return (yield from self._source.pass_on(self._between, lambda _: None, keeps=self._inner))

    def _value(self, key: str, known: Arguments, sink: Sink) -> Steps[None]:
        tags = self._tags
        if tags.value:
            yield from self._source.skip_blanks()
            yield from self._source.accept(tags.value)
        if tags.padding:
            yield from self._source.accept(tags.padding)
        types = known.types(known.of(key))
        if types == {"string"}:
            sink('"')
            yield from self._up_to_end(known, lambda text: sink(inside_quotes(text)))
            sink('"')
        else:
            held = _Held(is_json=bool(types) and "string" not in types)
            yield from self._up_to_end(known, held.add, held)
            sink(as_json(held.text, types))

    def _up_to_end(self, known: Arguments, show: Sink, held: _Held | None = None) -> Steps[None]:
        """A value up to what ends it: its tag, or where the model forgot that, what can only come behind it."""
        while True:
            mark = yield from self._source.pass_on(self._value_ends, show)
            if held is not None and held.is_within_string:
                show(mark)
            elif mark == self._next_key:
                key, _ = yield from self._source.text_up_to(self._key_end)
                if key.strip() in known.schemas:
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


class _Held:
    """A value that is not known before it is whole. is_json: whether it is no text in any case."""

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json
        self._parts: list[str] = []
        self._kind = ""  # its first character, and the first quote of either kind
        self._is_within = False
        self._is_escaped = False  # what comes next, by a backslash

    @property
    def text(self) -> str:
        """What there is of it."""
        return "".join(self._parts)

    @property
    def is_within_string(self) -> bool:
        """Whether a string of JSON has begun, and is not over: what looks like a tag is a part of it."""
        return self._is_within

    def add(self, text: str) -> None:
        """More of it."""
        self._parts.append(text)
        if self._is_json and self._has_strings_of_json(text):
            self._follow(text)

    def _has_strings_of_json(self, text: str) -> bool:
        """Whether it is a list or an object, and not in Python's notation, by the first quote of it."""
        for character in text if len(self._kind) < 2 else "":
            if not self._kind and not character.isspace():
                self._kind = character
            elif character in "'\"":
                self._kind += character
                break
        return self._kind in ('["', '{"')

    def _follow(self, text: str) -> None:
        if self._is_escaped:
            text, self._is_escaped = text[1:], not text
        for found in QUOTES.findall(text):
            self._is_within ^= found == '"'
            self._is_escaped = found == "\\"


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
        with suppress(NotThis):
            return value_in_python(text)
    return WORDS.get(text, text)


def _kinds_of(text: str) -> tuple[str, ...]:
    """The types that a value in JSON is of; none for what is no JSON, or a text."""
    try:
        value = json_of(text)
    except NotThis:
        return ()
    return kinds_of(value) if type(value) in TYPES else ()
