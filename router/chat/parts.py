"""The parts of an answer in the order in which the model wrote them, for APIs that show them so.

`pieces.py` has what a reader gives out, and the answer of APIs that show text, reasoning and calls side by side.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from router.chat.pieces import CallArguments, CallBegun, Piece, Reasoning, Text

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
