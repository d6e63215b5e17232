"""Which cases of a test on a GPU run always, and which only when all kernels do: each compiles kernels of its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def first(values: Sequence[Any], always: Collection[Any]) -> list[Any]:
    """The values as parameters, all but those that run always with the mark `kernels`."""
    assert all(one in values for one in always)
    return [value if value in always else pytest.param(value, marks=pytest.mark.kernels) for value in values]
