"""A port that was looked up is still free when it is used, whatever else this machine does meanwhile."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from tests import ports
from tests.ports import GIVEN, free_port


def test_it_is_none_that_the_kernel_gives_away() -> None:
    first, last = map(int, GIVEN.read_text().split())
    wanted = free_port()
    with ExitStack() as stack:
        for _ in range(200):
            other = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            assert first <= other.getsockname()[1] <= last
            assert other.getsockname()[1] != wanted
        stack.enter_context(socket.create_server(("127.0.0.1", wanted)))


def test_one_that_somebody_has_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, free = free_port(), free_port()
    monkeypatch.setattr(ports.random.SystemRandom, "sample", lambda self, among, k: [taken, free])
    with socket.create_server(("127.0.0.1", taken)):
        assert free == free_port()
