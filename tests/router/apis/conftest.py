"""What the tests of routes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.router.doubles import tasks_in_process
from tests.router.served import LAST_ALONE, TELLING, WITH_TOOLS, Served, one_two, reply, served


@pytest.fixture(autouse=True)
def no_process_aside(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tasks aside are done in this process, but for tests with the marker `aside`: another takes longer to start."""
    if request.node.get_closest_marker("aside"):
        yield
        return
    with tasks_in_process():
        yield


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Its prompt is the last message alone."""
    with served(tmp_path_factory.mktemp("plain"), one_two, LAST_ALONE) as it:
        yield it


@pytest.fixture(scope="module")
def telling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Its prompt shows all messages."""
    with served(tmp_path_factory.mktemp("telling"), one_two, TELLING) as it:
        yield it


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """It answers as `reply` does, with calls and reasoning."""
    with served(tmp_path_factory.mktemp("tooled"), reply, **WITH_TOOLS) as it:
        yield it
