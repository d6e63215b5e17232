"""The command `lockstep merge`: a sentence for a wrong option, and a folder of the merged model that is served."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from launch.commands import merge
from launch.config import DEMO
from launch.errors import Refusal
from server.checkpoint.hub import ResolvedModel
from server.merge.job import Job
from tests.running import ROOT
from tests.server.adapters import made

MODEL = ResolvedModel(DEMO, DEMO, DEMO, None)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launcher.py"), "merge", *arguments]
    given = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=120)


@pytest.mark.rest
def test_the_embedded_model_is_merged_with_an_adapter(tmp_path: Path) -> None:
    """Three processes deep, as people call it."""
    made.make(DEMO, tmp_path / "adapter", tmp_path / "expected")
    (tmp_path / "adapter" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "adapter" / "README.md").write_text("An adapter.")
    job = run(str(DEMO), str(tmp_path / "adapter"), "--output", str(tmp_path / "made"))
    assert 0 == job.returncode, job.stderr
    assert job.stdout.startswith(f"{tmp_path / 'made'}: the model with the adapter merged into it, ")
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "made" / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected.pop(name).to(tensor.dtype), atol=1e-6, rtol=1e-2)
    names = {path.name for path in (tmp_path / "made").iterdir()}
    assert {"config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"} <= names
    assert not {"README.md", "adapter_config.json"} & names


def test_what_cannot_be_merged_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    job = run(str(DEMO), str(tmp_path / "adapter"), "--output", str(tmp_path / "made"))
    assert 1 == job.returncode and "Traceback" not in job.stderr
    assert "adapter_config.json" in job.stderr.strip().splitlines()[-1]
    assert ["adapter"] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([str(DEMO), "x"], "the following arguments are required: --output"),
        ([str(DEMO), "--output", "made"], "the following arguments are required: ADAPTER"),
        ([str(DEMO), "x", "--output", str(DEMO)], f"--output {DEMO} is there already and not empty"),
        ([str(DEMO), "x", "--output", "made", "--ouput", "y"], "--ouput is not an option: did you mean --output?"),
        (["null", "x", "--output", "made"], "the model is null, which has no weights"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], expected: str) -> None:
    with pytest.raises(Refusal) as refusal:
        merge.read_command(arguments, {})
    assert any(problem.startswith(expected) for problem in refusal.value.problems) and 2 == refusal.value.code


def test_an_adapters_tokenizer_is_taken_before_the_models(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("tokenizer.json", "adapter_config.json", "generation_config.json"):
        (adapter / name).write_text("{}")
    command = merge.read_command([str(DEMO), str(adapter), "--output", str(tmp_path / "made")], {})
    job = command.job(MODEL, adapter)
    files = {Path(path).name: Path(path).parent for path in job.files}
    assert adapter == files["tokenizer.json"]
    assert DEMO == files["tokenizer_config.json"] == files["generation_config.json"]
    assert job == Job.from_json(job.to_json())
