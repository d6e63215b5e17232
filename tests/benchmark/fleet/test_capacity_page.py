"""What docs/simulating.md says of capacity: its commands run, here with fewer requests, the first with its figures."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest

from benchmark.__main__ import main
from tests.pages import section

PAGE = section("simulating.md", "How many GPUs")
COMMANDS = [
    block.replace("\\\n", " ") for block in re.findall(r"^```\n(\.venv.+?)\n```", PAGE, re.MULTILINE | re.DOTALL)
]


def row_of(flags: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What a command prints of its only load."""
    assert 0 == main(flags)
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert isinstance(row, dict)
    return row


def test_there_are_commands() -> None:
    assert len(COMMANDS) == 3


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_runs(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *flags = shlex.split(command)
    assert ".venv/bin/lockstep-bench" == program
    flags[flags.index("--fewest-replicas")] = "--replicas"
    flags += ["--num-requests", "40"]
    row = row_of(flags, capsys)
    assert 40 <= row["requests"] <= 600
    assert row["ttft_ms"]["p99"] <= 1000
    assert row["fleet"]["price_per_million_tokens"] > 0


def test_the_first_command_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    row = row_of(shlex.split(COMMANDS[0])[1:], capsys)
    ttft, price = row["ttft_ms"], row["fleet"]["price_per_million_tokens"]
    assert row["settings"]["replicas"] == 1
    assert f"One replica keeps a TTFT p50 of {ttft['p50']:.1f} ms and a p99 of {ttft['p99']:.1f} ms" in PAGE
    assert f"a million tokens cost {price:.4f}" in PAGE
