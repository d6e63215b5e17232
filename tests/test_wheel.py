"""What `pip install` gives to someone without a checkout: a fresh environment, used from another folder.

The wheel is one of Python alone, as without a compiler; one with compiled kernels takes a minute, and is in the rest.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import httpx2
import pytest

from tests.running import ROOT, SETTINGS_PREFIXES, Server, body

PACKAGES = ("host", "launch", "router", "server", "benchmark")
COMMAND_SECONDS = 500  # a liveness bound: the slowest command compiles for a minute


def run(command: Sequence[str | Path], folder: Path, **variables: str) -> str:
    """Standard output of a command that must succeed, run without this checkout on its path."""
    settings = (*SETTINGS_PREFIXES, "PYTHONPATH")
    env = {name: value for name, value in os.environ.items() if not name.startswith(settings)} | variables
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    assert 0 == result.returncode, result.stdout + result.stderr
    return result.stdout


def build_wheel(folder: Path, **variables: str) -> Path:
    """The wheel of this checkout."""
    quiet = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    run([sys.executable, "-m", "pip", "wheel", *quiet, "--wheel-dir", folder, ROOT], folder, **variables)
    [built] = folder.glob("*.whl")
    return built


def install(wheel: Path, folder: Path) -> Path:
    """`bin` of an environment with the wheel installed.

    Its dependencies are those of the environment that runs the tests. A .pth file adds their folder, whose own .pth
    files are then not read: the editable install of this checkout is not on its path.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    quiet = ("--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
    run([sys.executable, "-m", "pip", "--python", python, "install", *quiet, wheel], folder)
    [packages] = folder.glob("lib/python*/site-packages")
    dependencies = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "dependencies.pth").write_text("\n".join(dependencies))
    where = run([python, "-c", "import launcher, router, server; print(launcher.__file__)"], folder)
    assert str(packages / "launcher.py") == where.strip()
    return python.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"), PATH="")


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("environment"))


def test_it_holds_what_serves_and_nothing_else(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    paths = [ROOT / "launcher.py", *(path for package in PACKAGES for path in (ROOT / package).rglob("*"))]
    expected = {str(path.relative_to(ROOT)) for path in paths if path.is_file() and path.suffix != ".pyc"}
    expected |= {f"lockstep_ray/{path.name}" for path in (ROOT / "deploy/ray/lockstep_ray").glob("*.py")}
    assert expected == {name for name in names if ".dist-info/" not in name}
    assert {"launcher.py", "server/demo/model.safetensors", "server/demo/tokenizer.json"} <= names
    assert {
        "router/apis/playground/page.html",
        "router/apis/playground/app.js",
        "router/apis/playground/app.css",
    } <= names
    assert {"server/pb/generate_pb2.py", "benchmark/cost/shapes/bloom-560m.json"} <= names
    assert any(name.endswith(".cpp") for name in names) and any(name.endswith(".css") for name in names)


def test_lockstep_serves_from_another_folder_and_ends_on_sigterm(commands: Path, tmp_path: Path) -> None:
    with Server(env={"PYTHONPATH": ""}, command=[str(commands / "lockstep")], folder=tmp_path) as server:
        answer = httpx2.post(f"{server.url}/generate", json=body("Once upon a time", max_new_tokens=4), timeout=120)
        server.stop()
        code, _ = server.wait()
    assert answer.json()["generated_text"].startswith(",")
    assert 0 == code
    assert [] == list(tmp_path.iterdir())


def test_lockstep_bench_finds_its_files_from_another_folder(commands: Path, tmp_path: Path) -> None:
    planned = run([commands / "lockstep-bench", "plan", "--model-id", "bloom-560m", "--device", "h200"], tmp_path)
    assert "bloom-560m" in planned
    assert [] == list(tmp_path.iterdir())


@pytest.mark.rest
@pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ to compile with")
def test_with_compiled_kernels_it_serves_without_a_compiler_as_a_native_build_does(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("wheel", "environment", "home", "compiler")]
    for folder in folders:
        folder.mkdir()
    hasty = folders[3] / "g++"  # It optimises nothing, which for all kinds of CPU would take minutes.
    hasty.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" -O0\n')
    hasty.chmod(0o755)
    built = build_wheel(folders[0], PATH=f"{folders[3]}:{os.environ['PATH']}")
    auditwheel = Path(sys.executable).with_name("auditwheel")
    tag = built.stem.split("-none-")[1]
    assert f'"{tag}"' in run([auditwheel, "show", built], tmp_path).partition("The wheel references")[0]
    assert tag.endswith(platform.machine())
    alone = {"PATH": "", "HOME": str(folders[2]), "PYTHONPATH": ""}
    told = body("Once upon a time", max_new_tokens=24)
    answers = []
    for bin_folder, env in ((install(built, folders[1]), alone), (Path(sys.executable).parent, {})):
        with Server(env=env, command=[str(bin_folder / "lockstep")], folder=tmp_path) as server:
            answers.append(httpx2.post(f"{server.url}/generate", json=told, timeout=120).json()["generated_text"])
        assert any("compiled kernels (" in line for line in server.lines)
    assert not list(folders[2].rglob("*.so"))
    assert answers[0] == answers[1]
