"""What a supervisor still waits for, and what no longer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from host.output import Output
from launch.logs import Log
from launch.processes import ChildCommand
from launch.restarts import RestartCommands
from launch.supervisor import Phase, Supervisor


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


def test_a_router_that_starts_between_two_groups_waits_where_the_last_one_was_until_it_is_told_of_the_next() -> None:
    """Else it would take the next group's number for that of sockets that are gone, and not listen to the news."""
    started: list[tuple[int, Sequence[str], bool]] = []
    told: list[dict[str, Any]] = []
    child: Any = SimpleNamespace(tell=told.append)

    def router(*given: Any) -> ChildCommand:
        started.append(given)
        return ChildCommand("router", ())

    restart = RestartCommands(lambda number: ([], [f"{number}.sock"]), router, most_deaths=5)
    with open(os.devnull, "w") as nothing:
        log = Log(Output(nothing.fileno()), False)
        supervisor = Supervisor([], {}, log, drain_seconds=1.0, restart=restart, sockets=["1.sock"])
        supervisor._spawn = lambda _: supervisor._router.started(child)  # type: ignore[method-assign]
        supervisor._phase, supervisor._is_warm = Phase.SERVING, True
        supervisor._end_group()
        supervisor._start_router()
        assert [(1, ["1.sock"], False)] == started
        supervisor._timers.run()
        assert [{"group": 2, "sockets": ["2.sock"]}] == told
        supervisor._start_router()
        assert (2, ["2.sock"], False) == started[-1]
        supervisor._pool.close([])
