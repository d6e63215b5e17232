"""Of tests on a GPU: an asynchronous error is the error of the test that caused it, and a lost device of no other.

After an error that sticks, such as an illegal address, every later call of a process fails. So a worker whose device is
lost ends; pytest-xdist starts another and goes on. Without workers the run ends there, and says why.

What fails is told at once, as a run that is cut short has no summary.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch

from server.backends.device import lost_device
from server.stepping import warmup

LOST = 70  # exit code of a process whose device is lost
RAISED = pytest.StashKey[BaseException]()  # by a test


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    """Remember what a test has raised, for `device_that_answers`."""
    if call.excinfo is not None:
        item.stash[RAISED] = call.excinfo.value
    return (yield)


class Teller:
    """Prints why a test has failed, when it has."""

    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Where tests run on workers, this is called where their results arrive."""
        if report.failed:
            self._terminal.write_line(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext}")


def pytest_configure(config: pytest.Config) -> None:
    """Beside the terminal's own reports."""
    if (terminal := config.pluginmanager.getplugin("terminalreporter")) is not None:
        config.pluginmanager.register(Teller(terminal), "teller")


@pytest.fixture(autouse=True)
def device_that_answers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Wait for the device after each test, give back what it took, and end this process where it is lost."""
    yield
    problem = request.node.stash.get(RAISED, None)
    try:
        synchronise()
        gc.collect()  # an engine with captured steps is in a cycle with them
        torch.cuda.empty_cache()
    except RuntimeError as error:
        problem = error
        raise
    finally:
        if problem is not None and lost_device(problem) is not None:
            leave(request.config, f"the device is lost after {request.node.nodeid}: {problem}")


@pytest.fixture(autouse=True)
def short_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine decodes for a moment to read the clocks, not for a second."""
    monkeypatch.setattr(warmup, "DECODING_S", 0.05)


def synchronise() -> None:
    """Wait for all that the device was told. Raises RuntimeError for what has failed of it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def leave(config: pytest.Config, sentence: str) -> None:
    """End this worker, for another to take its place, or the run where there are none."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.exit(sentence, LOST)
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(sentence, file=sys.stderr, flush=True)
    os._exit(LOST)
