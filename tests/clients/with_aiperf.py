"""aiperf loads OpenAI's chats and completions as it comes, and sees streams of tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import ROOT

URL, KEY = os.environ["SERVER_URL"], os.environ["SERVER_KEY"]
DEMO = ROOT / "server" / "demo"
REQUESTS = 6


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_profile_sees_tokens(endpoint: str, tmp_path: Path) -> None:
    command = (
        *(str(Path(sys.executable).parent / "aiperf"), "profile", "--model", "demo", "--url", URL, "--api-key", KEY),
        *("--endpoint-type", endpoint, "--streaming", "--tokenizer", str(DEMO), "--concurrency", "2"),
        *("--request-count", str(REQUESTS), "--isl", "16", "--osl", "8"),
        *("--artifact-dir", str(tmp_path / "found"), "--ui", "none"),
    )
    environment = os.environ | {"HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert not done.returncode, done.stdout + done.stderr
    [path] = (tmp_path / "found").rglob("profile_export_aiperf.json")
    found = json.loads(path.read_text())
    assert found["request_count"]["avg"] == REQUESTS
    assert found["time_to_first_token"]["avg"] > 0
    assert not found.get("error_summary")
