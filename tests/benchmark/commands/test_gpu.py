"""`gpu`: targets and verdicts in one file, whatever fails, and commands that can be run."""

from __future__ import annotations

import argparse
import importlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmark import launch
from benchmark.__main__ import main
from benchmark.commands import gpu
from benchmark.commands.gpu import Report
from benchmark.cost import shapes
from benchmark.cost.devices import DEVICES, Machine
from benchmark.cost.roofline import Piece, ServedModel, ceiling_of

H200 = DEVICES["h200"].dense_ceilings("bfloat16", 1)
# What each command finds of a model that is as fast as it should be.
STARTUP = {"startup": {"table": "weights  14.14 GB per shard", "ready_s": 21.5}}
DECODE = {"step": "decode_token", "batch_size": 1, "p50_ms": 3.8, "computed_p50_ms": 3.7}
FOUND: dict[str, dict[str, Any]] = {
    "latency": STARTUP | {"rows": [{"step": "prefill", "batch_size": 32, "p50_ms": 60.0}, DECODE]},
    "serving": STARTUP | {"rows": [{"output_tokens_per_second": 14100.0, "errors": 0, "requests": 1024}]},
    "offline": STARTUP | {"rows": [{"step": "total", "tokens_per_second": 7000.0}]},
}


def report_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: dict[str, dict[str, Any]]
) -> tuple[int, dict[str, list[str]], str]:
    """Exit code, verdicts by row and the file, where each command finds what is given, and others fail."""

    def run_command(arguments: Sequence[str], limit_s: float) -> str | None:
        if (result := found.get(arguments[0])) is None:
            return "the server did not start: no memory"
        folder = Path(arguments[-1])
        (folder / "result.json").write_text(json.dumps(result))
        (folder / "result.md").write_text(f"tables of {arguments[0]}")
        return result.get("failure")

    monkeypatch.setattr(gpu, "run_command", run_command)
    monkeypatch.setattr(gpu, "machine_at_hand", lambda kind: Machine("NVIDIA H200", 1, 140e9, 16))
    path = tmp_path / "report.md"
    code = main(["gpu", "--output", str(path)])
    text = path.read_text()
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    return code, {cells[0]: cells[1:] for cells in lines[1:]}, text


def test_every_target_has_a_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, rows, text = report_of(monkeypatch, tmp_path, FOUND)
    assert 0 == code
    # 14.14 GB and 150 x 0.49 MB at 4.8 TB/s are 2.96 ms; 38.8 TFLOP at 989 a second 39.2.
    decode = ["76 % of limit (data sheet), 3.90 ms", "77.9 %, 3.80 ms", "met"]
    assert decode == rows["bloomz-7b1-mt: decode step, batch 1"]
    prefill = ["63 % of limit (data sheet), 62.29 ms", "65.4 %, 60.00 ms", "met"]
    assert prefill == rows["bloomz-7b1-mt: prefill, 32 x 100"]
    assert ["1.027 times 3.70 ms", "met"] == rows["bloomz-7b1-mt: the same, from reply to reply"][1:]
    assert "met" == rows["mistral-7b: 256 concurrent, 128 in, 128 out"][-1]
    assert "missed" == rows["chatglm3-6b: 256 concurrent, 128 in, 128 out"][-1]
    assert ["at most 60 s", "21.5 s", "met"] == rows["opt-1.3b: launch to ready"]
    assert "met" == rows["opt-1.3b: 256 sequences offline, 512 in, 32 out"][-1]
    assert text.startswith("# NVIDIA H200\n")
    assert 4 == text.count(STARTUP["startup"]["table"])
    assert all(f"tables of {command}" in text for command in FOUND)


def test_a_command_that_fails_is_a_row_and_the_others_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    incomplete = FOUND["latency"] | {"rows": [DECODE], "failure": "the server ended: out of memory"}
    found = {name: FOUND[name] for name in ("offline",)} | {"latency": incomplete}
    code, rows, _ = report_of(monkeypatch, tmp_path, found)
    assert 1 == code
    assert ["", "the server ended: out of memory", "failed"] == rows["bloomz-7b1-mt"]
    assert "met" == rows["bloomz-7b1-mt: decode step, batch 1"][-1]
    assert ["", "the server did not start: no memory", "failed"] == rows["mistral-7b"] == rows["chatglm3-6b"]
    assert "met" == rows["opt-1.3b: 256 sequences offline, 512 in, 32 out"][-1]


def test_ceilings_are_those_worked_out_by_hand() -> None:
    """Parameters in billions, GB over 4.8 TB/s, TFLOP over 989 a second: those of all steps together."""
    opt, mistral = (ServedModel(shapes.shape(name), "bfloat16") for name in ("opt-1.3b", "mistral-7b"))
    moved = 32 * 2 * (1.2086 + 0.103) + (256 * 512 + 31 * 256 * (512 + 16)) * 196_608 / 1e9
    prefill = 2 * 1.2086 * 256 * 512 + 2 * 24 * 2048 * 256 * 512**2 / 1e9
    decodes = 31 * 256 * (2 * 1.2086 + 4 * 24 * 2048 * (512 + 16) / 1e9)
    operations = (prefill + decodes + 32 * 256 * 2 * 0.103) / 1000
    assert moved / 4800 < operations / 989  # the prompts' products hide what decoding reads
    assert 256 * 32 / (operations / 989) == pytest.approx(ceiling_of(opt, 256, 512, 32, H200), rel=0.005)
    tokens = 256 * 128 + 127 * 256
    attention = (2 * 32 * 4096 * 256 * 128**2 + 4 * 32 * 4096 * 127 * 256 * (128 + 64)) / 1e12
    operations = (2 * 6.979 * tokens + 2 * 0.131 * 256 * 128) / 1000 + attention
    assert 256 * 128 / (operations / 989) == pytest.approx(ceiling_of(mistral, 256, 128, 128, H200), rel=0.005)


