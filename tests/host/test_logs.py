"""One record, one JSON line, whatever is in it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from host.logs import JsonFormatter
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
from host.logs import configure_logging
configure_logging({level!r})
for name in ("router", "other"):
    for level in ("debug", "info", "error"):
        getattr(logging.getLogger(f"{{name}}.{{level}}"), level)("said")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert expected == [json.loads(line)["target"] for line in done.stdout.splitlines()]


# A process that logs more than its pipe and its backlog hold, touches the file it is given, and says one more thing at
# the end of its input.
TALKER = """
import logging, pathlib, sys
from host.logs import configure_logging
configure_logging("info")
log = logging.getLogger("server")
for number in range(3000):
    log.info("%d %s", number, "x" * 1000)
    sys.stderr.write("y" * 1000 + "\\n")
log.info("serving", extra={"event": "ready"})
pathlib.Path(sys.argv[1]).touch()
sys.stdin.read()
log.critical("why it ends")
"""


def start_talker(done: Path) -> subprocess.Popen[str]:
    """The talker, when it has said everything although nobody has read a word."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", TALKER, str(done)],
        cwd=ROOT,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    limit = time.monotonic() + 60
    while not done.exists() and time.monotonic() < limit:
        time.sleep(0.02)
    if not done.exists():
        process.kill()
        process.communicate()
        raise AssertionError("it waits for its reader")
    return process


def test_a_reader_that_stopped_stalls_nobody_and_learns_what_it_missed(tmp_path: Path) -> None:
    process = start_talker(tmp_path / "done")
    output, _ = process.communicate(timeout=60)
    records = [json.loads(line) for line in output.splitlines()]  # none is torn
    numbers = [int(record["message"].split()[0]) for record in records if record["message"].endswith("x")]
    assert list(range(len(numbers))) == numbers
    dropped = next(record for record in records if "log lines dropped" in record["message"])
    assert 3000 == len(numbers) + int(dropped["message"].split()[0])
    assert ["why it ends"] == [record["message"] for record in records if record["level"] == "CRITICAL"]
    assert "ready" in [record.get("event") for record in records]


def test_a_reader_that_stopped_for_good_keeps_no_process_from_ending(tmp_path: Path) -> None:
    process = start_talker(tmp_path / "done")
    assert process.stdin
    process.stdin.close()
    process.stdin = None
    assert 0 == process.wait(timeout=60)
    process.communicate()


def test_a_reader_that_stopped_gets_no_signs_of_life_beside_what_waits() -> None:
    """What waits is one, and a reader that never comes back is owed no memory."""
    code = """
import logging
from host.logs import BEAT, configure_logging
configure_logging("info")
log = logging.getLogger("server")
log.info("", extra={"event": BEAT})
for number in range(200):
    log.info("x" * 1000)
for _ in range(100):
    log.info("", extra={"event": BEAT})
log.info("serving", extra={"event": "ready"})
open("/dev/stderr", "w").write("done")
"""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    assert process.stderr
    process.stderr.read(len("done"))
    output, _ = process.communicate(timeout=60)
    events = [event for line in output.splitlines() if (event := json.loads(line).get("event"))]
    assert ["beat", "ready"] == events


def test_the_last_words_arrive_when_the_reader_is_slow() -> None:
    code = """
import logging
from host.logs import configure_logging
configure_logging("info")
for number in range(500):
    logging.getLogger("server").info("%d %s", number, "x" * 1000)
logging.getLogger("server").critical("why it ends")
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    lines = []
    for line in process.stdout:
        lines.append(line)
        time.sleep(0 if len(lines) % 100 else 0.01)
    assert 0 == process.wait(timeout=60)
    process.stdout.close()
    assert (501, "why it ends") == (len(lines), json.loads(lines[-1])["message"])
