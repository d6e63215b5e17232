"""How much of something is kept where: a share of the whole, or a number of bytes.

No torch here: the launcher checks these settings too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

UNITS = {"GB": 10**9, "MB": 10**6, "GiB": 2**30, "MiB": 2**20}
WRITTEN = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)\s?(%|GB|MB|GiB|MiB)")


@dataclass(frozen=True)
class Share:
    """So much of the whole: a fraction, or bytes. One of both is set."""

    fraction: float | None = None
    num_bytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> Share:
        """From `40%`, `6GB` or `5.5GiB`. Raises ValueError with what may be written."""
        match = WRITTEN.fullmatch(text.strip())
        if match is None:
            raise ValueError("give a share such as 40%, or a size such as 6GB, 500MB or 5.5GiB")
        number, unit = float(match[1]), match[2]
        if unit != "%":
            return cls(num_bytes=int(number * UNITS[unit]))
        if number > 100:
            raise ValueError("a share is at most 100%")
        return cls(fraction=number / 100)

    @property
    def is_all(self) -> bool:
        """Whether nothing can be left over."""
        return self.fraction == 1.0

    def __str__(self) -> str:
        return f"{self.fraction:.4g}" if self.fraction is not None else f"{(self.num_bytes or 0) / 1e9:g} GB"

    def of(self, count: int, piece_bytes: int) -> int:
        """How many of `count` pieces of one size belong to the share."""
        if self.fraction is not None:
            return int(self.fraction * count + 1e-9)
        return min(count, (self.num_bytes or 0) // piece_bytes)

    def bytes_of(self, total: int) -> int:
        """The bytes of a whole of so many that belong to the share."""
        return int(self.fraction * total) if self.fraction is not None else min(total, self.num_bytes or 0)

    def admits(self, taken: int, size: int, seen: int, total: int) -> bool:
        """Whether the next piece belongs to the share, so that those that do are spread over all.

        taken: bytes of it so far; size: of the piece; seen: of all pieces so far, this one too; total: of all to come.
        """
        if self.fraction is not None:
            return taken + size <= self.fraction * seen * (1 + 1e-9)
        most = self.num_bytes or 0
        return taken + size <= most and taken + size <= most / max(total, 1) * seen * (1 + 1e-9)


ALL = Share(fraction=1.0)
