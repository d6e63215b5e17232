"""Arguments of a call that a model writes between tags, one after the other, as JSON.

Texts stand there without quotes, so what a value is depends on the schema of the argument: a text is given out as it
comes, anything else once it is whole, as JSON if it is of a type that the schema has, and as a text if not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Set
from contextlib import suppress

from router.chat.arguments import TYPES, Arguments, kinds_of
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
MOST_PYTHON = 10_000  # characters of a value in Python's notation
ENDS_OF_KEYS = "<\n"  # that no tag has before its own end
QUOTES = re.compile(r'\\.?|"', re.DOTALL)


class TaggedReader:
    """Reads calls from a source. end_mark: of the whole call, where the format has no tag for its end.

    is_held: whether a grammar holds the calls. Then no tag is forgotten, and values that are no texts are JSON.
    """

    def __init__(self, source: Source, tags: Tags, end_mark: str, *, is_held: bool) -> None:
        self._source, self._tags, self._is_held = source, tags, is_held
        self._ends = tuple(mark for mark in (tags.end, end_mark) if mark)
        self._inner = (tags.key, *self._ends)
        behind = (self._inner, tags.name_end) if len(tags.name_end) == 1 else ((*self._inner, tags.name_end), "")
        self._behind_name = Marks(*behind)
        self._between = Marks(self._inner)
        self._key_end = Marks((tags.key_end,))
        self._end_mark = end_mark
        # What ends a value whose tag the model forgot: only where each stands on a line of its own.
        may_forget = bool(tags.padding and tags.end and not is_held)
        self._next_key = f"{tags.padding}{tags.key}" if may_forget else ""
        self._next_end = f"{tags.padding}{tags.end}" if may_forget else ""
        self._next_key_end = Marks((), f"{tags.key_end}{ENDS_OF_KEYS}") if may_forget else Marks(())
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

    def arguments(self, known: Arguments, sink: Sink) -> Steps[None]:
        """All arguments and what ends them, as one object for the sink. Raises Ended within them."""
        sink("{")
        comma = ""
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
        elif self._is_held and types and "string" not in types:
            yield from self._json(sink)
        else:
            written: list[str] = []
            yield from self._up_to_end(known, written.append)
            sink(as_json("".join(written), types))

    def _json(self, sink: Sink) -> Steps[None]:
        """A value in JSON, in whose strings a tag is text."""
        written, strings, is_over = list[str](), _Strings(), False
        each = _both(written.append, strings.add)
        while not is_over:
            mark = yield from self._source.pass_on(self._value_ends, each)
            is_over = not strings.is_within
            if not is_over:
                each(mark)
        sink("".join(written).strip())

    def _up_to_end(self, known: Arguments, show: Sink) -> Steps[None]:
        """A value up to what ends it: its tag, or where the model forgot that, what can only come behind it."""
        while True:
            mark = yield from self._source.pass_on(self._value_ends, show)
            if mark and mark == self._next_key:
                if (yield from self._is_next_key(known, show)):
                    return
            elif mark and mark == self._next_end:
                if (blanks := (yield from self._blanks_before_end())) is None:
                    self._is_over = True
                    return
                show(mark + blanks)
            else:
                return

    def _is_next_key(self, known: Arguments, show: Sink) -> Steps[bool]:
        """Whether the name of an argument follows; otherwise what was read is shown."""
        self._source.record()
        try:
            key, mark = yield from self._source.text_up_to(self._next_key_end, ENDS_OF_KEYS, MOST_NAME)
            if mark == self._tags.key_end and key.strip() in known.schemas:
                self._source.recorded()
                self._key_read = key.strip()
                return True
        except NotThis:
            pass
        except Ended:
            show(self._next_key + self._source.recorded())
            raise
        show(self._next_key + self._source.recorded())
        return False

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


def _both(one: Sink, other: Sink) -> Sink:
    def each(text: str) -> None:
        one(text)
        other(text)

    return each


class _Strings:
    """Follows a value in JSON through its strings."""

    def __init__(self) -> None:
        self.is_within = False
        self._is_escaped = False  # what comes next, by a backslash

    def add(self, text: str) -> None:
        """More of it."""
        if self._is_escaped and text:
            text, self._is_escaped = text[1:], False
        for found in QUOTES.findall(text):
            self.is_within ^= found == '"'
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
