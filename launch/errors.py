"""The one error of a launch, and how a check goes on after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


class Refusal(ValueError):
    """A launch that cannot go on: one sentence per problem, and the exit code that goes with them."""

    def __init__(self, problems: Iterable[str], code: int) -> None:
        self.problems = list(problems)
        self.code = code
        super().__init__("; ".join(self.problems))


def attempt(action: Callable[[], T], report: Callable[[str], object]) -> T | None:
    """What the action returns; None where it raises, of which `report` is told, a sentence for each problem."""
    try:
        return action()
    except Refusal as refusal:
        for problem in refusal.problems:
            report(problem)
    except ValueError as error:
        report(str(error))
    return None
