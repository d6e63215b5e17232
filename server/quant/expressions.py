r"""Expressions for names of layers that stand in the config of a checkpoint, matched in a time that has a bound.

A config is untrusted, and Python's `re` may take years for an expression such as `(.+)+x`. Here an expression becomes
a list of nodes, and a name is read once from its last character to its first: after each character it is known from
which nodes the rest of the name can be matched (Thompson 1968, "Regular expression search algorithm", backwards, so
that what stands in a lookahead is known where it is needed). What follows from such a set of nodes and a character is
remembered. All that is done is counted, and a config has so many steps for all of its names.

What is understood of the syntax of `re`: literals, `.`, classes, `\d \w \s \b` and their opposites, `^ $ \A \Z`,
groups, `|`, repeats, and lookaheads. Left out, and refused: what needs the text of a group again, lookbehinds, groups
and repeats that give nothing back, and flags.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

MOST_NODES = 2000  # of an expression, with what is repeated written out; a usual one has thirty
MOST_DEPTH = 30  # groups in each other
MOST_STEPS = 100_000_000  # for all names and expressions of a config: about a minute
MOST_KNOWN = 20_000  # transitions of an expression that are remembered
REPEAT = re.compile(r"\{(?:(\d{1,9})(?:(,)(\d{0,9}))?|(,)(\d{1,9}))\}")
SPACES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}

Holds = Callable[[str], bool]  # of one character


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


CLASSES: dict[str, Holds] = {
    "d": str.isdecimal,
    "D": lambda character: not character.isdecimal(),
    "w": _is_word,
    "W": lambda character: not _is_word(character),
    "s": str.isspace,
    "S": lambda character: not character.isspace(),
}
EDGES = {"^": "start", "A": "start", "$": "end", "Z": "end", "b": "edge", "B": "inside"}


class ExpressionError(ValueError):
    """An expression is none, or has what is not understood; says what, without the expression."""


# ------------------------------------------------------------------------------------------------ what is written


@dataclass(frozen=True)
class _One:
    """A character."""

    holds: Holds


@dataclass(frozen=True)
class _Edge:
    """A place between characters, as in EDGES."""

    kind: str


@dataclass(frozen=True)
class _Row:
    """Parts one after the other."""

    parts: tuple[_Part, ...]


@dataclass(frozen=True)
class _Any:
    """One of several."""

    choices: tuple[_Part, ...]


@dataclass(frozen=True)
class _Repeat:
    """From `least` to `most` times; most None: as often as one likes."""

    part: _Part
    least: int
    most: int | None


@dataclass(frozen=True)
class _Look:
    """What has to follow, or must not."""

    part: _Part
    is_wanted: bool


_Part = _One | _Edge | _Row | _Any | _Repeat | _Look


class _Parser:
    """Reads an expression from its beginning."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def parse(self) -> _Part:
        """The whole of it."""
        found = self._choices()
        if self._at < len(self._text):
            raise ExpressionError("a `)` closes no group")
        return found

    def _next(self, wanted: str = "") -> str:
        """The next character, which is passed; with `wanted`: only if it is that, else nothing."""
        if self._text.startswith(wanted, self._at) and self._at < len(self._text):
            self._at += len(wanted) or 1
            return self._text[self._at - (len(wanted) or 1) : self._at]
        return ""

    def _choices(self) -> _Part:
        choices = [self._row()]
        while self._next("|"):
            choices.append(self._row())
        return choices[0] if len(choices) == 1 else _Any(tuple(choices))

    def _row(self) -> _Part:
        parts: list[_Part] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repeated(self._part()))
        return _Row(tuple(parts))

    def _repeated(self, part: _Part) -> _Part:
        bounds = self._bounds()
        if bounds is None:
            return part
        if self._next("+"):
            raise ExpressionError("a repeat that gives nothing back (`*+`) is not understood")
        self._next("?")  # whether few or many are tried first decides nothing here
        if self._bounds() is not None:
            raise ExpressionError("a repeat stands behind another one")
        return _Repeat(part, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        """Those of a repeat that comes next, which is passed; None: there is none."""
        if mark := self._next("*") or self._next("+") or self._next("?"):
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[mark]
        if (found := REPEAT.match(self._text, self._at)) is None:
            return None
        self._at = found.end()
        least = int(found[1] or 0)
        ends = found[3] if found[2] else found[5] if found[4] else found[1]
        most = int(ends) if ends else None
        if most is not None and most < least:
            raise ExpressionError("a repeat has bounds in the wrong order")
        return least, most

    def _part(self) -> _Part:
        character = self._next()
        match character:
            case "(":
                return self._group()
            case "[":
                return _One(self._class())
            case ".":
                return _One(lambda other: other != "\n")
            case "^" | "$":
                return _Edge(EDGES[character])
            case "*" | "+" | "?":
                raise ExpressionError("a repeat has nothing to repeat")
            case "\\":
                character = self._next()
                if character in EDGES and character:
                    return _Edge(EDGES[character]) if character.isalpha() else _One(character.__eq__)
                return _One(self._escaped(character))
            case _:
                return _One(character.__eq__)

    def _group(self) -> _Part:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise ExpressionError(f"it has more than {MOST_DEPTH} groups in each other")
        look = None
        if self._next("?"):
            if mark := self._next("=") or self._next("!"):
                look = mark == "="
            elif self._next("P<"):
                end = self._text.find(">", self._at)
                if end < 0 or not self._text[self._at : end].isidentifier():
                    raise ExpressionError("a group has a name that is none")
                self._at = end + 1
            elif not self._next(":"):
                kind = self._text[self._at : self._at + 1]
                raise ExpressionError(f"a group that begins with `(?{kind}` is not understood")
        inside = self._choices()
        if not self._next(")"):
            raise ExpressionError("a group is not closed")
        self._depth -= 1
        return inside if look is None else _Look(inside, look)

    def _escaped(self, character: str) -> Holds:
        if character in CLASSES:
            return CLASSES[character]
        if character in SPACES:
            return SPACES[character].__eq__
        if not character or character.isalnum():
            raise ExpressionError(f"`\\{character}` is not understood")
        return character.__eq__

    def _class(self) -> Holds:
        """A class, behind its `[`."""
        is_opposite = bool(self._next("^"))
        members: list[Holds] = []
        while not (members and self._next("]")):
            first = self._member()
            is_last = self._text.startswith("-]", self._at)
            if isinstance(first, str) and not is_last and self._next("-"):
                last = self._member()
                if not isinstance(last, str) or last < first:
                    raise ExpressionError("a class has a range in the wrong order")
                members.append(_between(first, last))
            else:
                members.append(first.__eq__ if isinstance(first, str) else first)
        return lambda character: any(holds(character) for holds in members) != is_opposite

    def _member(self) -> str | Holds:
        character = self._next()
        if not character:
            raise ExpressionError("a class is not closed")
        if character != "\\":
            return character
        character = self._next()
        if character in CLASSES:
            return CLASSES[character]
        if character in SPACES:
            return SPACES[character]
        if not character or character.isalnum():
            raise ExpressionError(f"`\\{character}` is not understood")
        return character


def _between(first: str, last: str) -> Holds:
    return lambda character: first <= character <= last


# ------------------------------------------------------------------------------------------------- what is matched


class Steps:
    """How much may still be done for a config."""

    def __init__(self, most: int = MOST_STEPS) -> None:
        self.left = most

    def take(self, count: int) -> None:
        """Raises ExpressionError where too much has been done."""
        self.left -= count
        if self.left < 0:
            raise ExpressionError(
                "the expressions in `quantization_config` take too long to compare with the names of all layers: take "
                "another checkpoint of this model"
            )


@dataclass
class _Node:
    """From here a rest of a name is matched if its first character `holds` and what follows is matched from the first
    of `then`; without `holds`: if it is matched from one of `then` here, at an `edge` that fits, and if what `look`
    begins is matched, or is not."""

    then: list[int]
    holds: Holds | None = None
    edge: str = ""
    look: int = -1
    is_wanted: bool = True


class Expression:
    """Raises ExpressionError for what is none, is too large or is not understood."""

    def __init__(self, text: str, steps: Steps) -> None:
        self._steps = steps
        self._built = 0
        self._nodes = [_Node([])]  # the first one matches any rest: what is behind a match is free
        self._layers: list[list[int]] = []  # of nodes: what stands in a lookahead comes before what it stands in
        self._entry = self._layer(_Parser(text).parse())
        self._has_edges = any(node.edge in ("edge", "inside") for node in self._nodes)
        self._known: dict[tuple[int, str, str], int] = {}

    def match(self, name: str) -> bool:
        """Whether the name begins with what this stands for, as `re.match`. Raises ExpressionError as `Steps` does."""
        self._steps.take(len(name) + 1)
        matched, known, backwards = 0, self._known, name[::-1]
        befores = (
            backwards if self._has_edges else "." * len(name)
        )  # elsewhere only the beginning is a place of its own
        for step in zip(("", *backwards), (*befores, ""), strict=True):
            if (found := known.get((matched, *step))) is None:
                found = self._matched(matched, *step)
                if len(known) < MOST_KNOWN:
                    known[matched, *step] = found
            matched = found
        return bool(matched >> self._entry & 1)

    def _matched(self, matched: int, after: str, before: str) -> int:
        """The nodes, as bits, from which the rest that begins with `after` is matched, where `matched` are those from
        which the rest behind that is. before, after: characters, or nothing at the ends of a name."""
        edges = {
            "": True,
            "start": not before,
            "end": not after,
            "edge": _is_word_or_end(before) != _is_word_or_end(after),
            "inside": _is_word_or_end(before) == _is_word_or_end(after),
        }
        found = 1
        for layer in self._layers:
            previous = -1
            while previous != found:  # again, for a repeat's end leads to its beginning
                self._steps.take(len(layer))
                previous = found
                for index in layer:
                    node = self._nodes[index]
                    if node.holds is not None:
                        is_matched = bool(after) and bool(matched >> node.then[0] & 1) and node.holds(after)
                    else:
                        is_matched = edges[node.edge] and any(found >> then & 1 for then in node.then)
                        if is_matched and node.look >= 0:
                            is_matched = bool(found >> node.look & 1) == node.is_wanted
                    found |= is_matched << index
        return found

    def _layer(self, part: _Part) -> int:
        """The node where a part begins of which it is only asked whether it is matched."""
        layer: list[int] = []
        entry = self._build(part, 0, layer)
        self._layers.append(layer)
        return entry

    def _add(self, node: _Node, layer: list[int]) -> int:
        self._nodes.append(node)
        layer.append(len(self._nodes) - 1)
        return layer[-1]

    def _build(self, part: _Part, then: int, layer: list[int]) -> int:
        """The node where `part` begins, behind which node `then` comes."""
        self._built += 1
        if self._built > MOST_NODES:
            raise ExpressionError(f"it has more than {MOST_NODES} parts, with what is repeated written out")
        match part:
            case _One(holds):
                return self._add(_Node([then], holds), layer)
            case _Edge(kind):
                return self._add(_Node([then], edge=kind), layer)
            case _Row(parts):
                for one in reversed(parts):
                    then = self._build(one, then, layer)
                return then
            case _Any(choices):
                return self._add(_Node([self._build(one, then, layer) for one in choices]), layer)
            case _Look(inside, is_wanted):
                return self._add(_Node([then], look=self._layer(inside), is_wanted=is_wanted), layer)
            case _Repeat():
                return self._repeat(part, then, layer)

    def _repeat(self, part: _Repeat, then: int, layer: list[int]) -> int:
        if part.most is None:
            end = self._add(_Node([then]), layer)
            self._nodes[end].then.append(self._build(part.part, end, layer))
            then = end
        else:
            end = then
            for _ in range(part.most - part.least):
                then = self._add(_Node([end, self._build(part.part, then, layer)]), layer)
        for _ in range(part.least):
            then = self._build(part.part, then, layer)
        return then


def _is_word_or_end(character: str) -> bool:
    return bool(character) and _is_word(character)
