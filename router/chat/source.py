"""A text that comes in pieces, to be read by generators: they yield where more text is needed to go on.

What is read is dropped, and what waits unread is shorter than the longest mark, so reading a text costs what it is
long, however it is split.
"""

from __future__ import annotations

import re
from collections.abc import Container, Generator, Sequence
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]  # it yields whenever there is nothing left to read


class Ended(Exception):
    """The text is over before what was expected came."""


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


NO_BLANK = re.compile(r"\S")


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

    def until(self, marks: Marks, keeps: Container[str] = ()) -> Steps[tuple[str, str]]:
        """(text in front of the next mark, or what there is of it by now, the mark). The mark is read too.

        Without a mark yet, it is empty. keeps: marks that stay unread. Raises Ended once there is nothing left.
        """
        while True:
            at, mark = marks.search(self._text, self._at)
            if self._is_over and not mark:
                at = len(self._text)
            if mark or at > self._at:
                text = self.take(at - self._at)
                if mark not in keeps:
                    self.take(len(mark))
                return text, mark
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
