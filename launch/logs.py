"""The launcher's log: records of all processes and its own, as lines for people or as JSON, without ever blocking.

Control characters are escaped, so that no prompt or file name can control the terminal.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from host.output import Output

CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
LEVELS = {"WARNING": "WARN", "CRITICAL": "ERROR", "FATAL": "ERROR"}
COLOURS = {"DEBUG": "\x1b[2m", "INFO": "\x1b[32m", "WARN": "\x1b[33m", "ERROR": "\x1b[31m"}
KNOWN_FIELDS = {"timestamp", "level", "target", "message", "raw", "event", "consequence"}


def printable(text: str) -> str:
    """`text` with control characters escaped."""
    return CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def open_standard_streams() -> None:
    """A launcher started with closed standard streams must not get a socket under their numbers."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _timestamp(given: object) -> str:
    """The record's own time if it has one, else now, in UTC to the millisecond."""
    try:
        moment = datetime.fromisoformat(str(given)).astimezone(UTC)
    except (ValueError, OverflowError):
        moment = datetime.now(UTC)
    return moment.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


class Log:
    """Re-emits the records of all processes and writes the launcher's own."""

    def __init__(self, output: Output, as_json: bool, colour: bool = False) -> None:
        self.output = output
        self.as_json = as_json
        self._colour = colour

    def info(self, message: str) -> None:
        """The launcher's own record of level INFO."""
        self.record("launcher", {"level": "INFO", "message": message})

    def warn(self, message: str) -> None:
        """The launcher's own record of level WARN."""
        self.record("launcher", {"level": "WARN", "message": message})

    def error(self, message: str) -> None:
        """The launcher's own record of level ERROR."""
        self.record("launcher", {"level": "ERROR", "message": message})

    def flush(self) -> None:
        """Write what waited, and once the reader has caught up report what was dropped."""
        self.output.flush()
        if message := self.output.take_drops():
            self._write("launcher", {"level": "WARN", "message": message})

    def record(self, process: str, record: Mapping[str, Any]) -> None:
        """A record of `process`, which is "launcher", "router", or "shard-0" and so on."""
        self.flush()
        self._write(process, record)

    def _write(self, process: str, record: Mapping[str, Any]) -> None:
        level = str(record.get("level", "INFO")).upper()
        head = {"timestamp": _timestamp(record.get("timestamp")), "level": LEVELS.get(level, level)}
        complete = {**head, "target": process, **record, **head}
        self.output.write(self._json(process, complete) if self.as_json else self._text(process, complete))

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
