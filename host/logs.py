"""Log records as JSON lines on standard output, for the launcher that started this process and prints them for people.

The router and every shard log this way. A JSON string holds any newline or escape sequence that text may carry, so no
value can forge a line. Prompts and keys are never logged.

Logging never waits for the launcher, which may be stopped (Ctrl-Z) while requests go on: what its pipe does not take is
written later by a thread, and beyond a bound dropped and counted. What the launcher acts on is never dropped: records
with an `event`, and the CRITICAL one that says why a process ends.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
import time
from datetime import UTC, datetime
from typing import Any

from host.output import Output

# Attributes of every LogRecord: what is left was given as `extra`.
STANDARD_FIELDS = frozenset(logging.LogRecord("", 0, "", 0, "", None, None).__dict__) | {"message", "taskName"}
BEAT = "beat"  # the event of a record that is a sign of life, and nothing else
OUR_LOGGERS = ("router", "server")  # of this project, by the beginning of their names


class JsonFormatter(logging.Formatter):
    """One object: timestamp, level, target, message, extras, and a traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON, in ASCII."""
        line: dict[str, Any] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "target": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in record.__dict__.items() if name not in STANDARD_FIELDS}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class LogStream:
    """Takes every line at once; a thread that lives while something waits brings it to the reader."""

    RETRY_SECONDS = 0.02

    def __init__(self, descriptor: int) -> None:
        self._output = Output(descriptor)
        self._lock = threading.Lock()
        self._is_catching_up = False
        self.is_vital = False  # whether the next line is

    def write(self, line: str) -> None:
        """Write the line, or keep it, or count it as dropped."""
        with self._lock:
            self._report_drops()
            self._output.write(line, is_vital=self.is_vital)
            if self._output.pending and not self._is_catching_up:
                threading.Thread(target=self._catch_up, name="log", daemon=True).start()
                self._is_catching_up = True  # only where the thread could be started

    @property
    def is_behind(self) -> bool:
        """Whether something waits for the reader."""
        with self._lock:
            return self._output.pending > 0

    def drain(self, patience: float) -> None:
        """Wait until nothing waits any more, or until the reader has taken nothing for `patience` seconds."""
        left, limit = self._advance(), time.monotonic() + patience
        while left and time.monotonic() < limit:
            time.sleep(self.RETRY_SECONDS)
            before, left = left, self._advance()
            if left < before:
                limit = time.monotonic() + patience

    def _catch_up(self) -> None:
        while self._advance():
            time.sleep(self.RETRY_SECONDS)

    def _advance(self) -> int:
        """Write what can be written now; returns how many bytes wait still."""
        with self._lock:
            self._output.flush()
            self._report_drops()
            self._is_catching_up = self._is_catching_up and self._output.pending > 0
            return self._output.pending

    def _report_drops(self) -> None:
        if message := self._output.take_drops():
            fields = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": message}
            self._output.write(JsonFormatter().format(logging.makeLogRecord(fields)))


class LogHandler(logging.StreamHandler[LogStream]):
    """Records as lines of a LogStream."""

    terminator = ""  # the stream ends its lines itself
    EXIT_SECONDS = 1.0  # for a reader that is slow; one that was stopped keeps no process from ending

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, in the order of the calls: the caller holds the handler's lock."""
        if getattr(record, "event", None) == BEAT and self.stream.is_behind:
            return  # what waits is a sign of life, too, and a reader that is stopped needs no more of them
        self.stream.is_vital = record.levelno >= logging.CRITICAL or hasattr(record, "event")
        super().emit(record)

    def close(self) -> None:
        """Leave nothing behind that a reader would take; `logging` calls this at exit."""
        self.stream.drain(self.EXIT_SECONDS)
        super().close()


def configure_logging(level: str) -> None:
    """Send this process's records of at least `level` ("debug", "info", "warn", "error") to standard output.

    Other libraries are never asked for more than INFO: what they debug is not ours to read, and may hold prompts.
    """
    for descriptor in (1, 2):
        _never_wait(descriptor)
    handler = LogHandler(LogStream(1))
    handler.setFormatter(JsonFormatter())
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(number, logging.INFO), handlers=[handler], force=True)
    for name in OUR_LOGGERS:
        logging.getLogger(name).setLevel(number)


def _never_wait(descriptor: int) -> None:
    """Make the pipe to the launcher non-blocking, for libraries that write there without asking. It is ours alone, as a
    terminal or a file might not be."""
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.set_blocking(descriptor, False)
