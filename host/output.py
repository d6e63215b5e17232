"""Lines written to a descriptor that may be blocked, without ever waiting for the reader of a log.

A pipe whose reader was stopped, a terminal that is held (Ctrl-S) and a full disk are temporary: lines are kept up to a
bound meanwhile, and beyond it dropped and counted. A reader that has closed its end never comes back. Lines stay whole
and in order.

The descriptor is polled rather than made non-blocking: that flag is shared by all processes that have the file open.
"""

from __future__ import annotations

import errno
import os
import select

READER_IS_GONE = frozenset({errno.EPIPE, errno.ECONNRESET, errno.EBADF})
BLOCKED = "output was blocked"


class Output:
    """Whole lines for one descriptor. Not for several threads at once."""

    BACKLOG_BYTES = 1 << 20  # a reader may be this far behind before lines are dropped
    CHUNK_BYTES = 4096  # what a pipe that poll calls writable takes without blocking: PIPE_BUF

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._backlog = bytearray()
        self._is_closed = False
        self._obstacle = BLOCKED
        self.dropped = 0

    @property
    def pending(self) -> int:
        """How many bytes wait to be written."""
        return len(self._backlog)

    def write(self, text: str, *, is_vital: bool = False) -> None:
        """Write one line, or keep it until it is taken. When too much is kept already it is dropped, unless vital."""
        line = text.encode(errors="backslashreplace") + b"\n"
        is_full = len(self._backlog) + len(line) > self.BACKLOG_BYTES
        if self._is_closed or (is_full and not is_vital):
            self.dropped += 1
            return
        self._backlog += line
        self.flush()

    def flush(self) -> None:
        """Write what can be written now."""
        while self._backlog:
            if not self._poll.poll(0):
                self._obstacle = BLOCKED
                return
            try:
                written = os.write(self._descriptor, self._backlog[: self.CHUNK_BYTES])
            except BlockingIOError:  # another process made it non-blocking, and was quicker
                self._obstacle = BLOCKED
                return
            except OSError as error:
                self._take_error(error)
                return
            del self._backlog[:written]

    def _take_error(self, error: OSError) -> None:
        if error.errno in READER_IS_GONE:
            self._is_closed = True
            self._backlog.clear()
        else:  # a full disk, a quota, a limit on a file's size, a device that fails: all of them may pass
            self._obstacle = os.strerror(error.errno or errno.EIO)

    def take_drops(self) -> str | None:
        """How many lines were dropped and why, once the reader has caught up; each is told once."""
        if not self.dropped or self._backlog or self._is_closed:
            return None
        message = f"{self.dropped} log lines dropped: {self._obstacle}"
        self.dropped = 0
        return message
