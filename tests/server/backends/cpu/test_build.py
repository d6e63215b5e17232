"""Compiling the kernels on the machine that serves, and the ways in which there may be none."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from host.cpu_kinds import AUTO, NONE
from server import backends
from server.backends import cpu
from server.backends.cpu import COMPILERS, Kernels
from server.backends.cpu.build import BuildError, compiled_library
from server.backends.cpu.device import CpuDevice
from server.backends.cpu.kernels import Library
from server.backends.cpu.layers import onednn_packs
from tests.cpu_kernels import asked


def fake_compiler(directory: Path, action: str) -> str:
    """A program that notes its first argument in `calls` and then does `action`; it knows its version."""
    script = directory / "fake-compiler"
    script.write_text(f'#!/bin/sh\necho "$1" >> "{directory}/calls"\n[ "$1" = --version ] && exit 0\n{action}\n')
    script.chmod(0o755)
    return str(script)


def copying_compiler(directory: Path) -> str:
    """Its output, the argument after -o, is the library that the real compiler made."""
    return fake_compiler(directory, f'while [ "$1" != -o ]; do shift; done\nsleep 0.05\ncp "{compiled_library()}" "$2"')


def compile_into(library: Path, source: Path) -> None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True, timeout=60)


def test_a_machine_without_a_compiler_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"^no C\+\+ compiler was found \(no-such-compiler\): install g\+\+$"):
        compiled_library(tmp_path, ["no-such-compiler"])
    backend = cpu.choose(torch.float32, ["no-such-compiler"])
    assert "reference" == backend.name
    assert "no C++ compiler was found (no-such-compiler): install g++" in backend.description
    packed = cpu.choose(torch.bfloat16, ["no-such-compiler"])
    assert ("onednn" if onednn_packs(torch.bfloat16) else "reference") == packed.name


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="error: no such instruction"):
        compiled_library(tmp_path, [fake_compiler(tmp_path, "echo 'error: no such instruction' >&2; exit 1")])


def test_a_library_that_cannot_be_loaded_is_no_library(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, 'while [ "$1" != -o ]; do shift; done\necho text > "$2"')
    with pytest.raises(BuildError, match="cannot be loaded"):
        Library(compiled_library(tmp_path, [compiler]))


def test_a_compiler_may_say_anything(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="error: \ufffd"):
        compiled_library(tmp_path, [fake_compiler(tmp_path, r"printf 'error: \351' >&2; exit 1")])
    with pytest.raises(BuildError, match="without a library: is it a"):
        compiled_library(tmp_path, [fake_compiler(tmp_path, "exit 0")])
    (tmp_path / "text").write_text("no program")
    (tmp_path / "text").chmod(0o755)
    with pytest.raises(BuildError, match="cannot be run"):
        compiled_library(tmp_path, [str(tmp_path / "text")])


@pytest.mark.parametrize("cut", [lambda whole: whole[: len(whole) // 2], lambda _: b"", lambda whole: whole + b"more"])
def test_a_library_that_is_not_whole_is_compiled_again(
    tmp_path: Path, kernels: Kernels, cut: Callable[[bytes], bytes]
) -> None:
    compiler = copying_compiler(tmp_path)
    path = compiled_library(tmp_path / "cache", [compiler])
    whole = path.read_bytes()
    path.write_bytes(cut(whole))
    assert whole == compiled_library(tmp_path / "cache", [compiler]).read_bytes()


def test_what_others_may_have_written_is_not_run(tmp_path: Path, kernels: Kernels) -> None:
    compiler = copying_compiler(tmp_path)
    path = compiled_library(tmp_path / "cache", [compiler])
    path.parent.chmod(0o777)
    with pytest.raises(BuildError, match=f"^{path.parent} is another user's, or others may write to it"):
        compiled_library(tmp_path / "cache", [compiler])


def test_another_library_is_not_taken_for_ours(tmp_path: Path) -> None:
    source = tmp_path / "other.cpp"
    source.write_text("int other;")
    compile_into(tmp_path / "other.so", source)
    with pytest.raises(BuildError, match=f"delete {tmp_path}$"):
        Kernels(Library(tmp_path / "other.so"))


def test_a_home_that_cannot_be_written_to_is_named(tmp_path: Path, kernels: Kernels) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="writable"):
        compiled_library(tmp_path / "file", [copying_compiler(tmp_path)])


def test_what_is_compiled_is_kept(tmp_path: Path, kernels: Kernels) -> None:
    compiler = copying_compiler(tmp_path)
    first = compiled_library(tmp_path / "cache", [compiler])
    calls = (tmp_path / "calls").read_text().splitlines()
    assert first == compiled_library(tmp_path / "cache", [compiler])
    assert [*calls, "--version"] == (tmp_path / "calls").read_text().splitlines()


def test_ranks_that_start_together_get_the_same_library(tmp_path: Path, kernels: Kernels) -> None:
    compiler = copying_compiler(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: compiled_library(tmp_path / "cache", [compiler]), range(4)))
    (path,) = paths
    assert [path] == list(path.parent.iterdir())
    assert Library(path).address("norm_f32")


def test_kernels_that_cannot_be_had_are_not_usable(tmp_path: Path, kernels: Kernels) -> None:
    assert AUTO == cpu.usable(AUTO)
    assert [NONE, NONE] == [cpu.usable(NONE), cpu.usable(AUTO, compilers=["no-compiler"], shipped=tmp_path)]


@pytest.mark.parametrize(
    ("dtype", "disabled", "name"),
    [
        (torch.float32, False, "cpu"),
        (torch.bfloat16, False, "cpu"),
        (torch.float16, False, "reference"),
        (torch.float32, True, "reference"),
    ],
)
def test_the_fastest_backend_that_can_serve_is_chosen(
    dtype: torch.dtype, disabled: bool, name: str, kernels: Kernels
) -> None:
    backend = backends.choose(CpuDevice(), dtype, disable_custom_kernels=disabled, cpu_kernels=asked())
    assert name == backend.name
    assert backend.description
