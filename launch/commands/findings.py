"""What `lockstep check` finds: a table and sentences, and how people read them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from launch.errors import attempt
from launch.logs import printable

MOST_VALUE = 26  # columns of a value; a longer one, such as a model's path, stands out of line


@dataclass
class Findings:
    """What is known of a launch before it: rows of name, value and reason, and sentences."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # for which it would not start
    awaited: list[str] = field(default_factory=list)  # what must be so first, and may be by then
    notes: list[str] = field(default_factory=list)  # what changes nothing, or means something else
    unchecked: list[str] = field(default_factory=list)

    def add(self, name: str, value: object, reason: str = "") -> None:
        """One row."""
        self.rows.append((name, printable(str(value)), reason))

    def attempt(self, action: Callable[[], Any]) -> Any:
        """What the action returns; None where it raises, whose sentences are problems then."""
        return attempt(action, self._say)

    def _say(self, problem: str) -> None:
        if problem not in self.problems:  # of a file that several read
            self.problems.append(problem)


def render(findings: Findings, width: int) -> str:
    """For people: the verdict and the problems first."""
    count = len(findings.problems)
    verdict = "would start" + (f" once {' and '.join(findings.awaited)}" if findings.awaited else "")
    if findings.unchecked:
        verdict += ", as far as this could be checked"
    if count:
        verdict = f"would not start: {count} problem{'s' if count > 1 else ''}"
    parts = [verdict, *(_item(problem, width) for problem in findings.problems)]
    if findings.rows:
        parts += ["", _aligned(findings.rows, width)]
    for heading, sentences in (("notes", findings.notes), ("not checked", findings.unchecked)):
        if sentences:
            parts += ["", heading, *(_item(sentence, width) for sentence in sentences)]
    return "\n".join(parts) + "\n"


def _item(sentence: str, width: int) -> str:
    return _wrapped("- ", printable(sentence), width)


def _aligned(rows: Iterable[tuple[str, str, str]], width: int) -> str:
    rows = list(rows)
    columns = [max(len(r[column]) for r in rows if len(r[column]) <= MOST_VALUE) for column in (0, 1)]
    return "\n".join(_wrapped(f"{n:<{columns[0]}}  {v:<{columns[1]}}  ", reason, width) for n, v, reason in rows)


def _wrapped(head: str, text: str, width: int) -> str:
    """The text behind its head, with as many lines as it needs."""
    room = max(width - len(head), 30)
    first, *more = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
    return "\n".join([f"{head}{first}".rstrip(), *(" " * len(head) + line for line in more)])
