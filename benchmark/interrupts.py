"""Runs what a command awaits, on uvloop, so that SIGTERM ends it as Ctrl-C does.

A handler of `signal.signal` raises wherever the program is just then. Within a callback of a connection, the loop takes
that for an error of the connection and goes on; a handler of the loop's own cancels what is awaited.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result; in the main thread. Raises KeyboardInterrupt where SIGINT or SIGTERM came meanwhile."""
    came: list[int] = []

    async def interruptible() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def end() -> None:
            came.append(signal.SIGTERM)
            task.cancel()

        loop.add_signal_handler(signal.SIGTERM, end)
        try:
            return await main
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    try:
        return uvloop.run(interruptible())
    except asyncio.CancelledError:
        if came:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
