"""What sampling is tested with: the reference's logits and the compiled ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from server.backends.cpu.logits import KernelLogits
from server.backends.protocol import Logits
from server.backends.reference.logits import StockLogits


@pytest.fixture(params=["stock", "kernels"])
def make_logits(request: pytest.FixtureRequest) -> Callable[[], Logits]:
    return StockLogits if request.param == "stock" else partial(KernelLogits, request.getfixturevalue("kernels"))
