"""Kernels that were compiled elsewhere: which kind a machine gets, and that nothing of other sources is loaded."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from host.cpu_kinds import (
    AARCH64,
    AMX,
    AVX2,
    AVX512,
    AVX_VNNI,
    BF16,
    DOTPROD,
    I8MM,
    KINDS,
    NEON,
    VNNI,
    X86_64,
    Kind,
    cpu_flags,
    kinds_of,
)
from server.backends import cpu
from server.backends.cpu import Kernels
from server.backends.cpu.build import BuildError, compile_portable, compiled_library, portable_library, portable_path

X86 = pytest.mark.skipif(platform.machine() != X86_64, reason="its options are of x86-64 alone")
# Shortened from /proc/cpuinfo of the CPUs that are named.
HASWELL = "fpu sse4_2 movbe xsave avx f16c fma abm bmi1 avx2 bmi2".split()
SKYLAKE = [*HASWELL, *"avx512f avx512dq avx512cd avx512bw avx512vl".split()]
ICE_LAKE = [*SKYLAKE, *"avx512vbmi avx512_vbmi2 avx512_vnni avx512_bitalg".split()]
ZEN_4 = [*ICE_LAKE, "avx512_bf16"]
SAPPHIRE_RAPIDS = [*ZEN_4, *"avx_vnni amx_bf16 avx512_fp16 amx_tile amx_int8".split()]
CORTEX_A72 = "fp asimd evtstrm crc32 cpuid".split()
NEOVERSE_N1 = [*CORTEX_A72, *"atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp".split()]
NEOVERSE_V1 = [*NEOVERSE_N1, *"sve svei8mm svebf16 i8mm bf16 dgh".split()]
CASES: list[tuple[str, list[str], Kind | None]] = [
    (X86_64, SAPPHIRE_RAPIDS, AMX),
    (X86_64, ZEN_4, BF16),
    (X86_64, ICE_LAKE, VNNI),
    (X86_64, SKYLAKE, AVX512),
    (X86_64, [*HASWELL, "avx_vnni"], AVX_VNNI),  # Alder Lake
    (X86_64, HASWELL, AVX2),
    (X86_64, [flag for flag in SAPPHIRE_RAPIDS if flag != "amx_tile"], BF16),  # a virtual machine that hides some
    (X86_64, [flag for flag in SAPPHIRE_RAPIDS if flag != "fma"], None),
    (X86_64, HASWELL[:6], None),
    (X86_64, [], None),
    (AARCH64, NEOVERSE_V1, I8MM),
    (AARCH64, [flag for flag in NEOVERSE_V1 if flag != "bf16"], DOTPROD),
    (AARCH64, NEOVERSE_N1, DOTPROD),
    (AARCH64, CORTEX_A72, NEON),
    (AARCH64, ["fp"], None),
]


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """A folder with a library for every kind, which nobody can load."""
    for kind in KINDS:
        portable_path(kind, tmp_path).write_text(kind.name)
    return tmp_path


@pytest.mark.parametrize(("machine", "flags", "kind"), CASES)
def test_a_machine_gets_the_fastest_kind_that_it_can_run(
    shipped: Path, machine: str, flags: list[str], kind: Kind | None
) -> None:
    assert portable_library(shipped, machine, flags) == (portable_path(kind, shipped) if kind else None)


def test_a_kind_that_was_not_compiled_leaves_the_next(shipped: Path) -> None:
    portable_path(AMX, shipped).unlink()
    assert portable_path(BF16, shipped) == portable_library(shipped, "x86_64", SAPPHIRE_RAPIDS)


def test_machines_of_another_kind_and_folders_that_are_not_there_have_none(shipped: Path, tmp_path: Path) -> None:
    assert portable_library(shipped, "aarch64", SAPPHIRE_RAPIDS) is None
    assert portable_library(tmp_path / "missing", "x86_64", SAPPHIRE_RAPIDS) is None


def test_a_library_of_other_sources_is_never_loaded(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert portable_library(shipped, "x86_64", SAPPHIRE_RAPIDS) is not None
    other = shipped / "other sources"
    other.mkdir()
    (other / "linear.cpp").write_text("// changed")
    monkeypatch.setattr(
        sys.modules[compiled_library.__module__], "SOURCES", other
    )  # `build` is the function's name, too
    assert portable_library(shipped, "x86_64", SAPPHIRE_RAPIDS) is None


def test_each_kind_has_what_the_slower_ones_have() -> None:
    for machine in (X86_64, AARCH64):
        for faster, slower in pairwise(kind for kind in kinds_of(machine) if kind is not AVX_VNNI):
            assert faster.wanted > slower.wanted
    assert AVX_VNNI.wanted > AVX2.wanted  # with AVX-512 or without
    assert ("-march=x86-64-v4", "-mavx512vnni", "-mavx512vbmi", "-mavx512bf16") == BF16.options


@X86
@pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ to ask")
def test_the_compiler_means_by_a_kind_no_more_than_a_machine_is_asked_for() -> None:
    """Were it to, a machine that says it can do what is wanted would still meet an instruction that it lacks."""
    spelt = {"abm": {"lzcnt"}, "avx512_vnni": {"avx512vnni"}, "avx512_bf16": {"avx512bf16"}, "bmi1": {"bmi"}}
    spelt["avx_vnni"] = {"avxvnni"}
    old = {"sse", "sse2", "sse3", "ssse3", "sse4", "sse4.1", "sse4.2", "sahf", "cx16", "popcnt", "mmx", "fxsr", "crc32"}
    for kind in kinds_of(X86_64):
        said = subprocess.run(["g++", *kind.options, "-Q", "--help=target"], capture_output=True, text=True, check=True)
        enabled = {line.split()[0][2:] for line in said.stdout.splitlines() if line.endswith("[enabled]")}
        known = {name for flag in kind.wanted for name in spelt.get(flag, {flag.replace("_", "-")})} | old
        features = {name for name in enabled if name.startswith(("avx", "amx", "bmi", "sse", "fma", "f16c", "lzcnt"))}
        assert features <= known, kind.name
        assert known - old <= enabled, kind.name


@X86
def test_where_one_fits_nothing_is_compiled(tmp_path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        portable_path(kind, tmp_path).symlink_to(compiled_library())
    if portable_library(tmp_path) is None:
        pytest.skip(f"this CPU is of no kind: {cpu_flags()}")
    monkeypatch.setattr(cpu, "compiled_library", lambda **_: pytest.fail("compiled"))
    assert isinstance(cpu.load(shipped=tmp_path), Kernels)


def test_without_one_that_fits_the_message_is_that_of_the_compiler(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="install g"):
        cpu.load(["no-such-compiler"], tmp_path)


def test_systems_other_than_linux_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(BuildError, match=r"^this is Darwin, and compiled kernels are for Linux$"):
        cpu.load(shipped=tmp_path)


@pytest.mark.parametrize("machine", [X86_64, AARCH64])
def test_every_kind_of_a_machine_is_compiled_with_its_own_options(tmp_path: Path, machine: str) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nwhile [ "$1" != -o ]; do shift; done\ntouch "$2"\n')
    compiler.chmod(0o755)
    folder, kinds = compile_portable(tmp_path / "made", machine, [str(compiler)]), kinds_of(machine)
    assert {portable_path(kind, folder) for kind in kinds} == set(folder.iterdir())
    calls = [line for line in (tmp_path / "calls").read_text().splitlines() if "/linear.cpp" in line]
    for kind in kinds:
        assert 1 == sum(f" {' '.join(kind.options)} -c " in line for line in calls), kind.name
    assert not any("-march=native" in line for line in calls)


def test_without_a_compiler_nothing_is_made_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for machine, package in ((platform.machine(), "g++"), ("riscv64", "g++-riscv64-linux-gnu")):
        with pytest.raises(BuildError, match=f"install {re.escape(package)}$"):
            compile_portable(tmp_path / "made", machine)
    assert not (tmp_path / "made").exists()
