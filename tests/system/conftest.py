"""What holds for all servers of these tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from tests.running import ROOT


@pytest.fixture(autouse=True, scope="package")
def aside_is_no_last() -> Iterator[None]:
    """Processes that routers start have the priority of the routers: at a lower one, those of a busy machine get next
    to no time, and requests are refused.

    `test_grammars.py` holds that they are served at the lowest.
    """
    paths = (str(ROOT / "tests" / "faults"), os.environ.get("PYTHONPATH", ""))
    switched = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "LOCKSTEP_TEST_KEEPS_PRIORITY": "1"}
    with patch.dict(os.environ, switched):
        yield
