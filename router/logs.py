"""Log records as JSON lines on stdout, for the launcher that started this process and prints them for people.

A JSON string holds any newline or escape sequence that text may carry, so no value can forge a line. Prompts and keys
are never logged.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import orjson

# Attributes of every LogRecord: what is left was given as `extra`.
STANDARD_FIELDS = frozenset(logging.LogRecord("", 0, "", 0, "", None, None).__dict__) | {"message", "taskName"}


class JsonFormatter(logging.Formatter):
    """One object: timestamp, level, target, message, extras, and a traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "target": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in record.__dict__.items() if name not in STANDARD_FIELDS}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def configure_logging() -> None:
    """Send all records of this process to stdout; what kills the process becomes a record too."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    sys.excepthook = _log_crash


def _log_crash(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
    logging.getLogger("router").critical("%s: %s", kind.__name__, error, exc_info=(kind, error, traceback))
