"""When the router that runs now has to go."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from host.output import Output
from launch.logs import Log
from launch.processes import Child, OwnProcess
from launch.router_process import RouterProcess
from launch.timers import Timers


@pytest.fixture
def router() -> Iterator[RouterProcess]:
    """A router that loads for ever."""
    with open(os.devnull, "w") as nothing:
        log, timers = Log(Output(nothing.fileno()), False), Timers()
        it = RouterProcess(timers, log, drain_seconds=0.0, stop_seconds=0.0, most_deaths=5)
        child = Child(
            "router", OwnProcess((sys.executable, "-c", "import time; time.sleep(600)"), dict(os.environ)), log
        )
        it.started(child)
        yield it
        child.signal(signal.SIGKILL)
        child.process.wait()
        child.close()


def test_one_that_is_never_ready_goes_once_nobody_else_is_waited_for(router: RouterProcess) -> None:
    waiting = [True, True, False]
    router.expect(0.0, lambda: waiting.pop(0))
    assert router.child is not None
    for _ in range(3):
        assert router.child.critical is None
        router._timers.run()
    assert "it was not ready after 0 s and was killed" == router.child.critical
    router.child.process.wait()
    assert ("router stopped: it was not ready after 0 s and was killed", 0.0) == router.lost()


def test_one_that_is_ready_is_not_waited_for(router: RouterProcess) -> None:
    router.expect(0.0, lambda: False)
    router.ready()
    router._timers.run()
    assert router.child is not None and router.child.critical is None
