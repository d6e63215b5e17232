"""Where torch's own operators for products in 8 bits are good enough: what was measured on a GPU, kept as data.

`shares.json` beside this has, for each operator, the share of the limit (of memory or of arithmetic, whichever binds)
that it reached for a shape and a number of rows. `lockstep-bench products --write` measures and writes it. An operator
is the usual way to compute what it reaches 70 % of the limit for; otherwise our kernel is, and the operator is only
tried where times are measured (`choice.py`). Until the first run on a GPU the file is empty.

Shapes: F output features, D input features.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("shares.json")
GOOD = 0.7  # of the limit


@dataclass(frozen=True)
class Measured:
    """One product, timed."""

    operator: str
    features: int
    inputs: int
    rows: int
    share: float  # of the limit, 0 … 1


@dataclass(frozen=True)
class Shares:
    """All that was measured of one kind of GPU."""

    measured: tuple[Measured, ...] = field(default=())

    @classmethod
    def read(cls, path: Path = FILE) -> Shares:
        """Raises ValueError where the file is damaged."""
        try:
            rows: list[dict[str, Any]] = json.loads(path.read_text())
            return cls(tuple(Measured(**row) for row in rows))
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}; write it again with lockstep-bench products") from None

    def write(self, path: Path = FILE) -> None:
        """One line for each product."""
        lines = ",\n".join(f"  {json.dumps(vars(row))}" for row in self.measured)
        path.write_text(f"[\n{lines}\n]\n" if lines else "[]\n")

    def is_good(self, operator: str, features: int, inputs: int, rows: int) -> bool:
        """Whether the measured product that is most like this one reached enough; without any, no."""
        of_operator = [row for row in self.measured if row.operator == operator]
        if not of_operator:
            return False
        wanted = (features, inputs, max(rows, 1))
        nearest = min(of_operator, key=lambda row: _distance((row.features, row.inputs, row.rows), wanted))
        return nearest.share >= GOOD


def _distance(one: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    return sum(abs(math.log2(a / b)) for a, b in zip(one, other, strict=True))
