"""Reads JSON that a model is still writing: one value, piece by piece, as it is written.

Lenient where strictness would lose what the model wrote: brackets are counted, not matched, and what is between them is
passed on as it is. Whoever gets a call's arguments has to parse them anyway.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress

from router.chat.source import Marks, Source, Steps

QUOTES = Marks((), '"\\')
SCALAR_ENDS = ",]} \t\r\n"
ENDS_OF_SCALARS = Marks((), SCALAR_ENDS)
BRACKETS = "[]{}"

Sink = Callable[[str], None]


class NotThis(Exception):
    """What comes is not what was expected."""


class JsonReader:
    """Reads from a source. end_mark: ends a value that is not closed; it stays unread, but within a string."""

    def __init__(self, source: Source, end_mark: str = "") -> None:
        self._source = source
        self._end_mark = end_mark
        self._stops = Marks((end_mark,) if end_mark else (), BRACKETS + '"')

    def value(self, sink: Sink) -> Steps[None]:
        """One value, handed to `sink` in pieces; leading blanks are left out. Raises Ended within it."""
        first = yield from self._source.skip_blanks()
        if first in "{[":
            yield from self._nested(sink)
        elif first == '"':
            sink(self._source.take(1))
            yield from self._rest_of_string(sink)
        else:
            yield from self._scalar(sink)

    def short_string(self, most: int) -> Steps[str]:
        """A string of at most so many characters as they are written. Raises NotThis, and Ended."""
        yield from self.expect('"')
        written: list[str] = []

        def bounded(text: str) -> None:
            written.append(text)
            if len(text) > most or sum(map(len, written)) > most + 1:
                raise NotThis

        yield from self._rest_of_string(bounded)
        return decoded('"' + "".join(written))

    def expect(self, character: str) -> Steps[None]:
        """Read this character behind blanks. Raises NotThis, and Ended."""
        if (yield from self._source.skip_blanks()) != character:
            raise NotThis
        self._source.take(1)

    def _nested(self, sink: Sink) -> Steps[None]:
        depth = 0
        while True:
            text, stop = yield from self._source.until(self._stops, keeps=(self._end_mark,))
            sink(text + stop if stop != self._end_mark else text)
            if stop == '"':
                yield from self._rest_of_string(sink)
            elif stop and stop in BRACKETS:
                depth += 1 if stop in "{[" else -1
            if (stop and not depth) or (stop and stop == self._end_mark):
                return

    def _rest_of_string(self, sink: Sink) -> Steps[None]:
        """Up to and including the quote that ends it."""
        while True:
            text, stop = yield from self._source.until(QUOTES)
            sink(text + stop)
            if stop == '"':
                return
            if stop:
                yield from self._source.peek()
                sink(self._source.take(1))

    def _scalar(self, sink: Sink) -> Steps[None]:
        while True:
            text, stop = yield from self._source.until(ENDS_OF_SCALARS, keeps=SCALAR_ENDS)
            sink(text)
            if stop:
                return


def decoded(text: str) -> str:
    """The text that a string of JSON stands for. Raises NotThis for what is none."""
    with suppress(ValueError):
        value = json.loads(text)
        if isinstance(value, str):
            value.encode()  # a lone half of a surrogate pair is no text
            return value
    raise NotThis
