"""What the tests of routes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.router.doubles import tasks_in_process


@pytest.fixture(autouse=True)
def no_process_aside(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tasks aside are done in this process, but for tests with the marker `aside`: another takes longer to start."""
    if request.node.get_closest_marker("aside"):
        yield
        return
    with tasks_in_process():
        yield
