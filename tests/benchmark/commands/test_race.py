"""The whole command, with scripts in the place of llama.cpp: its table, its file, and that it goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark.__main__ import main
from tests.benchmark.race.fakes import make_llama_cpp, make_source

NOBODY = "/nowhere/bin/python"


@pytest.fixture
def race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments of a small race, on a machine that has a vLLM which does not work."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("vllm", "python"):
        (broken / name).write_text("#!/bin/sh\necho 'ImportError: no libtorch'; exit 1\n")
        (broken / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(broken), prepend=":")
    folder = make_llama_cpp(tmp_path / "llama")
    make_source(tmp_path / "models", "bloom-560m")
    where = ["--output", str(tmp_path / "out"), "--models", str(tmp_path / "models"), "--llama-cpp", str(folder)]
    what = ["--shape", "bloom-560m=100x1,100x8", "--served", "--format", "bf16", "q4_k_m", "-d", "10"]
    return ["race", *where, "--systems", "llama.cpp", "ik_llama.cpp", "vllm", *what]


def runs(tmp_path: Path) -> list[str]:
    """What the benchmark in llama.cpp's place was asked for."""
    path = tmp_path / "llama" / "build" / "bin" / "llama-batched-bench.runs"
    return path.read_text().split() if path.exists() else []


def test_a_race_is_a_table_and_a_file_and_goes_on_where_it_was(
    race: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 0 == main(race)
    printed = capsys.readouterr().out
    assert "bloom-560m, 16 bits, 8 sequences, 100 in, 10 out" in printed
    assert 2 == printed.count("| llama.cpp q4_k_m |") and "not divisible by 256" in printed
    for line in (
        "- Kernels: ",
        "- llama.cpp: version: 1 (fake).",
        "- ik_llama.cpp: give --ik-llama-cpp DIR (source built in build/bin).",
        "- vllm does not take part: failed with 1: ImportError: no libtorch.",
        "- Ceilings of the device: ",
    ):
        assert line in printed
    records = [json.loads(line) for line in (tmp_path / "out" / "race.jsonl").read_text().splitlines()]
    assert [1, 8, 1, 8] == [record["batch_size"] for record in records]
    assert all(record["prefill_limit_ms"] > 0 for record in records[:2])
    assert json.loads(printed.splitlines()[-1])["rows"] == records
    assert (tmp_path / "out" / "result.md").read_text() in printed
    assert ["1,1", "1,8"] == runs(tmp_path)

    assert 0 == main([*race, "--shape", "bloom-560m=100x8,512x1", "--rounds", "2"])
    assert ["1,1", "1,8", "1,1", "1,8", "1,1"] == runs(tmp_path), "512 x 1, and the second round of both"
    assert "bloom-560m, 16 bits, 1 sequence, 100 in, 10 out" in capsys.readouterr().out, "what the file has is shown"


def test_what_failed_is_run_again_when_it_is_asked_for(race: list[str], tmp_path: Path) -> None:
    bench = tmp_path / "llama" / "build" / "bin" / "llama-batched-bench"
    program = bench.read_text()
    bench.write_text(program.replace("given =", "sys.exit(1); given ="))
    assert 0 == main([*race, "--format", "bf16"]) and [] == runs(tmp_path)
    bench.write_text(program)
    assert 0 == main([*race, "--format", "bf16"]) and [] == runs(tmp_path)
    assert 0 == main([*race, "--format", "bf16", "--retry"])
    assert ["1,1", "1,8"] == runs(tmp_path)
    last = json.loads((tmp_path / "out" / "result.json").read_text())["rows"]
    assert 2 == len(last) and not any("problem" in row for row in last)


def test_a_plan_runs_nothing(race: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main([*race, "--plan"])
    lines = [[part.strip() for part in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert ["bloom-560m", "bf16", "steps", "2"] in [line[:4] for line in lines]
    assert ["All", "", "", "4"] in [line[:4] for line in lines]
    assert [] == runs(tmp_path) and not list((tmp_path / "out").iterdir())


def test_what_was_measured_otherwise_is_run_again(
    race: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 0 == main([*race, "--format", "bf16"])
    capsys.readouterr()
    assert 0 == main([*race, "--format", "bf16", "--shape", "bloom-560m=100x8", "-r", "2"])
    assert ["1,1", "1,8", "1,8,8"] == runs(tmp_path)
    found = capsys.readouterr()
    assert "2 cells in race.jsonl are of another processor, version, commit or --runs: " in found.err
    assert [8] == [row["batch_size"] for row in json.loads(found.out.splitlines()[-1])["rows"]]


def test_the_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["race", "--help"])
    assert "--shape tinyllama-1.1b=100x1 --format int4" in " ".join(capsys.readouterr().out.split())


def test_models_can_be_made_first(race: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main([*race, "--only-models"])
    made = {path.name for path in (tmp_path / "models" / "bloom-560m" / "llama.cpp").iterdir()}
    assert {"BF16.gguf"} == made and [] == runs(tmp_path)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("llama.cpp, bloom-560m q4_k_m: no model: failed with 1: ") and "not divisible by 256" in line


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--shape", "gpt-17=100x1"], 1, "error: no shape is called gpt-17"),
        (
            ["--shape", "bloom-560m=100"],
            2,
            "error: argument --shape: 100 is no size: write prompt tokens and sequences",
        ),
        (["--format", "int3"], 2, "error: argument --format: invalid choice"),
        (["--systems", "gpt"], 2, "error: argument --systems: invalid choice"),
        (["--systems", "vllm"], 1, "error: nobody takes part: "),
        (["--vllm", NOBODY], 1, f"error: vllm at {NOBODY} cannot be used: not started: {NOBODY}: No such file"),
        (["--llama-cpp", "/nowhere"], 1, "error: llama.cpp at /nowhere cannot be used: /nowhere has no llama-batched"),
        (["--limit", "0"], 2, "error: argument --limit: 0 is not at least 1"),
        (
            ["--cpu-kernels", "mmx"],
            1,
            "error: --cpu-kernels is mmx: give one of auto, avx512, avx2, dotprod, neon, none",
        ),
        (["--shape", "--served"], 1, "error: there is nothing to run: give --shape or --served"),
        (["--shape", "bloom-560m=100x1", "--format", "f16", "--systems", "lockstep"], 1, "error: nobody has"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_sentence(
    race: list[str], arguments: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found = main([*race, *arguments])
    except SystemExit as end:
        found = int(end.code or 0)
    assert code == found
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(sentence)
