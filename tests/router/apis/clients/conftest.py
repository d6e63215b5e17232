"""One served site for all clients, with keys: what people have in hand is tried on it as it is."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.router.served import WITH_TOOLS, Served, reply, served

LIMITED = ("anthropic", "openai", "hub")  # clients with a key of their own for one request a minute


def keys_in(folder: Path) -> str:
    keys: list[dict[str, object]] = [{"name": "open", "key": "open-secret"}]
    keys += [{"name": name, "key": f"{name}-secret", "requests_per_minute": 1} for name in LIMITED]
    path = folder / "keys.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps({"keys": keys}))
    return str(path)


@contextmanager
def full(it: Served) -> Iterator[threading.Timer]:
    """No place is free, until the timer is started: for a part of the second after which clients are to come again."""
    permits = it.site.app.state.services.permits
    held, permits._left = permits._left, 0
    timer = threading.Timer(0.3, setattr, (permits, "_left", held))
    yield timer
    timer.join()


@pytest.fixture(scope="package")
def it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """It answers as `reply` does."""
    folder = tmp_path_factory.mktemp("clients")
    with served(folder, reply, **WITH_TOOLS, api_keys_file=keys_in(folder)) as site:
        yield site
