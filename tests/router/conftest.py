"""What tests of several APIs share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from router.sandbox import pool


@pytest.fixture(autouse=True, scope="session")
def aside_is_no_last() -> Iterator[None]:
    """Processes aside have the priority of the tests: at the lowest, those of a busy machine get next to no time.

    That they are served at the lowest hold `sandbox/test_pool.py` and, of a whole server,
    `tests/system/test_grammars.py`.
    """
    with patch.object(pool, "NICENESS", 0):
        yield


@pytest.fixture
def template(tmp_path: Path) -> str:
    """A chat template that makes a prompt of the last message alone."""
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages[-1]['content'] }}")
    return str(path)
