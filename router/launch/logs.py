"""The launcher's log: records of all processes and its own, as lines for people or as JSON, never blocking."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from router.launch.terminal import printable

LEVELS = {"WARNING": "WARN", "CRITICAL": "ERROR", "FATAL": "ERROR"}
COLOURS = {"DEBUG": "\x1b[2m", "INFO": "\x1b[32m", "WARN": "\x1b[33m", "ERROR": "\x1b[31m"}


KNOWN_FIELDS = {"timestamp", "level", "target", "message", "raw", "event", "consequence"}


def _timestamp(given: object) -> str:
    """The record's own time if it has one, else now, in UTC to the millisecond."""
    try:
        moment = datetime.fromisoformat(str(given)).astimezone(UTC)
    except (ValueError, OverflowError):
        moment = datetime.now(UTC)
    return moment.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


class Output:
    """Standard output that never stalls the supervisor: what a blocked or closed reader does not take is dropped."""

    BACKLOG_BYTES = 1 << 20  # a reader may be this far behind before lines are dropped
    CHUNK_BYTES = 4096  # what a pipe that poll calls writable takes without blocking: PIPE_BUF

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._backlog = bytearray()
        self._closed = False
        self.dropped = 0

    @property
    def pending(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._backlog)

    def write(self, text: str) -> None:
        """Write one line, or keep it until the reader takes it; dropped when too much is kept already."""
        line = text.encode(errors="backslashreplace") + b"\n"
        if self._closed or len(self._backlog) + len(line) > self.BACKLOG_BYTES:
            self.dropped += 1
            return
        self._backlog += line
        self.flush()

    def flush(self) -> None:
        """Write what can be written now."""
        while self._backlog and self._poll.poll(0):
            try:
                written = os.write(self._descriptor, self._backlog[: self.CHUNK_BYTES])
            except BlockingIOError:
                return
            except OSError:  # the reader is gone
                self._closed = True
                self._backlog.clear()
                return
            del self._backlog[:written]


class Log:
    """Re-emits the records of all processes and writes the launcher's own."""

    def __init__(self, output: Output, as_json: bool, colour: bool = False) -> None:
        self.output = output
        self._as_json = as_json
        self._colour = colour

    def info(self, message: str) -> None:
        """The launcher's own record of level INFO."""
        self.record("launcher", {"level": "INFO", "message": message})

    def warn(self, message: str) -> None:
        """The launcher's own record of level WARN."""
        self.record("launcher", {"level": "WARN", "message": message})

    def flush(self) -> None:
        """Write what waited, and once the reader has caught up say how much it missed."""
        self.output.flush()
        if (dropped := self.output.dropped) and not self.output.pending:
            self.output.dropped = 0
            self._write("launcher", {"level": "WARN", "message": f"{dropped} log lines dropped: output was blocked"})

    def record(self, process: str, record: Mapping[str, Any]) -> None:
        """A record of `process`, which is "launcher", "router", or "shard-0" and so on."""
        self.flush()
        self._write(process, record)

    def _write(self, process: str, record: Mapping[str, Any]) -> None:
        level = str(record.get("level", "INFO")).upper()
        head = {"timestamp": _timestamp(record.get("timestamp")), "level": LEVELS.get(level, level)}
        complete = {**head, "target": process, **record, **head}
        self.output.write(self._json(process, complete) if self._as_json else self._text(process, complete))

    def _json(self, process: str, record: dict[str, Any]) -> str:
        rank = {"rank": int(process.removeprefix("shard-"))} if process.startswith("shard-") else {}
        return json.dumps({**record, "process": process, **rank})

    def _text(self, process: str, record: dict[str, Any]) -> str:
        message = str(record.get("message", ""))
        if record.get("raw") is True:  # a table, printed as it is
            return "\n".join(printable(line) for line in message.split("\n"))
        extra = [
            f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in record.items() if k not in KNOWN_FIELDS
        ]
        level = printable(record["level"])
        shown = f"{COLOURS.get(level, '')}{level:>5}\x1b[0m" if self._colour else f"{level:>5}"
        return f"{printable(str(record['timestamp']))} {shown} {process}: " + printable(" ".join([message, *extra]))
