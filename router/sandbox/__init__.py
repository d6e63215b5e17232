"""Work that a client's text can make expensive, done in other processes (`pool.py`) or threads (`workers.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Task = Callable[..., Any]
MOST_ANSWER_BYTES = 32 * 2**20
STACK_BYTES = 8 * 2**20  # for a task; twice as much where a grammar is compiled again (`router/grammars/__main__.py`)


class TaskError(Exception):
    """A task cannot be done; the sentence is for the client."""


class TaskTooLarge(TaskError):
    """A task took more time or memory than one may, which says little of it: the machine may be busy."""
