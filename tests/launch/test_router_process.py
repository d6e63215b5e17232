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
from launch.router_process import Incumbent
from launch.timers import Timers


@pytest.fixture
def incumbent() -> Iterator[Incumbent]:
    """A router that loads for ever."""
    with open(os.devnull, "w") as nothing:
        log, timers = Log(Output(nothing.fileno()), False), Timers()
        it = Incumbent(timers, log, drain_seconds=0.0, stop_seconds=0.0, most_deaths=5)
        child = Child(
            "router", OwnProcess((sys.executable, "-c", "import time; time.sleep(600)"), dict(os.environ)), log
        )
        it.began(child)
        yield it
        child.signal(signal.SIGKILL)
        child.process.wait()
        child.close()


def test_one_that_is_never_ready_goes_once_nobody_else_is_waited_for(incumbent: Incumbent) -> None:
    waiting = [True, True, False]
    incumbent.expect(0.0, lambda: waiting.pop(0))
    assert incumbent.child is not None
    for _ in range(3):
        assert incumbent.child.critical is None
        incumbent._timers.run()
    assert "it was not ready after 0 s and was killed" == incumbent.child.critical
    incumbent.child.process.wait()
    assert ("router stopped: it was not ready after 0 s and was killed", 0.0) == incumbent.lost()


def test_one_that_is_ready_is_not_waited_for(incumbent: Incumbent) -> None:
    incumbent.expect(0.0, lambda: False)
    incumbent.ready()
    incumbent._timers.run()
    assert incumbent.child is not None and incumbent.child.critical is None
