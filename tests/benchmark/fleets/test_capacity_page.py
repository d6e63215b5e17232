"""docs/capacity.md: its commands run, here with fewer requests."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from benchmark.__main__ import main
from tests.running import ROOT

PAGE = (ROOT / "docs" / "capacity.md").read_text()
COMMANDS = [
    block.replace("\\\n", " ") for block in re.findall(r"^```\n(\.venv.+?)\n```", PAGE, re.MULTILINE | re.DOTALL)
]
(TRACE,) = re.findall(r"^```python\n(.+?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_there_are_commands() -> None:
    assert len(COMMANDS) == 4


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_runs(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, *flags = shlex.split(command)
    assert ".venv/bin/lockstep-bench" == program
    if "--trace" in flags:
        monkeypatch.chdir(tmp_path)
        exec(TRACE.replace("SECONDS = 1200", "SECONDS = 4"), {})
    else:
        flags[flags.index("--num-requests") + 1] = "40"
    assert 0 == main(flags)
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert 40 <= row["requests"] <= 200
    assert row["ttft_ms"]["p99"] <= 1000
    assert row["fleet"]["price_per_million_tokens"] > 0
