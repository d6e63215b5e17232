"""Values that a model is still writing, read as they come: JSON, and a call's arguments in Python's notation.

Readers are generators that yield where more text is needed to go on (`Steps`). What is read is dropped, and what waits
unread is shorter than the longest mark, so reading a text costs what it is long, however it is split.

`JsonReader` is lenient where strictness would lose what the model wrote: brackets are counted, not matched, and what is
between them is passed on as it is; a client has to parse a call's arguments anyway. `PythonReader` writes JSON, and
reads only what stands for a value of it: texts, numbers, True, False, None, lists, tuples and dictionaries. Nothing is
evaluated, and what is nested is kept on a stack of our own: a model may nest as deep as it likes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Container, Generator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

NO_BLANK = re.compile(r"\S")

Result = TypeVar("Result")
Steps = Generator[None, None, Result]  # it yields whenever there is nothing left to read
Sink = Callable[[str], None]


class Ended(Exception):
    """The text is over before what was expected came."""


class NotThis(Exception):
    """What comes is not what was expected."""


class Marks:
    """What to look for in a text: marks, and single characters. None of them is the beginning of another."""

    def __init__(self, marks: Sequence[str], characters: str = "") -> None:
        alternatives = [*map(re.escape, marks), *([f"[{re.escape(characters)}]"] if characters else [])]
        self._pattern = re.compile("|".join(alternatives) or "(?!)")
        self._beginnings = frozenset(mark[:length] for mark in marks for length in range(1, len(mark)))
        self._longest = max((len(beginning) for beginning in self._beginnings), default=0)
        self._first = re.compile(f"[{''.join(sorted(re.escape(mark[0]) for mark in marks))}]") if marks else None

    def may_begin_in(self, text: str) -> bool:
        """Whether a mark may begin somewhere in this text."""
        return self._first is not None and self._first.search(text) is not None

    def search(self, text: str, start: int) -> tuple[int, str]:
        """Where the first one begins, and which; or up to where there certainly is none, and nothing."""
        if found := self._pattern.search(text, start):
            return found.start(), found.group()
        return self._safe_end(text, start), ""

    def _safe_end(self, text: str, start: int) -> int:
        """Where the longest beginning of a mark begins with which the text ends."""
        if self._first is None:
            return len(text)
        at = max(start, len(text) - self._longest)
        while (found := self._first.search(text, at)) is not None:
            if text[found.start() :] in self._beginnings:
                return found.start()
            at = found.end()
        return len(text)


class Source:
    """The text that has come and is not read yet."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._is_over = False
        self._recorded: list[str] | None = None

    def add(self, text: str) -> None:
        """More has come."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def close(self) -> None:
        """Nothing more will come."""
        self._is_over = True

    @property
    def is_read(self) -> bool:
        """Whether all that has come is read."""
        return self._at == len(self._text)

    @property
    def is_recording(self) -> bool:
        """Whether what is read is kept."""
        return self._recorded is not None

    def record(self, *already: str) -> None:
        """Keep what is read from now on, behind what was read `already`."""
        self._recorded = list(already)

    def recorded(self) -> str:
        """What was read since `record`; it is not kept any more."""
        recorded, self._recorded = self._recorded, None
        return "".join(recorded or ())

    def more(self) -> Steps[None]:
        """Wait until there is more than what is unread. Raises Ended."""
        if self._is_over:
            raise Ended
        yield

    def take(self, num: int) -> str:
        """Read so many characters, as far as they are there."""
        taken = self._text[self._at : self._at + num]
        self._at += len(taken)
        if self._recorded is not None:
            self._recorded.append(taken)
        return taken

    def peek(self) -> Steps[str]:
        """The next character, which stays unread. Raises Ended."""
        while self._at == len(self._text):
            yield from self.more()
        return self._text[self._at]

    def skip_blanks(self, others: str = "") -> Steps[str]:
        """The next character that is neither blank nor one of the `others`, which stays unread. Raises Ended."""
        while True:
            character = yield from self.peek()
            if character in others:
                self.take(1)
            elif character.isspace():
                found = NO_BLANK.search(self._text, self._at)
                self.take((found.start() if found else len(self._text)) - self._at)
            else:
                return character

    def expect(self, character: str) -> Steps[None]:
        """Read this character behind blanks. Raises NotThis, and Ended."""
        if (yield from self.skip_blanks()) != character:
            raise NotThis
        self.take(1)

    def until(self, marks: Marks, keeps: Container[str] = (), most: int | None = None) -> Steps[tuple[str, str]]:
        """(text in front of the next mark, or what there is of it by now, the mark). The mark is read too.

        Without a mark yet, it is empty, and so it is behind `most` characters. keeps: marks that stay unread. Raises
        Ended once there is nothing left.
        """
        while True:
            at, mark = marks.search(self._text, self._at)
            if self._is_over and not mark:
                at = len(self._text)
            if most is not None and at - self._at >= most:
                at, mark = self._at + most, ""
            if mark or at > self._at:
                text = self.take(at - self._at)
                if mark not in keeps:
                    self.take(len(mark))
                return text, mark
            yield from self.more()

    def pass_on(self, marks: Marks, sink: Sink, keeps: Container[str] = (), most: int | None = None) -> Steps[str]:
        """Hand what is in front of the next mark to a sink as it comes; the mark. Raises Ended, NotThis as below."""
        length, mark = 0, ""
        while not mark:
            text, mark = yield from self.until(marks, keeps, None if most is None else most + 1 - length)
            length += len(text)
            if most is not None and length > most:
                raise NotThis
            sink(text)
        return mark

    def text_up_to(self, marks: Marks, keeps: Container[str] = (), most: int | None = None) -> Steps[tuple[str, str]]:
        """(all that is in front of the next mark, the mark). Raises NotThis for more than so many characters."""
        parts: list[str] = []
        mark = yield from self.pass_on(marks, parts.append, keeps, most)
        return "".join(parts), mark

    def ahead(self, marks: Collection[str]) -> Steps[bool]:
        """Whether one of these marks comes next, which stays unread. Raises Ended as `accept` does."""
        while True:
            there = self._text[self._at : self._at + max(map(len, marks))]
            if there.startswith(tuple(marks)):
                return True
            if not any(mark.startswith(there) for mark in marks):
                return False
            if self._is_over:
                self.take(len(there))
            yield from self.more()

    def accept(self, mark: str) -> Steps[bool]:
        """Read this mark if it comes next. Raises Ended where the text ends in its middle, which is read then."""
        while True:
            there = self._text[self._at : self._at + len(mark)]
            if there == mark or (self._is_over and mark.startswith(there)):
                self.take(len(there))
            if there == mark or not mark.startswith(there):
                return there == mark
            yield from self.more()


JSON_QUOTES = Marks((), '"\\')
SCALAR_ENDS = ",]} \t\r\n"
ENDS_OF_SCALARS = Marks((), SCALAR_ENDS)
BRACKETS = "[]{}"


class JsonReader:
    """Reads values from a source. end_mark: ends a value that is not closed; it stays unread, but within a string."""

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
        yield from self._source.expect('"')
        written: list[str] = []

        length = 0
        while True:
            text, stop = yield from self._source.until(JSON_QUOTES, most=most + 1 - length)
            written.append(text + stop)
            length += len(text) + len(stop)
            if stop == "\\":
                yield from self._source.peek()
                written.append(self._source.take(1))
                length += 1
            if length > most + (stop == '"'):
                raise NotThis
            if stop == '"':
                return decoded('"' + "".join(written))

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
            text, stop = yield from self._source.until(JSON_QUOTES)
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


def json_of(text: str) -> Any:
    """A value of JSON. Raises NotThis for what is none: NaN and the infinities neither."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        raise NotThis from None


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(text)
    return number


