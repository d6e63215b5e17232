"""Arguments of a call as Gemma 4 writes them, read as they come, as JSON.

A mark of the model's own is around texts, and nothing around names: `{city:<|"|>Ulm<|"|>,days:[1,2],exact:true}`. What
is neither a text, a list nor an object is a word: a number, `true`, `false`, `null` or `None`. Any other is a text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container

from router.chat.streamed_values import JsonReader, Marks, Source, Steps, inside_quotes

Sink = Callable[[str], None]
CLOSES = {"{": "}", "[": "]"}
ENDS_OF_KEYS = ":"
ENDS_OF_WORDS = ",}]"
WORDS = {"True": "true", "False": "false", "None": "null", "": "null"}


class QuotedReader:
    """Reads an object from a source. What is nested is kept on a stack of our own, however deep it is.

    end_mark: of the call, which stays unread, but within a text.
    """

    def __init__(self, source: Source, quote: str, end_mark: str) -> None:
        self._source, self._quote, self._end_mark = source, quote, end_mark
        self._text_end = Marks((quote,))
        self._key_end, self._word_end = Marks((end_mark,), ENDS_OF_KEYS), Marks((end_mark,), ENDS_OF_WORDS)

    def arguments(self, sink: Sink) -> Steps[None]:
        """An object and the bracket that ends it. Raises Ended within it."""
        ends: list[str] = []
        comma = ""
        while True:
            character = yield from self._source.skip_blanks(others=",")
            if (yield from self._source.ahead((self._end_mark,))):
                return  # of a call that is not closed
            if ends and character in CLOSES.values():
                self._source.take(1)
                sink(ends.pop())
                comma = ", "
                if not ends:
                    return
                continue
            sink(comma)
            if ends and ends[-1] == "}":
                sink(f"{json.dumps((yield from self._key()), ensure_ascii=False)}: ")
                character = yield from self._source.skip_blanks()
            comma = ", "
            if character in CLOSES:
                self._source.take(1)
                sink(character)
                ends.append(CLOSES[character])
                comma = ""
            elif character == '"':  # which the model should not write, and does
                yield from JsonReader(self._source).value(sink)
            elif (yield from self._source.accept(self._quote)):
                yield from self._text(sink)
            else:
                sink((yield from self._word()))

    def _key(self) -> Steps[str]:
        if (yield from self._source.accept(self._quote)):  # for what is no name
            parts: list[str] = []
            yield from self._up_to(self._text_end, parts.append)
            yield from self._up_to(self._key_end, lambda _: None, keeps=(self._end_mark,))
            return "".join(parts)
        parts = []
        yield from self._up_to(self._key_end, parts.append, keeps=(self._end_mark,))
        return "".join(parts).strip()

    def _text(self, sink: Sink) -> Steps[None]:
        sink('"')
        yield from self._up_to(self._text_end, lambda text: sink(inside_quotes(text)))
        sink('"')

    def _word(self) -> Steps[str]:
        parts: list[str] = []
        yield from self._up_to(self._word_end, parts.append, keeps=(*ENDS_OF_WORDS, self._end_mark))
        word = "".join(parts).strip()
        word = WORDS.get(word, word)
        try:
            json.loads(word, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return json.dumps(word, ensure_ascii=False)
        return word

    def _up_to(self, marks: Marks, sink: Sink, keeps: Container[str] = ()) -> Steps[None]:
        mark = ""
        while not mark:
            text, mark = yield from self._source.until(marks, keeps)
            sink(text)


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # NaN and the infinities, which JSON does not have
