"""The first minutes on a GPU, with stand-ins for parts: whatever one does, the others run and the summary is true."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmark.__main__ import main
from benchmark.commands import gpu_first
from benchmark.commands.gpu_first import FirstMinutes, Part, python, runs
from benchmark.result import BenchError
from tests.running import ROOT


def code(program: str) -> tuple[str, ...]:
    return python("-c", program)


SAYS = "print('42 GB/s')"
HANGS = ("sh", "-c", "trap '' TERM; echo begun $$; exec sleep 600")  # which begins sooner than Python does
STARTS = f"""
import subprocess
child = subprocess.Popen({HANGS!r}, stdout=subprocess.PIPE, text=True)
print(child.stdout.readline())
"""
CRASHES = "import os; print('before', flush=True); os.kill(os.getpid(), 11)"
LOST = "print('the device is lost after a test'); raise SystemExit(70)"


def outcomes(parts: list[Part], folder: Path, seconds: float = 60.0) -> dict[str, tuple[str, str]]:
    first = FirstMinutes(parts, folder, {"PYTHONUNBUFFERED": "1"})
    first.go(seconds)
    assert first.summary() + "\n" == (folder / "summary.md").read_text()
    return {outcome.part.name: (outcome.word, outcome.last_line) for outcome in first.outcomes}


def pid_in(folder: Path) -> int:
    """Of the part that hangs, as it says."""
    return int(re.findall(r"^begun (\d+)$", (folder / "log.txt").read_text(), re.MULTILINE)[0])


def ends(pid: int) -> bool:
    """Whether a process ends that was killed: on a busy machine a moment later."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_first, "GRACE_S", 0.2)
    monkeypatch.setattr(gpu_first, "LEAST_S", 0.1)


def test_whatever_a_part_does_the_others_run(tmp_path: Path, impatient: None) -> None:
    found = outcomes(
        [
            Part("says", 60, code(SAYS)),
            Part("hangs", 1, HANGS),
            Part("crashes", 60, code(CRASHES)),
            Part("loses", 60, code(LOST)),
            Part("is not there", 60, ("no-such-program",)),
            Part("instead", 60, code(SAYS), if_failed="loses", environment={"CUDA_GRAPHS": "0"}),
            Part("needless", 60, code(SAYS), if_failed="says"),
            Part("last", 60, code(SAYS)),
        ],
        tmp_path,
    )
    assert {
        "says": ("done", "42 GB/s"),
        "hangs": ("cut after 1 s", f"begun {pid_in(tmp_path)}"),
        "crashes": ("crashed by SIGSEGV", "before"),
        "loses": ("failed with 70", "the device is lost after a test"),
        "is not there": ("not started: no-such-program: No such file or directory", ""),
        "instead": ("done", "42 GB/s"),
        "needless": ("not needed", ""),
        "last": ("done", "42 GB/s"),
    } == found
    assert 3 == (tmp_path / "log.txt").read_text().splitlines().count("42 GB/s")
    assert ends(pid_in(tmp_path))


def test_what_the_time_does_not_reach_is_said(tmp_path: Path, impatient: None) -> None:
    parts = [Part("hangs", 60, HANGS), Part("waits", 60, code(SAYS)), Part("instead", 60, code(SAYS), "hangs")]
    found = outcomes(parts, tmp_path, seconds=1.5)
    assert found["hangs"][0] == "cut after 1 s" and found["waits"][0] == found["instead"][0] == "not reached"


def test_a_part_leaves_no_process(tmp_path: Path, impatient: None) -> None:
    assert outcomes([Part("starts", 60, code(STARTS))], tmp_path)["starts"][0] == "done"
    assert ends(pid_in(tmp_path))


