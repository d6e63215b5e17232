"""`--cpu-kernels` of the commands that run shards, and a measurement in bfloat16 with AVX2 alone."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmark.__main__ import main
from benchmark.commands import gpu
from benchmark.cost.devices import Machine
from benchmark.cost.roofline import Ceilings
from benchmark.seeds import documents, measurements
from tests.benchmark.commands.test_reproduce import scale
from tests.running import ROOT

REFUSED = "--cpu-kernels is sse: give one of auto, avx512, avx2, dotprod, neon, none"
NONE = ["--cpu-kernels", "none"]


@pytest.mark.parametrize(
    "command",
    [["latency", "-b", "1"], ["serving", "--num-requests", "1"], ["offline", "--num-prompts", "1"]],
    ids=lambda command: command[0],
)
def test_what_servers_are_told_is_theirs_to_refuse(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert 1 == main([*command, "--cpu-kernels", "sse"])
    assert REFUSED in capfd.readouterr().err


def test_a_running_server_has_its_own_kernels(capfd: pytest.CaptureFixture[str]) -> None:
    assert 1 == main(["serving", "--url", "http://127.0.0.1:9", *NONE])
    assert "--url measures a server that runs already: leave out --cpu-kernels" in capfd.readouterr().err


def test_commands_of_commands_hand_it_on(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    gpu.add_arguments(parser)
    args = parser.parse_args(NONE)
    measured = {
        step.arguments[0]: list(step.arguments)
        for step in gpu.steps(args, gpu.Report(args, "cpu", Ceilings(1e9, 1e12)))
    }
    assert {"latency", "serving", "offline"} == {name for name, words in measured.items() if "--cpu-kernels" in words}
    seed = documents.find("flexgen-opt")
    job = measurements.Job(seed, scale("flexgen-opt"), Machine("cpu", 1, 1e12, 1), "bfloat16", [1], tmp_path / "x.json")
    assert "--cpu-kernels" not in job.flags
    assert NONE == replace(job, cpu_kernels="none").flags[-2:]


@pytest.mark.rest
def test_bfloat16_is_measured_with_avx2_alone(tmp_path: Path) -> None:
    """The whole command, as on a processor for which oneDNN has no bfloat16 and there is no compiler."""
    sizes = ["-b", "1", "-s", "8", "-d", "3", "-r", "1", "-w", "0"]
    command = ["latency", "--dtype", "bfloat16", "--device", "cpu", *NONE, *sizes, "--output", str(tmp_path)]
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    subprocess.run([sys.executable, "-m", "benchmark", *command], cwd=ROOT, env=environment, check=True)
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert {"prefill", "decode_token", "decode_total"} == {row["step"] for row in rows}
    assert all(row["floor_ms"] > 0 for row in rows)
