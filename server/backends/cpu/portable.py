"""Kernels that were compiled somewhere else, for machines without a compiler: a container's image has them.

`python -m server.backends.cpu --portable` compiles the C++ files once for each kind of CPU that they make a difference
for, into a folder beside them. A library's name tells of which sources and with which options it was made, so that one
of other sources is never loaded. What a machine compiles for itself goes before them (`build.py`). Left out: CPUs
without AVX2, and those that are not x86-64. Stock torch operators serve there.
"""

from __future__ import annotations

import platform
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from server.backends.cpu.build import COMPILERS, FLAGS, SOURCES, compile_sources, cpu_flags, digest, find_compiler

FOLDER = SOURCES / "compiled"
MACHINE = "x86_64"
# What the compiler's x86-64-v3 and x86-64-v4 stand for, as /proc/cpuinfo calls it.
V3 = frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split())
V4 = V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())


@dataclass(frozen=True)
class Kind:
    """A kind of CPU: the compiler's options for it, and what a CPU must say that it can do."""

    name: str
    options: tuple[str, ...]
    wanted: frozenset[str]

    def with_more(self, name: str, *features: str) -> Kind:
        """This kind with features besides, which /proc/cpuinfo and the compiler spell differently."""
        options = tuple(f"-m{feature.replace('avx512_', 'avx512').replace('_', '-')}" for feature in features)
        return Kind(name, (*self.options, *options), self.wanted | set(features))

    def library(self, folder: Path) -> Path:
        """Where in `folder` this kind's library is, if one was made of these sources."""
        return folder / f"{self.name}-{digest([*FLAGS, *self.options])}.so"


AVX2 = Kind("avx2", ("-march=x86-64-v3",), V3)
AVX512 = Kind("avx512", ("-march=x86-64-v4",), V4)
VNNI = AVX512.with_more("avx512-vnni", "avx512_vnni", "avx512vbmi")  # Intel from Ice Lake on
BF16 = VNNI.with_more("avx512-bf16", "avx512_bf16")  # AMD from Zen 4 on
AMX = BF16.with_more("amx", "amx_tile", "amx_bf16", "amx_int8")  # Intel from Sapphire Rapids on
KINDS = (AMX, BF16, VNNI, AVX512, AVX2)  # the fastest first


def compile_all(folder: Path = FOLDER, kinds: Sequence[Kind] = KINDS, compilers: Sequence[str] = COMPILERS) -> Path:
    """Compile a library for each of the kinds, whatever this machine is; returns the folder that they are in.

    Raises BuildError without a compiler, or with one that does not know a kind; OSError.
    """
    compiler = find_compiler(compilers)
    folder.mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        compile_sources(compiler, kind.options, kind.library(folder))
    return folder


def fitting(
    folder: Path = FOLDER, machine: str = platform.machine(), flags: Collection[str] | None = None
) -> Path | None:
    """The fastest library in `folder` that a machine with these `flags` can run (by default this one), or None."""
    if machine != MACHINE or not folder.is_dir():
        return None
    found = set(cpu_flags().split() if flags is None else flags)
    libraries = (kind.library(folder) for kind in KINDS if kind.wanted <= found)
    return next((path for path in libraries if path.is_file()), None)