@pytest.mark.parametrize(
    ("shape", "device", "sequences", "lengths", "rate"),
    [
        ("chatglm3-6b", "a100-40g", 8, (2048, 128), 1000),
        ("bloomz-7b1-mt", "h200", 32, (512, 128), 6624),
        ("opt-1.3b", "h200", 256, (512, 32), 23_476),
        ("mistral-7b", "h200", 256, (128, 128), 35_065),
    ],
)
def test_no_steps_of_prompts_and_decodes_beat_a_ceiling(
    shape: str, device: str, sequences: int, lengths: tuple[int, int], rate: int
) -> None:
    """Level steps, into which sequences enter evenly: a step has one of every age, some in their prompt."""
    served, ceilings = ServedModel(shapes.shape(shape), "bfloat16"), DEVICES[device].dense_ceilings("bfloat16", 1)
    given, generated = lengths
    of_each_age = sequences / generated
    ages = [Piece(given + age - 1, 1, of_each_age) for age in range(1, generated)]
    level = served.step([Piece(0, given, of_each_age), *ages], sampled=sequences)
    ceiling = ceiling_of(served, sequences, given, generated, ceilings)
    assert rate == pytest.approx(ceiling, abs=0.5)
    assert 1000 * sequences / level.floor_ms(ceilings) <= ceiling * 1.005


def test_what_is_promised_of_one_gpu_in_tokens_and_milliseconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A decode of BLOOMZ-7B at batch 1 and 32, and its prefill; then rates, which a higher ceiling did not change."""
    decodes = [DECODE, DECODE | {"batch_size": 32}]
    latency = FOUND["latency"] | {"rows": [*FOUND["latency"]["rows"][:1], *decodes]}
    _, rows, _ = report_of(monkeypatch, tmp_path, FOUND | {"latency": latency})
    bloomz, offline = "bloomz-7b1-mt: {}", "opt-1.3b: 256 sequences offline, 512 in, 32 out"
    served = [f"{model}: 256 concurrent, 128 in, 128 out" for model in ("mistral-7b", "chatglm3-6b")]
    names = [*map(bloomz.format, ("decode step, batch 1", "decode step, batch 32", "prefill, 32 x 100"))]
    targets = [rows[name][0].rpartition(", ")[2] for name in names]
    assert ["3.9 ms", "4.6 ms", "62 ms"] == [f"{float(target.split()[0]):.2g} ms" for target in targets]
    rates = [int(re.sub(r".* limit \(data sheet\), | tokens/s|,", "", rows[name][0])) for name in [*served, offline]]
    assert [14_026, 16_903, 6_808] == rates
    page = (gpu.RESULTS / "gpu-not-measured-yet.md").read_text()
    assert [] == [line for line in (
        "at most 3.9 and 4.6 ms |",
        "at most 62 ms |",
        f"at most {gpu.MOST_STEP_RATIO:g} × what the device computes |",
        f"at least 14,026 and 16,903 tokens/s, {gpu.SERVING_PERCENT:g} % of the limit |",
        f"at least 6,808 tokens/s, {gpu.OFFLINE_PERCENT:g} % of the limit |",
        f"at most {gpu.MOST_READY_SECONDS:g} s |",
    ) if line not in page]  # fmt: skip


def test_a_report_is_named_after_its_device() -> None:
    args = argparse.Namespace(dtype="bfloat16", output=None)
    assert "nvidia-l40s.md" == Report(args, "NVIDIA L40S", H200).path.name[-14:]


def test_a_machine_without_a_gpu_is_measured_only_if_its_cpu_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "machine_at_hand", lambda kind: Machine("cpu", 1, 64e9, 2))
    assert 1 == main(["gpu", "--output", str(tmp_path / "report.md")])
    assert "this machine shows no GPU: give --device cpu" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_command_past_its_limit_is_ended() -> None:
    assert "it took longer than 0.01 s: raise --limit" == gpu.run_command(["latency", "--device", "cpu"], 0.01)


def test_every_command_is_understood() -> None:
    parser = argparse.ArgumentParser()
    gpu.add_arguments(parser)
    args = parser.parse_args(["--device", "cpu", "--serving-shape", str(launch.DEMO)])
    for step in gpu.steps(args, Report(args, "cpu", H200)):
        name, *arguments = step.arguments
        command = importlib.import_module(f"benchmark.commands.{name}")
        own = argparse.ArgumentParser()
        command.add_arguments(own)
        own.parse_args(arguments)
