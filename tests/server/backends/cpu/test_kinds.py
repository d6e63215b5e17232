"""Kinds of CPU kernels: which this processor is told that it can run, that each is found again, and what each computes.

What no processor here can run is compiled nonetheless; what it can run computes as stock torch does, so that a machine
with AVX-512 tries what one with AVX2 alone will do.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from host import cpu_kinds
from host.cpu_kinds import AVX2, AVX512, AVX_VNNI, DOTPROD, NAMED, NATIVE, NEON, X86_64, Kind
from launch.settings import read_settings
from server.backends import choose, cpu
from server.backends.cpu import CpuBackend, Kernels
from server.backends.cpu.build import FLAGS, SOURCES, compiled_library
from server.backends.cpu.device import CpuDevice
from server.backends.cpu.memory import Arena
from server.backends.cpu.quantised import CodeFormat
from server.config import ShardConfig
from tests.server.backends.cpu.test_build import copying_compiler
from tests.server.backends.cpu.test_codes import CASES, emulated, random
from tests.server.backends.cpu.test_portable_kernels import CORTEX_A72, HASWELL, NEOVERSE_N1, SAPPHIRE_RAPIDS, SKYLAKE
from tests.server.driver import all_logits, load_engine

X86 = pytest.mark.skipif(platform.machine() != X86_64, reason="kinds are of x86-64 alone")
EACH = pytest.mark.parametrize(
    "kind", [kind for kind in NAMED.values() if kind.machine == platform.machine()], ids=lambda kind: kind.name
)
BEYOND_V3 = "avx512bw, avx512cd, avx512dq, avx512f, avx512vl"


@pytest.mark.parametrize(
    ("kind", "machine", "flags", "sentence"),
    [
        (AVX2, "x86_64", HASWELL, None),
        (AVX2, "x86_64", SKYLAKE, None),
        (AVX512, "x86_64", SKYLAKE, None),
        (AVX512, "x86_64", SAPPHIRE_RAPIDS, None),
        (NATIVE, "aarch64", [], None),
        (AVX512, "x86_64", HASWELL, f"this processor lacks {BEYOND_V3} and has avx2: give avx2, auto or none"),
        (AVX2, "x86_64", HASWELL[:-1], "this processor lacks bmi2: give auto or none"),
        (AVX2, "aarch64", [], "this processor is aarch64, and such kernels are for x86_64: give auto or none"),
        (NEON, "x86_64", SKYLAKE, "this processor is x86_64, and such kernels are for aarch64: give auto or none"),
        (NEON, "aarch64", CORTEX_A72, None),
        (DOTPROD, "aarch64", NEOVERSE_N1, None),
        (DOTPROD, "aarch64", NEOVERSE_N1[:-1], "this processor lacks asimddp and has neon: give neon, auto or none"),
    ],
)
def test_what_a_processor_cannot_run_has_a_sentence(
    kind: Kind, machine: str, flags: list[str], sentence: str | None
) -> None:
    assert sentence == kind.why_not(machine, flags)


def test_the_launcher_refuses_a_kind_that_the_processor_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kinds, "cpu_flags", lambda: HASWELL[:-1])
    monkeypatch.setattr(cpu_kinds.Kind.why_not, "__defaults__", (X86_64, None))
    _, problems = read_settings({"cpu_kernels": "avx2"}, {})
    assert ["--cpu-kernels is avx2: this processor lacks bmi2: give auto or none"] == problems
    _, problems = read_settings({}, {"CPU_KERNELS": "AVX2"})
    assert problems[0].endswith("give auto or none (from environment CPU_KERNELS)")
    for name in ("auto", "none"):
        assert [] == read_settings({"cpu_kernels": name}, {})[1]


def test_a_shard_is_told_the_kind() -> None:
    settings, _ = read_settings({}, {"CPU_KERNELS": "none"})
    assert "none" == settings.pick(ShardConfig)["cpu_kernels"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_none_is_stock_torch(dtype: torch.dtype) -> None:
    backend = choose(CpuDevice(), dtype, cpu_kernels="none")
    assert cpu.choose(dtype, ["no-such-compiler"]).name == backend.name
    assert "--cpu-kernels is none" in backend.description


@EACH
def test_a_kind_that_is_asked_for_is_never_replaced_by_another(kind: Kind) -> None:
    reason = kind.why_not() or r"no C\+\+ compiler was found"
    with pytest.raises(ValueError, match=f"^--cpu-kernels is {kind.name}: {reason}"):
        cpu.choose(torch.float32, ["no-such-compiler"], kernels=kind.name)


def test_kinds_are_built_side_by_side_and_found_again(tmp_path: Path, kernels: Kernels) -> None:
    compiler, kinds = copying_compiler(tmp_path), (NATIVE, AVX512, AVX2)
    first = [compiled_library(tmp_path / "cache", [compiler], kind) for kind in kinds]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert 3 == len(set(first)) and all(path.is_file() for path in first)
    assert first == [compiled_library(tmp_path / "cache", [compiler], kind) for kind in kinds]
    assert [*calls, *["--version"] * 3] == (tmp_path / "calls").read_text().splitlines()


@EACH
def test_each_kind_compiles_for_whatever_processor(kind: Kind, kernels: Kernels) -> None:
    assert compiled_library(kind=kind).is_file()


@X86
@pytest.mark.skipif(AVX2.why_not() is not None, reason="the processor has no AVX2")
@pytest.mark.parametrize("is_avx_vnni", [False, True], ids=["avx2", "avx-vnni"])
def test_kinds_without_avx512_multiply_codes_as_integers_do(is_avx_vnni: bool, kernels: Kernels) -> None:
    emulation = ("-include", str(Path(__file__).with_name("dpbusd.h")))
    kind = replace(AVX2, name="avx-vnni-emulated", options=AVX2.options + emulation) if is_avx_vnni else AVX2
    own = cpu.load(kind=kind)
    for name, weight in CASES.items():
        linear = CodeFormat(own, Arena(), weight, torch.bfloat16)
        for tokens in (1, 2, 3, 5, 13):
            x = random(tokens, weight.shape[1], seed=tokens).bfloat16()
            assert torch.equal(emulated(weight, x), linear.finest(x, None)), (name, tokens)


@X86
def test_avx_vnni_multiplies_four_bytes_in_one_instruction(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or pytest.skip("there is no compiler")
    command = [compiler, *FLAGS, *AVX_VNNI.options, "-S", "-o", "-", str(SOURCES / "peak.cpp")]
    assembly = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "vpdpbusd" in assembly


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_each_kind_that_the_processor_runs_computes_as_stock_torch(
    kind: Kind, dtype: torch.dtype, tiny_bloom: Path, kernels: Kernels
) -> None:
    if problem := kind.why_not():
        pytest.skip(problem)
    own, token_ids = cpu.load(kind=kind), list(range(4, 60))
    known = {"avx2": "AVX2", "avx512": "AVX512F", "neon": "NEON", "dotprod": "NEON"}
    assert known[kind.name] == own.instructions(dtype)
    assert own.instructions(dtype) in CpuBackend(own, dtype).description
    expected = all_logits(load_engine(tiny_bloom, dtype=dtype), token_ids)
    found = all_logits(load_engine(tiny_bloom, dtype=dtype, kernels=own), token_ids)
    share = {torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
    assert (expected - found).abs().mean() < share * expected.std()
