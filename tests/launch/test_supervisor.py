"""What a supervisor still waits for, and what no longer."""

from __future__ import annotations

import os

import pytest

from host.output import Output
from launch.logs import Log
from launch.supervisor import Supervisor


@pytest.mark.parametrize("end", [lambda s: s._stop_all(1.0), lambda s: s._kill()], ids=["stop", "kill"])
def test_nothing_is_started_again_once_all_are_told_to_end(end: object) -> None:
    with open(os.devnull, "w") as nothing:
        supervisor = Supervisor([], {}, Log(Output(nothing.fileno()), False), drain_seconds=1.0)
        for name in ("start", "router", "load", "cause", "drain"):
            supervisor._timers.set(name, 0.0, lambda: pytest.fail("it was started, or blamed, after the end"))
        assert callable(end)
        end(supervisor)
        supervisor._timers.run()
        supervisor._pool.close([])
