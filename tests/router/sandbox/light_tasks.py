"""Tasks for a sandbox whose processes are soon there: they import next to nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from router.sandbox import Task


def repeat(text: str, times: int = 1) -> str:
    """The text so many times."""
    return text * times


def spin(seconds: float) -> str:
    """Work for so much CPU time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return "done"


def wait(path: str) -> str:
    """Wait until there is such a file."""
    while not Path(path).exists():
        time.sleep(0.001)
    return "done"


def tasks(argument: str) -> Mapping[str, Task]:
    """All of them by name. argument: CPU seconds that it takes until they are there, if any."""
    spin(float(argument or 0))
    return {"repeat": repeat, "spin": spin, "wait": wait}
