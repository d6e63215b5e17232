"""Signals to the launcher: before its processes run they end it, afterwards the supervisor decides."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from router.launch.logs import Log


@contextmanager
def signals_to_pipe() -> Iterator[int]:
    """Within the block each signal that concerns the launcher is one byte, its number, in the pipe that is yielded."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    numbers = [signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup asks to outlive the terminal
        numbers.append(signal.SIGHUP)
    previous_wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    previous = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield reader
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_wakeup)
        os.close(reader)
        os.close(writer)


def leave_on_signal(log: Log) -> None:
    """From here on a signal ends the launch at once, in the middle of a download too: there is nothing to drain yet.

    Files that are complete stay for the next launch; a conversion dies with its parent.
    """

    def leave(number: int, _: object) -> None:
        log.info(f"{signal.Signals(number).name}: stopped before the model was there")
        os._exit(0)  # threads of a download would hold up an orderly exit

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)
