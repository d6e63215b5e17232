"""What an answer consists of, whichever API shows it: text, reasoning, and calls of tools.

A reader takes an answer's text, whole or as it comes, and gives out pieces. However the text is split, the joined
pieces are the same. Some APIs show text, reasoning and calls side by side (`whole`), others one after the other, in the
order in which the model wrote them (`parts_of`). `formats.py` says by which marks a model writes what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer itself. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a tool begins, the index-th of this answer, counted from 0. The calls before it are complete."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: JSON as the model writes it, valid only as far as the model keeps to it."""

    index: int
    text: str


Piece = Text | Reasoning | CallBegun | CallArguments
Kind = Literal["text", "reasoning", "call"]


class AnswerReader(Protocol):
    """Turns one answer's text into pieces. What is no call and no reasoning is text: nothing is lost."""

    def feed(self, text: str) -> list[Piece]:
        """What is known with this text behind all that came before; perhaps nothing."""

    def end(self) -> list[Piece]:
        """What is left: nothing more will come. Called once."""

    @property
    def is_in_call(self) -> bool:
        """Whether a call has begun whose arguments are not complete."""


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
class Call:
    """A call of a tool, as far as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Content:
    """All of an answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def whole(pieces: Iterable[Piece]) -> Content:
    """The answer that pieces make together."""
    parts = parts_of(pieces)
    text, reasoning = ("".join(part.text for part in parts if part.kind == kind) for kind in ("text", "reasoning"))
    return Content(text, reasoning, [Call(part.id, part.name, part.text) for part in parts if part.kind == "call"])


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


def call_ids(*answer: object) -> Callable[[], str]:
    """Makes an id for each call of an answer, the same ones wherever it goes on. answer: what no other one has."""
    numbers = count()

    def make() -> str:
        told = repr((*answer, next(numbers))).encode()
        return f"call_{blake2b(told, digest_size=12).hexdigest()}"

    return make
