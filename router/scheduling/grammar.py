"""A grammar as plain data, and what it allows next: shared by validation, the scheduler and the wire.

Left out: how either is computed, with llguidance in other processes (`router/grammars/`).
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from router.errors import RouterError


class GrammarKind(StrEnum):
    """The notations of grammars."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text must be. text: a JSON schema as JSON, a regular expression, or a grammar in Lark's notation."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class Mask:
    """Tokens that may come next, in the shortest of three forms; one is given.

    allowed: these and no others; forbidden: all others; bits: one for each token, from the lowest bit of the first byte
    on, and none where they end.
    """

    allowed: tuple[int, ...] | None = None
    forbidden: tuple[int, ...] | None = None
    bits: bytes | None = None

    @classmethod
    def read(cls, form: Mapping[str, Any]) -> Mask:
        """What `mask_of` says, as it comes out of JSON."""
        if "bits" in form:
            return cls(bits=b64decode(form["bits"]))
        if "allowed" in form:
            return cls(allowed=tuple(form["allowed"]))
        return cls(forbidden=tuple(form["forbidden"]))


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a grammar allows next: tokens that come in any case, and then one of these.

    drafted: where a draft was told and no token is forced, what may come behind each of its leading guesses. It ends
    before a guess that is not allowed, that ends the text or leaves nothing but its end, or that forces tokens which
    are not the next guesses; and where more would take too long.
    """

    forced: tuple[int, ...]
    mask: Mask
    drafted: tuple[Mask, ...] = ()

    @classmethod
    def read(cls, answer: Mapping[str, Any]) -> Continuation:
        """What `TextMatcher.go_on` says, as it comes out of JSON. Equal masks are one object."""
        masks = [Mask.read(answer)]
        for mask in answer.get("drafted", ()):
            masks.append(masks[mask] if isinstance(mask, int) else Mask.read(mask))
        return cls(tuple(answer["forced"]), masks[0], tuple(masks[1:]))

    def at_most(self, count: int) -> Continuation:
        """The same with so many forced tokens or guesses at most, where no more have room before the last one."""
        if len(self.forced) > count:
            return Continuation(self.forced[:count], Mask(allowed=(self.forced[count],)))
        return self if len(self.drafted) <= count else replace(self, drafted=self.drafted[:count])


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar that is known to be valid, and what it allows first."""

    grammar: Grammar
    first: Continuation


OnAnswer = Callable[[Continuation | RouterError], None]


class Match(Protocol):
    """One text that is followed."""

    def advance(self, token_ids: Sequence[int], draft: Sequence[int] = ()) -> None:
        """The text has these more tokens: what may come next is reported once it is known.

        draft: guesses what comes next, which may have any length and be wrong.
        """

    def end(self) -> None:
        """Follow it no longer."""


class Matching(Protocol):
    """Follows texts, in processes or as a test double."""

    def start(self) -> None:
        """A text will come soon."""

    def begin(self, grammar: CompiledGrammar, on_answer: OnAnswer, known: Sequence[int] = ()) -> Match:
        """Follow a text from its beginning, with the tokens that its grammar forces there.

        known: its first tokens, if it has some already; then what may come next is reported once it is known.
        """
