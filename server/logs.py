"""Log records as JSON lines on standard output, for the launcher that started this process and prints them for people.

The router and every shard log this way. A JSON string holds any newline or escape sequence that text may carry, so no
value can forge a line. Prompts and keys are never logged.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

# Attributes of every LogRecord: what is left was given as `extra`.
STANDARD_FIELDS = frozenset(logging.LogRecord("", 0, "", 0, "", None, None).__dict__) | {"message", "taskName"}
OURS = ("router", "server")  # the loggers of this project, by the beginning of their names


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


def configure_logging(level: str) -> None:
    """Send this process's records of at least `level` ("debug", "info", "warn", "error") to standard output.

    Other libraries are never asked for more than INFO: what they debug is not ours to read, and may hold prompts.
    """
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonFormatter())
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(number, logging.INFO), handlers=[handler], force=True)
    for name in OURS:
        logging.getLogger(name).setLevel(number)
