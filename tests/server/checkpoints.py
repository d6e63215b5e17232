"""Every family's tiny checkpoints with the oracle that judges them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from tests.server import published, tiny

CASES = [*tiny.CASES, *published.CASES]
Oracle = Callable[[Tensor], Tensor]  # ids [T] → logits [T, V]
Checkpoints = Callable[[str], tuple[Path, Oracle]]


def save(case: str, folder: Path) -> Oracle:
    """Write the checkpoint of a case; returns its oracle."""
    if case in published.CASES:
        return published.save_published(case, folder)
    model = tiny.save_tiny(case, folder)
    return lambda ids: model(ids.unsqueeze(0)).logits[0]
