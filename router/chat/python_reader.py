"""Reads the arguments of a call in Python's notation that a model is still writing, as JSON.

Only what stands for a value of JSON is read: texts, numbers, True, False, None, lists, tuples and dictionaries. Nothing
is evaluated, and what is nested is kept on a stack of our own: a model may nest as deep as it likes.
"""

from __future__ import annotations

import json
import re

from router.chat.json_reader import NotThis, Sink
from router.chat.source import Marks, Source, Steps

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
NUMBER = re.compile(r"[+-]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
WORDS = {"True": "true", "False": "false", "None": "null"}
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
DIGITS = {"x": 2, "u": 4, "U": 8}  # of a character's number
OPENED = {"[": ("[", "]"), "(": ("[", ")"), "{": ("{", "}")}  # how it is written in JSON, and what ends it
CLOSED = {"]": "]", ")": "]", "}": "}"}
MOST_CHARACTERS_OF_A_WORD = 400  # a number, or one of WORDS
ENDS_OF_WORDS = ",)]}: \t\r\n="
WORD_ENDS = Marks((), ENDS_OF_WORDS)
QUOTES = {quote: Marks((), f"{quote}\\") for quote in "'\""}


class PythonReader:
    """Reads from a source."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def arguments(self, sink: Sink) -> Steps[None]:
        """What is between the brackets of a call, and the last bracket: an object for `sink`. Raises NotThis, Ended."""
        sink("{")
        ends, comma, is_behind_value = [")"], "", False
        while True:
            character = yield from self._source.skip_blanks()
            if character == ends[-1]:
                self._source.take(1)
                end = ends.pop()
                sink("}" if not ends else CLOSED[end])
                if not ends:
                    return
                comma, is_behind_value = "", True
            elif is_behind_value:
                yield from self._expect(",")
                comma, is_behind_value = ", ", False
            else:
                sink(comma)
                yield from self._key(sink, is_named=len(ends) == 1, is_keyed=ends[-1] == "}")
                character = yield from self._source.skip_blanks()
                comma = ""
                if character in OPENED:
                    self._source.take(1)
                    begin, end = OPENED[character]
                    sink(begin)
                    ends.append(end)
                else:
                    yield from self._scalar(character, sink)
                    is_behind_value = True

    def _key(self, sink: Sink, *, is_named: bool, is_keyed: bool) -> Steps[None]:
        """In front of a value: the name of an argument, or the key of a dictionary."""
        if is_named:
            name = (yield from self._word()).strip()
            if not NAME.fullmatch(name):
                raise NotThis
            self._source.recorded()
            yield from self._expect("=")
            sink(f"{json.dumps(name)}: ")
        elif is_keyed:
            character = yield from self._source.skip_blanks()
            if character not in QUOTES:
                raise NotThis
            yield from self._string(character, sink)
            yield from self._expect(":")
            sink(": ")

    def _scalar(self, first: str, sink: Sink) -> Steps[None]:
        if first in QUOTES:
            yield from self._string(first, sink)
            return
        word = yield from self._word()
        if word not in WORDS and not NUMBER.fullmatch(word):
            raise NotThis
        sink(WORDS.get(word) or _number(word))
        self._source.recorded()

    def _word(self) -> Steps[str]:
        """A word, which is kept as read until it is known to be the right one."""
        self._source.record()
        written, end = "", ""
        while not end:
            text, end = yield from self._source.until(WORD_ENDS, keeps=ENDS_OF_WORDS)
            written += text
            if len(written) > MOST_CHARACTERS_OF_A_WORD:
                raise NotThis
        return written

    def _string(self, quote: str, sink: Sink) -> Steps[None]:
        self._source.take(1)
        sink('"')
        while True:
            text, stop = yield from self._source.until(QUOTES[quote])
            sink(_inside(text))
            if stop == quote:
                break
            if stop:
                sink(_inside((yield from self._escaped())))
        sink('"')

    def _escaped(self) -> Steps[str]:
        """The character that an escape stands for, behind its backslash."""
        yield from self._source.peek()
        letter = self._source.take(1)
        if letter not in DIGITS:
            return ESCAPED.get(letter, letter if letter in "'\"\\" else f"\\{letter}")
        digits = ""
        for _ in range(DIGITS[letter]):
            yield from self._source.peek()
            digits += self._source.take(1)
        try:
            character = chr(int(digits, 16))
            character.encode()
        except (ValueError, OverflowError):
            return "\ufffd"
        return character

    def _expect(self, character: str) -> Steps[None]:
        if (yield from self._source.skip_blanks()) != character:
            raise NotThis
        self._source.take(1)


def _inside(text: str) -> str:
    """A text as it is written within quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _number(word: str) -> str:
    """As JSON writes it. Raises NotThis for what is beyond it."""
    plain = word.replace("_", "")
    try:
        number = int(plain) if plain.lstrip("+-").isdigit() else float(plain)
    except ValueError:
        raise NotThis from None
    if number in (float("inf"), float("-inf")):
        raise NotThis
    return json.dumps(number)
