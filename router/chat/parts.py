"""The parts of an answer in the order in which the model wrote them, for APIs that show them so.

`pieces.py` has what a reader gives out, and the answer of APIs that show text, reasoning and calls side by side.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from router.chat.pieces import AnswerReader, CallArguments, CallBegun, Piece, Reasoning, Text

Kind = Literal["text", "reasoning", "call"]


class PlainReader:
    """Takes all of an answer for text."""

    is_in_call = False

    def feed(self, text: str) -> list[Piece]:
        """The same text."""
        return [Text(text)] if text else []

    def end(self) -> list[Piece]:
        """Nothing is held back."""
        return []


class CountingReader:
    """A reader that knows how many tokens were reasoning: those up to the last one that completed some."""

    def __init__(self, reader: AnswerReader) -> None:
        self.num_reasoning = 0
        self.is_plain = isinstance(reader, PlainReader)
        self._reader = reader
        self._num_waiting = 0  # tokens whose text the reader holds back

    def feed(self, text: str) -> list[Piece]:
        """What a token's text completes; one of no text is a part of a character that is told with a later one."""
        self._num_waiting += 1
        if not text:
            return []
        if pieces := self._reader.feed(text):
            if isinstance(pieces[0], Reasoning):
                self.num_reasoning += self._num_waiting
            self._num_waiting = 0
        return pieces

    @property
    def is_in_call(self) -> bool:
        """Whether a call has begun whose arguments are not complete."""
        return self._reader.is_in_call

    def end(self) -> list[Piece]:
        """What is left."""
        return self._reader.end()


@dataclass(slots=True)
class Part:
    """A stretch of an answer: text, reasoning, or one call with its id and name; its `texts` are one text."""

    kind: Kind
    texts: list[str] = field(default_factory=list)
    id: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)


def parts_of(pieces: Iterable[Piece]) -> list[Part]:
    """The parts that pieces make together, in the order in which the model wrote them. There is always one."""
    parts: list[Part] = []
    for piece in pieces:
        match piece:
            case CallBegun(_, id, name):
                parts.append(Part("call", [], id, name))
            case CallArguments(_, text):
                parts[-1].texts.append(text)
            case Text(text) | Reasoning(text):
                kind: Kind = "text" if isinstance(piece, Text) else "reasoning"
                if not parts or parts[-1].kind != kind:
                    parts.append(Part(kind))
                parts[-1].texts.append(text)
    return parts or [Part("text")]
