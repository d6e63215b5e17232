"""What holds for all tests: how many run at once, how many examples Hypothesis tries, which tests have the machine for
themselves, which CPU kernels compute, and that an end from outside leaves no process.

`--cpu-kernels avx2` runs all tests with the kernels of that kind (`tests/cpu_kernels.py`).

`HYPOTHESIS_PROFILE=large` tries three times as many, as `.ci/run` does in `make test-rest`. No profile has a deadline:
how long an example takes says nothing on a busy machine.

A test that compares times with a clock is marked `alone`. Such tests come last, and the workers of one run share a lock
so that no other test runs beside them.
"""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from host import cpu_kinds
from host.folders import refuse_memory

with suppress(ImportError):  # tests on a GPU do without it, and so does what travels there
    from hypothesis import settings

    settings.register_profile("small", max_examples=100, deadline=None)
    settings.register_profile("large", max_examples=300, deadline=None)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "small"))

LOCKS = pytest.StashKey[Path]()

# SIGTERM interrupts as Ctrl-C does, so that fixtures end the processes that they started.
signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: many tests wait for processes that they have started."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that run alone come last: the others' workers have little left to wait with."""
    items.sort(key=_is_alone)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker where the locks of this run are."""
    node.workerinput["locks"] = str(node.config.stash[LOCKS])


def pytest_addoption(parser: pytest.Parser) -> None:
    """The server's own option, with its values."""
    group = parser.getgroup("lockstep")
    group.addoption("--cpu-kernels", choices=cpu_kinds.CHOICES, help="compiled kernels that compute on a CPU (auto)")


def pytest_configure(config: pytest.Config) -> None:
    """Have a folder for the locks, until the run ends; and those of tests on a disk, which some of them need.

    What `--cpu-kernels` says is told to this process, and so to those that it starts, before a test is collected.
    """
    if wanted := config.getoption("--cpu-kernels"):
        os.environ["CPU_KERNELS"] = wanted
    try:
        cpu_kinds.check(os.environ.get("CPU_KERNELS", cpu_kinds.AUTO))
    except ValueError as error:
        raise pytest.UsageError(f"--cpu-kernels is {os.environ['CPU_KERNELS']}: {error}") from None
    if is_in_memory(Path(tempfile.gettempdir())):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/var/tmp")
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    config.stash[LOCKS] = Path(folder.name)


def is_in_memory(folder: Path) -> bool:
    """Whether a folder is refused for what leaves memory."""
    try:
        refuse_memory(folder, "")
    except ValueError:
        return True
    return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """One test, with its fixtures: beside those of other workers, or alone."""
    locks = getattr(item.config, "workerinput", {}).get("locks", item.config.stash[LOCKS])
    with place(Path(locks), is_alone=_is_alone(item)):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine has an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


def _is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


@contextmanager
def place(locks: Path, *, is_alone: bool) -> Iterator[None]:
    """Shared with other tests, or for one alone. Who waits to be alone holds the door, so that nobody else enters."""
    with ExitStack() as inside:
        with _locked(locks / "door", fcntl.LOCK_EX):
            inside.enter_context(_locked(locks / "room", fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH))
        yield


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, kind)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # also where a process that a test has left has the file open
