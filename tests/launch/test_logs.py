"""The launcher's log: what people and collectors see of the records of all processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from host.output import Output
from launch.logs import Log

TIME = "2026-11-20T11:00:00.123456+01:00"


def test_log_text_cannot_steer_the_terminal(tmp_path: Path) -> None:
    shown = log_lines(
        tmp_path, {"level": "WARNING", "message": "a\x1b[2Jb\nc\r", "timestamp": TIME, "n": 3, "s": "x y"}
    )
    assert [r"2026-11-20T10:00:00.123Z  WARN shard-0: a\x1b[2Jb\nc\r n=3 s=x y"] == shown


def test_record_without_a_time_gets_one(tmp_path: Path) -> None:
    (line,) = log_lines(tmp_path, {"message": "m", "timestamp": "tea time"})
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z  INFO shard-0: m", line)


def test_raw_record_is_printed_as_it_is(tmp_path: Path) -> None:
    assert ["a | b", "1 | 2"] == log_lines(tmp_path, {"level": "INFO", "message": "a | b\n1 | 2", "raw": True})


def test_json_log_names_process_and_rank(tmp_path: Path) -> None:
    (line,) = log_lines(tmp_path, {"timestamp": TIME, "level": "CRITICAL", "message": "m", "n": 1}, as_json=True)
    expected = {"target": "shard-0", "timestamp": "2026-11-20T10:00:00.123Z", "level": "ERROR", "message": "m", "n": 1}
    assert expected | {"process": "shard-0", "rank": 0} == json.loads(line)


def log_lines(tmp_path: Path, record: dict[str, object], as_json: bool = False) -> list[str]:
    with (tmp_path / "log").open("w+b") as file:
        Log(Output(file.fileno()), as_json).record("shard-0", record)
        return (tmp_path / "log").read_text().splitlines()
