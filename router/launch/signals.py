"""Signals to the launcher: before its processes run they end it, then the supervisor decides, then they end it again.

SIGTERM, SIGINT and SIGHUP (a terminal that closes, unless `nohup` had it ignored) let requests finish; SIGQUIT and a
second signal do not.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from router.launch.logs import Log


@contextmanager
def signals_to_pipe() -> Iterator[int]:
    """Within the block each signal that concerns the launcher is one byte, its number, in the pipe that is yielded.

    After it, a signal ends this process at once.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    previous_wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _handle(lambda *_: None, _stopping_signals() | {signal.SIGCHLD, signal.SIGUSR1})
    try:
        yield reader
    finally:
        _handle(_abort, _stopping_signals())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.set_wakeup_fd(previous_wakeup)
        os.close(reader)
        os.close(writer)


@contextmanager
def leave_on_signal(log: Log) -> Iterator[None]:
    """Within the block a signal ends the launch at once, even a download: there is nothing to drain yet.

    Files that are complete stay for the next launch; a conversion dies with its parent. After the block, when the
    launch is over and may have failed, the exit code tells of the signal.
    """

    def leave(number: int, _: object) -> None:
        log.info(f"{signal.Signals(number).name}: stopped before the model was there")
        # Threads of a download would hold up an orderly exit.
        os._exit(128 + number if number == signal.SIGQUIT else 0)

    _handle(leave, _stopping_signals())
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # there is no router yet that it could restart
    try:
        yield
    finally:
        _handle(_abort, _stopping_signals())


def _stopping_signals() -> set[signal.Signals]:
    """The signals that stop a launch. One that `nohup` has ignored stays so: it asks to outlive the terminal."""
    stopping = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP}
    return stopping if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else stopping - {signal.SIGHUP}


def _handle(handler: Callable[[int, object], None], numbers: set[signal.Signals]) -> None:
    for number in numbers:
        signal.signal(number, handler)


def _abort(number: int, _: object) -> None:
    os._exit(128 + number)
