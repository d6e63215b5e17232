"""What counting tokens costs the client: streams of ready-made frames, from a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmark.__main__ import main
from tests.running import ROOT


@pytest.fixture
def frames() -> Iterator[str]:
    command = [sys.executable, "-m", "tests.benchmark.frames_server"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@pytest.mark.alone
@pytest.mark.parametrize("api", ["tgi", "openai", "chat"])
def test_one_process_counts_more_than_50_000_tokens_a_second(
    api: str, frames: str, capsys: pytest.CaptureFixture[str]
) -> None:
    work = ("--input-length", "4", "--output-length", "300", "--concurrency", "256", "--num-requests", "256")
    code = main(["serving", "--url", frames, "--api", api, *work])
    [row] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert (0, 0, 256 * 300, 0) == (code, row["errors"], row["output_tokens"], row["other_input_length"])
    assert row["output_tokens_per_second"] >= 50_000