WHOLE = """
import sys
from pathlib import Path
from benchmark.commands import gpu_first
from benchmark.__main__ import main
from tests.benchmark.commands.test_gpu_first import HANGS, SAYS, code
from benchmark.commands.gpu_first import Part
parts = [Part("says", 60, code(SAYS)), Part("hangs", 600, HANGS), Part("behind", 60, code(SAYS))]
gpu_first.runs = lambda output, site: {"right": parts}
gpu_first.check_gpu = lambda run: None
sys.exit(main(["gpu-first", "--output", sys.argv[1]]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_has_said_what_it_found(tmp_path: Path, number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WHOLE, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    log = tmp_path / "log.txt"
    until = time.monotonic() + 60
    while time.monotonic() < until and not (log.exists() and re.search(r"^begun \d+$", log.read_text(), re.MULTILINE)):
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=60)
    summary = (tmp_path / "summary.md").read_text()
    assert "42 GB/s" in summary and "not reached" in summary and "was running" in summary
    assert ends(pid_in(tmp_path))


def test_without_a_gpu_nothing_but_the_rehearsal_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests would be skipped there, which pytest calls a success."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert 1 == main(["gpu-first", "--run", "fast", "--output", str(tmp_path / "out")])
    assert "--run is fast, and this machine has no nvidia-smi: --run rehearsal needs no GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_parts_of_a_run_fit_into_ten_minutes_most_telling_first() -> None:
    for name, parts in runs(Path("out"), Path("site")).items():
        usual = [part for part in parts if not part.if_failed and "install" not in part.name]
        assert name == "rehearsal" or sum(part.seconds for part in usual) <= 700
        assert all(part.if_failed in {other.name for other in parts} for part in parts if part.if_failed)
    assert ["environment", "a captured decode"] == [
        part.name for part in runs(Path(), Path())["right"] if "install" not in part.name
    ][:2]


@pytest.mark.parametrize("run", ["right", "fast", "next"])
def test_every_command_of_a_part_is_understood(run: str, tmp_path: Path) -> None:
    from benchmark.__main__ import COMMANDS, _parser

    for part in runs(tmp_path, tmp_path)[run]:
        if "benchmark" in part.command:
            arguments = list(part.command[part.command.index("benchmark") + 1 :])
            command = __import__(f"benchmark.commands.{arguments[0]}", fromlist=["run"])
            assert arguments[0] in COMMANDS
            _parser(arguments[0], command).parse_args(arguments)
        for argument in part.command:
            if argument.startswith("tests/"):
                assert (ROOT / argument.partition("::")[0]).exists()


def test_what_is_packed_needs_nothing_that_is_not_there() -> None:
    """In a machine that has torch, Triton and transformers: `pip install --no-deps` would not say what is missing."""
    packed = re.findall(r"^PACKED = ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0]
    names = {canonicalize_name(name) for name in packed.replace("\\", " ").split()}
    found = {"pip", "pygments", *names}
    waiting = ["torch", "transformers"]  # what these need is there; Triton is a need of torch
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in found:
            found.add(name)
            waiting += needs_of(name)
    assert names >= {"fastapi", "uvicorn"}
    assert {name: missing for name in names if (missing := set(needs_of(name)) - found)} == {}


def needs_of(name: str) -> list[str]:
    """The packages that one needs here, without those of its extras."""
    try:
        listed = [Requirement(line) for line in importlib.metadata.requires(name) or ()]
    except importlib.metadata.PackageNotFoundError:
        return []
    return [canonicalize_name(one.name) for one in listed if one.marker is None or one.marker.evaluate({"extra": ""})]


def test_without_wheels_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_first, "WHEELS", tmp_path)
    monkeypatch.setattr(gpu_first.shutil, "which", lambda name: name)
    gpu_first.check_gpu("fast")
    monkeypatch.setattr(gpu_first.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BenchError, match=r"there is no fastapi, and .* has no wheels: carry what `make gpu-first`"):
        gpu_first.check_gpu("fast")
    (tmp_path / "a.whl").touch()
    gpu_first.check_gpu("fast")


def test_a_part_that_was_cut_short_is_not_looked_into(tmp_path: Path, impatient: None) -> None:
    parts = [
        Part("slow", 1, code("import time; time.sleep(60)")),
        Part("look", 60, code(SAYS), if_failed="slow", if_cut=False),
        Part("other way", 60, code(SAYS), if_failed="slow"),
    ]
    found = outcomes(parts, tmp_path)
    assert ("not needed", "done") == (found["look"][0], found["other way"][0])


def test_more_than_what_may_travel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_first, "WHEELS", tmp_path)
    assert "wheels 0.0 MiB of 20" in gpu_first.travels()
    with (tmp_path / "large.whl").open("wb") as file:
        file.truncate(21 * 2**20)
    with pytest.raises(BenchError, match=r"too much travels: wheels 21\.0 MiB of 20"):
        gpu_first.travels()


def test_wheels_are_rehearsed_by_the_python_that_they_are_for() -> None:
    ours = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert gpu_first.are_for_this_python([f"/a/orjson-3-{ours}-{ours}-linux.whl", "/a/anyio-4-py3-none-any.whl"])
    assert not gpu_first.are_for_this_python(["/a/orjson-3-cp27-cp27-linux.whl", "/a/anyio-4-py3-none-any.whl"])


@pytest.mark.rest
def test_the_rehearsal_collects_and_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = runs(tmp_path, tmp_path)["rehearsal"]
    collects, compiles = [part for part in planned if "install" not in part.name]
    assert "--collect-only" in collects.command and compiles.command[-1] == "9.0"
    others = {name: parts for name, parts in runs(tmp_path, tmp_path).items() if name != "rehearsal"}
    unhurried = dataclasses.replace(collects, seconds=600)
    monkeypatch.setattr(gpu_first, "runs", lambda output, site: {**others, "rehearsal": [unhurried]})
    assert 0 == main(["gpu-first", "--run", "rehearsal", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "ranks that share the GPU" in printed and "What travels: " in printed
    assert re.search(r"done +\| \d+ +\| =+ [1-9]\d\d+/\d+ tests collected", (tmp_path / "summary.md").read_text())
