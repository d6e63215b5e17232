"""Kinds of CPU kernels: which instructions each is compiled for, and whether this processor has them.

No torch here, so that the launcher refuses a kind before anything is started. Left out: the kernels themselves and
their libraries (`server/backends/cpu/`).
"""

from __future__ import annotations

import platform
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

AUTO, NONE = "auto", "none"
X86_64, AARCH64 = "x86_64", "aarch64"  # as Linux calls machines
# What the compiler's x86-64-v3 and x86-64-v4 stand for, as /proc/cpuinfo calls it.
V3 = frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split())
V4 = V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())
# And its armv8.2-a.
ARM_V8_2 = frozenset("asimd crc32 atomics asimdrdm".split())


@dataclass(frozen=True)
class Kind:
    """A kind of CPU: the compiler's options for it, what a CPU must say that it can do, and which machines have it."""

    name: str
    options: tuple[str, ...]
    wanted: frozenset[str]
    machine: str = platform.machine()

    def with_more(self, name: str, *features: str) -> Kind:
        """This kind with features besides, which /proc/cpuinfo and the compiler spell differently."""
        spelled = (
            feature.replace("avx512_", "avx512").replace("avx_", "avx").replace("_", "-") for feature in features
        )
        options = tuple(f"-m{feature}" for feature in spelled)
        return Kind(name, (*self.options, *options), self.wanted | set(features), self.machine)

    def why_not(self, machine: str = platform.machine(), flags: Collection[str] | None = None) -> str | None:
        """Why no CPU of this `machine` with these `flags` (by default this one) can be of this kind, or None."""
        if not self.wanted:
            return None
        if machine != self.machine:
            return f"this processor is {machine}, and such kernels are for {self.machine}: give auto or none"
        found = set(cpu_flags() if flags is None else flags)
        if not (missing := sorted(self.wanted - found)):
            return None
        named = (kind for kind in kinds_of(machine) if kind.name in NAMED)
        best = next((kind.name for kind in named if kind.wanted <= found), None)
        has, remedy = (f" and has {best}", f"{best}, auto") if best else ("", "auto")
        return f"this processor lacks {', '.join(missing)}{has}: give {remedy} or none"


NATIVE = Kind("native", ("-march=native",), frozenset())  # all that the machine has which compiles
AVX2 = Kind("avx2", ("-march=x86-64-v3",), V3, X86_64)
AVX_VNNI = AVX2.with_more("avx-vnni", "avx_vnni")  # Intel without AVX-512, from Alder Lake on
AVX512 = Kind("avx512", ("-march=x86-64-v4",), V4, X86_64)
VNNI = AVX512.with_more("avx512-vnni", "avx512_vnni", "avx512vbmi")  # Intel from Ice Lake on
BF16 = VNNI.with_more("avx512-bf16", "avx512_bf16")  # AMD from Zen 4 on
AMX = BF16.with_more("amx", "amx_tile", "amx_bf16", "amx_int8")  # Intel from Sapphire Rapids on
NEON = Kind("neon", ("-march=armv8-a",), frozenset({"asimd"}), AARCH64)
DOTPROD = Kind("dotprod", ("-march=armv8.2-a+dotprod",), ARM_V8_2 | {"asimddp"}, AARCH64)  # Arm from Neoverse N1 on
# Arm from Neoverse V1 and N2 on: Graviton 3 and 4, Grace, Axion.
I8MM = Kind("i8mm-bf16", ("-march=armv8.2-a+dotprod+i8mm+bf16",), DOTPROD.wanted | {"i8mm", "bf16"}, AARCH64)
KINDS = (AMX, BF16, VNNI, AVX512, AVX_VNNI, AVX2, I8MM, DOTPROD, NEON)  # of each machine, the fastest first
NAMED = {kind.name: kind for kind in (AVX512, AVX2, DOTPROD, NEON)}  # those that people ask for
CHOICES = (AUTO, *NAMED, NONE)
# Of layers whose weights are integers, where the format leaves inputs as they are: to 8 bits, or not at all.
ROUNDED, EXACT = INPUTS = ("rounded", "exact")


def kinds_of(machine: str) -> tuple[Kind, ...]:
    """Those of a machine, the fastest first; none where nothing is compiled for its processors."""
    return tuple(kind for kind in KINDS if kind.machine == machine)


def cpu_flags() -> list[str]:
    """What the CPU says that it can do; nothing where the system does not tell."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "").split()[1:]


def good_dtypes(kernels: str) -> set[str]:
    """The dtypes in which this CPU computes well, by their names in torch.

    kernels: the compiled ones that are used, of `CHOICES`. They read bfloat16 in the time that its bytes take, which is
    half of float32's, and compute no slower, whatever the processor is.
    """
    flags = cpu_flags()
    found = {"float32"}
    has_kernels = kernels != NONE and any(kind.why_not() is None for kind in kinds_of(platform.machine()))
    if has_kernels or {"avx512_bf16", "amx_bf16", "bf16"} & {*flags}:
        found.add("bfloat16")
    if {"avx512_fp16", "amx_fp16"} & {*flags}:
        found.add("float16")
    return found


def check(name: str) -> None:
    """Raise ValueError for one of `CHOICES` that this processor cannot run."""
    if name in NAMED and (problem := NAMED[name].why_not()):
        raise ValueError(problem)
