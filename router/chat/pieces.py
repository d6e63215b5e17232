"""What an answer consists of, whichever API shows it: text, reasoning, and calls of tools.

A reader takes an answer's text, whole or as it comes, and gives out pieces. However the text is split, the joined
pieces are the same (`whole`). `formats.py` says by which marks a model writes what.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol


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


class AnswerReader(Protocol):
    """Turns one answer's text into pieces. What is no call and no reasoning is text: nothing is lost."""

    def feed(self, text: str) -> list[Piece]:
        """What is known with this text behind all that came before; perhaps nothing."""

    def end(self) -> list[Piece]:
        """What is left: nothing more will come. Called once."""

    @property
    def is_in_call(self) -> bool:
        """Whether a call has begun whose arguments are not complete."""


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
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[CallBegun, list[str]]] = []
    for piece in pieces:
        if isinstance(piece, Text):
            texts.append(piece.text)
        elif isinstance(piece, Reasoning):
            reasoning.append(piece.text)
        elif isinstance(piece, CallBegun):
            calls.append((piece, []))
        else:
            calls[piece.index][1].append(piece.text)
    found = [Call(begun.id, begun.name, "".join(arguments)) for begun, arguments in calls]
    return Content("".join(texts), "".join(reasoning), found)


def new_call_id() -> str:
    """An id that no other call has."""
    return f"call_{secrets.token_hex(12)}"
