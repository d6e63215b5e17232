"""One record, one JSON line, whatever is in it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from server.logs import JsonFormatter
from tests.running import ROOT


def line_of(message: str, *args: object, **fields: Any) -> dict[str, Any]:
    record = logging.getLogger("router.test").makeRecord(
        "router.test", logging.INFO, "file.py", 1, message, args, fields.pop("exc_info", None), extra=fields
    )
    line = JsonFormatter().format(record)
    assert "\n" not in line and "\x1b" not in line
    parsed: dict[str, Any] = json.loads(line)
    return parsed


def test_record_has_the_four_fields_and_its_extras() -> None:
    line = line_of("%d requests", 3, event="ready", raw=True)
    assert (line["level"], line["target"], line["message"]) == ("INFO", "router.test", "3 requests")
    assert line["timestamp"].endswith("+00:00")
    assert (line["event"], line["raw"]) == ("ready", True)
    assert set(line) == {"timestamp", "level", "target", "message", "event", "raw"}


def test_text_cannot_forge_a_line() -> None:
    line = line_of("id %s", 'x\n{"level":"CRITICAL"}\x1b[31m{}%s', request_id="\r\n")
    assert line["level"] == "INFO"
    assert line["request_id"] == "\r\n"


def test_traceback_is_a_field() -> None:
    try:
        raise RuntimeError("broken\nin two lines")
    except RuntimeError:
        line = line_of("oops", exc_info=sys.exc_info())
    assert "RuntimeError: broken\nin two lines" in line["traceback"]


def test_what_json_cannot_say_is_said_as_text() -> None:
    line = line_of("cannot read %s", "\udcff.safetensors", folder=ROOT)
    assert "cannot read \udcff.safetensors" == line["message"]
    assert str(ROOT) == line["folder"]


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("debug", ["router.debug", "router.info", "router.error", "other.info", "other.error"]),
        ("info", ["router.info", "router.error", "other.info", "other.error"]),
        ("warn", ["router.error", "other.error"]),
    ],
)
def test_level_is_the_least_that_is_written_and_others_never_debug(level: str, expected: list[str]) -> None:
    code = f"""
import logging
from server.logs import configure_logging
configure_logging({level!r})
for name in ("router", "other"):
    for level in ("debug", "info", "error"):
        getattr(logging.getLogger(f"{{name}}.{{level}}"), level)("said")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert expected == [json.loads(line)["target"] for line in done.stdout.splitlines()]
