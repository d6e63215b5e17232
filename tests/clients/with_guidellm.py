"""guidellm searches the rates that the server can have: a sweep over OpenAI's chats and completions."""

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


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_a_sweep_finds_rates(route: str, tmp_path: Path) -> None:
    backend = f"kind=openai_http,target={URL},request_format={route},model=demo,api_key={KEY}"
    command = (
        *(str(Path(sys.executable).parent / "guidellm"), "run", "--backend", backend),
        *("--profile", "kind=sweep,sweep_size=3", "--constraint", "kind=max_requests,count=6"),
        *("--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"),
        *("--tokenizer", f"kind=huggingface_auto,model={DEMO}"),
        *("--output", f"kind=json,path={tmp_path / 'found.json'}", "--disable-console"),
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert not done.returncode, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["benchmarks"]
    assert len(found) >= 3
    for one in found:
        totals = one["metrics"]["request_totals"]
        assert totals["successful"] and not totals["errored"]
