"""Work that a client's text can make expensive, done beside the router: see `pool.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Task = Callable[..., Any]
MOST_ANSWER_BYTES = 32 * 2**20
STACK_BYTES = 8 * 2**20  # for a task; where its work is done again, in a process of many texts, there is twice as much


class TaskError(Exception):
    """A task cannot be done; the sentence is for whoever asked."""