def decoded(text: str) -> str:
    """The text that a string of JSON stands for. Raises NotThis for what is none."""
    value = json_of(text)
    if isinstance(value, str):
        with suppress(UnicodeEncodeError):  # a lone half of a surrogate pair is no text
            value.encode()
            return value
    raise NotThis


NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
NUMBER = re.compile(r"[+-]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
WORDS = {"True": "true", "False": "false", "None": "null"}  # which models write that have read much Python
WORDS_OF_JSON = WORDS | {word: word for word in WORDS.values()}
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
DIGITS = {"x": 2, "u": 4, "U": 8}  # of a character's number
OPENED = {"[": ("[", "]"), "(": ("[", ")"), "{": ("{", "}")}  # how it is written in JSON, and what ends it
CLOSED = {"]": "]", ")": "]", "}": "}"}
MOST_CHARACTERS_OF_A_WORD = 400  # a number, or one of WORDS
ENDS_OF_WORDS = ",)]}: \t\r\n="
WORD_ENDS = Marks((), ENDS_OF_WORDS)
PYTHON_QUOTES = {quote: Marks((), f"{quote}\\") for quote in "'\""}


class PythonReader:
    """Reads the arguments of a call from a source."""

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
                yield from self._source.expect(",")
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
            yield from self._source.expect("=")
            sink(f"{json.dumps(name)}: ")
        elif is_keyed:
            character = yield from self._source.skip_blanks()
            if character not in PYTHON_QUOTES:
                raise NotThis
            yield from self._string(character, sink)
            yield from self._source.expect(":")
            sink(": ")

    def _scalar(self, first: str, sink: Sink) -> Steps[None]:
        if first in PYTHON_QUOTES:
            yield from self._string(first, sink)
            return
        word = yield from self._word()
        if word not in WORDS_OF_JSON and not NUMBER.fullmatch(word):
            raise NotThis
        sink(WORDS_OF_JSON.get(word) or _number(word))
        self._source.recorded()

    def _word(self) -> Steps[str]:
        """A word, which is kept as read until it is known to be the right one."""
        self._source.record()
        written, _ = yield from self._source.text_up_to(WORD_ENDS, ENDS_OF_WORDS, MOST_CHARACTERS_OF_A_WORD)
        return written

    def _string(self, quote: str, sink: Sink) -> Steps[None]:
        self._source.take(1)
        sink('"')
        while True:
            text, stop = yield from self._source.until(PYTHON_QUOTES[quote])
            sink(inside_quotes(text))
            if stop == quote:
                break
            if stop:
                sink(inside_quotes((yield from self._escaped())))
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


def value_in_python(text: str) -> str:
    """A whole value in Python's notation, as JSON. Raises NotThis."""
    source, parts = Source(), list[str]()
    source.add(f"it={text})")
    source.close()
    with suppress(Ended):
        for _ in PythonReader(source).arguments(parts.append):
            pass
        written = "".join(parts).removeprefix('{"it": ').removesuffix("}")
        json_of(written)
        if source.is_read:
            return written
    raise NotThis


def inside_quotes(text: str) -> str:
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
