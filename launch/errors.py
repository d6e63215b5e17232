"""The one error of a launch."""

from __future__ import annotations

from collections.abc import Iterable


class Refusal(ValueError):
    """A launch that cannot go on: one sentence per problem, and the exit code that goes with them."""

    def __init__(self, problems: Iterable[str], code: int) -> None:
        self.problems = list(problems)
        self.code = code
        super().__init__("; ".join(self.problems))
