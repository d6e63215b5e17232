"""What a step takes by its rows, measured: one row for each sequence that decodes, and one for each guess.

Steps of few rows mostly read weights, so that guesses cost little; where arithmetic decides, each costs a row. So
times are kept for about as many rows, four kinds for each doubling, and lie on a line between two kinds that are known.
Beyond them a row costs as much as a token of a prompt at most. Plain steps are planned ahead and those with drafts are
not: their times are kept apart. What was not measured for a while is forgotten: texts grow, and loads change. Left out:
how long the contexts of a step are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import repeat

MEMORY = 16  # steps of one kind that count
FRESH = 500  # steps for which a time holds without another one of its kind …
FEW = 4  # … where as many were measured; the first may have been interrupted, and holds for a part of them
CREDIT = 1.5  # how many times what is known a step may count as: one that was interrupted says little
DOUBT = 1.02  # what becomes of the price of a prompt's token with each prompt that has a higher one


class _Times:
    """Of steps of one sort."""

    def __init__(self) -> None:
        self._kinds: dict[int, tuple[float, float, int, int]] = {}  # rows, seconds, steps, number of the last one

    def note(self, number: int, rows: int, seconds: float) -> None:
        """The step of this number had so many rows."""
        kind = round(4 * math.log2(rows))
        mean_rows, mean_seconds, count, last = self._kinds.get(kind, (0.0, 0.0, 0, 0))
        if number - last > FRESH:
            count = 0
        elif count > 1:
            seconds = min(seconds, CREDIT * mean_seconds)
        count = min(count + 1, MEMORY)
        mean_rows += (rows - mean_rows) / count
        mean_seconds += (seconds - mean_seconds) / count
        self._kinds[kind] = mean_rows, mean_seconds, count, number

    def fresh(self, number: int) -> dict[int, tuple[float, float]]:
        """Rows and seconds of each kind that is known when the step of this number comes."""
        return {
            kind: (rows, seconds)
            for kind, (rows, seconds, count, last) in self._kinds.items()
            if number - last <= FRESH * min(count, FEW) // FEW
        }


class StepCosts:
    """Seconds of steps without prompts."""

    def __init__(self, row_seconds: float = math.inf) -> None:
        """row_seconds: what a row costs at most, as far as is known."""
        self._plain = _Times()
        self._drafted = _Times()
        self.num_steps = 0
        self._row_seconds = row_seconds

    def note(self, rows: int, seconds: float, *, has_drafts: bool) -> None:
        """A step of so many rows took so long: a plain one from when it could begin, else from sending to reply."""
        self.num_steps += 1
        (self._drafted if has_drafts else self._plain).note(self.num_steps, rows, seconds)

    def note_prompts(self, tokens: int, seconds: float) -> None:
        """A step that did nothing else computed so many tokens of prompts."""
        self._row_seconds = min(seconds / tokens, DOUBT * self._row_seconds)

    def prompts(self, tokens: int) -> float:
        """What so many tokens of prompts add to a step; 0 where that is not known."""
        return tokens * self._row_seconds if tokens and math.isfinite(self._row_seconds) else 0.0

    def plain(self, batch: int) -> float:
        """Seconds of a step in which so many sequences decode, without drafts; infinity if that is not known."""
        return next(self._line(self._plain.fresh(self.num_steps), batch))

    def drafted(self, batch: int) -> Iterator[float]:
        """Seconds of a step of these sequences with one guess, with two, and so on."""
        start, plain = self.plain(batch), self._plain.fresh(self.num_steps)
        known = {**plain, **self._drafted.fresh(self.num_steps)}
        above = {kind: point for kind, point in known.items() if point[0] > batch}
        yield from (max(start, seconds) for seconds in self._line({-1: (float(batch), start), **above}, batch + 1))

    def _line(self, points: dict[int, tuple[float, float]], rows: int) -> Iterator[float]:
        """Seconds for these rows, and each more: never less than for fewer."""
        if not points:
            yield from repeat(math.inf)
        left = (0.0, 0.0)
        for right in _not_interrupted(sorted(points.values())):
            if left == (0.0, 0.0):
                left = 0.0, right[1]
            while rows <= right[0]:
                yield left[1] + (right[1] - left[1]) * (rows - left[0]) / (right[0] - left[0])
                rows += 1
            left = right
        while True:
            yield left[1] + self._row_seconds * (rows - left[0])
            rows += 1


def _not_interrupted(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same rows and seconds, ascending: none took longer than more rows did, but for what came between."""
    lowest, found = math.inf, list[tuple[float, float]]()
    for rows, seconds in reversed(points):
        lowest = min(lowest, seconds)
        found.append((rows, lowest))
    return found[::-1]
