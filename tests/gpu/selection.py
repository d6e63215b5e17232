"""What tests on a GPU share: the device, and which cases run always, and which only when all kernels do."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch

GPU = torch.device("cuda", 0)
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def first(values: Sequence[Any], always: Collection[Any]) -> list[Any]:
    """The values as parameters, all but those that run always with the mark `kernels`: each compiles its own."""
    assert all(one in values for one in always)
    return [value if value in always else pytest.param(value, marks=pytest.mark.kernels) for value in values]


DTYPES = first([torch.float32, torch.float16, torch.bfloat16], [torch.bfloat16])
