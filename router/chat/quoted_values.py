"""Arguments of a call as Gemma 4 writes them, read as they come, as JSON.

A mark of the model's own is around texts, and nothing around names: `{city:<|"|>Ulm<|"|>,days:[1,2],exact:true}`. What
is neither a text, a list nor an object is a word: a number, `true`, `false`, `null` or `None`. Any other is a text.
"""

from __future__ import annotations

import json
from contextlib import suppress

from router.chat.streamed_values import (
    WORDS,
    JsonReader,
    Marks,
    NotThis,
    Sink,
    Source,
    Steps,
    decoded,
    inside_quotes,
    json_of,
)

CLOSES = {"{": "}", "[": "]"}
ENDS_OF_KEYS = ":"
ENDS_OF_WORDS = ",}]"
NO_WORD = "null"  # stands for the value of which nothing is written


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
        parts: list[str] = []
        if (yield from self._source.accept(self._quote)):  # for what is no name
            yield from self._source.pass_on(self._text_end, parts.append)
        elif (yield from self._source.skip_blanks()) == '"':
            yield from JsonReader(self._source).value(parts.append)
            with suppress(NotThis):
                parts = [decoded("".join(parts))]
        else:
            yield from self._source.pass_on(self._key_end, parts.append, keeps=(self._end_mark,))
            return "".join(parts).strip()
        yield from self._source.pass_on(self._key_end, lambda _: None, keeps=(self._end_mark,))
        return "".join(parts)

    def _text(self, sink: Sink) -> Steps[None]:
        sink('"')
        yield from self._source.pass_on(self._text_end, lambda text: sink(inside_quotes(text)))
        sink('"')

    def _word(self) -> Steps[str]:
        text, _ = yield from self._source.text_up_to(self._word_end, keeps=(*ENDS_OF_WORDS, self._end_mark))
        word = text.strip()
        word = WORDS.get(word, word) or NO_WORD
        with suppress(NotThis):
            json_of(word)
            return word
        return json.dumps(word, ensure_ascii=False)
