"""What several modules of these tests need."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.nodes.cluster import certificates
from tests.nodes.load import FLOAT32, REQUESTS
from tests.running import Server
from tests.server.conftest import checkpoints
from tests.system.survival import Answer, answers_of

__all__ = ["checkpoints"]


@pytest.fixture(scope="session")
def expected() -> list[Answer]:
    """What one process answers to the requests of `load.py`."""
    with Server(*FLOAT32) as server:
        return asyncio.run(answers_of(server, REQUESTS))


@pytest.fixture(scope="session")
def tls_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Certificates of one cluster."""
    with certificates(tmp_path_factory.mktemp("tls") / "made") as folder:
        yield folder
