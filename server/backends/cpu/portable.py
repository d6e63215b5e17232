"""Kernels that were compiled somewhere else, for machines without a compiler: a container's image has them.

`python -m server.backends.cpu --portable` compiles the C++ files once for each kind of CPU that they make a difference
for, into a folder beside them. A library's name tells of which sources and with which options it was made, so that one
of other sources is never loaded. What a machine compiles for itself goes before them (`build.py`). Left out: CPUs
without AVX2, and those that are not x86-64. Stock torch operators serve there.
"""

from __future__ import annotations

import platform
from collections.abc import Collection, Sequence
from pathlib import Path

from server.backends.cpu.build import COMPILERS, FLAGS, SOURCES, compile_sources, digest, find_compiler
from server.cpu_kinds import KINDS, Kind

FOLDER = SOURCES / "compiled"


def library(kind: Kind, folder: Path) -> Path:
    """Where in `folder` the library of a kind is, if one was made of these sources."""
    return folder / f"{kind.name}-{digest([*FLAGS, *kind.options])}.so"


def compile_all(folder: Path = FOLDER, kinds: Sequence[Kind] = KINDS, compilers: Sequence[str] = COMPILERS) -> Path:
    """Compile a library for each of the kinds, whatever this machine is; returns the folder that they are in.

    Raises BuildError without a compiler, or with one that does not know a kind; OSError.
    """
    compiler = find_compiler(compilers)
    folder.mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        compile_sources(compiler, kind.options, library(kind, folder))
    return folder


def fitting(
    folder: Path = FOLDER,
    machine: str = platform.machine(),
    flags: Collection[str] | None = None,
    kinds: Sequence[Kind] = KINDS,
) -> Path | None:
    """The library in `folder` of the first of `kinds` that a machine with these `flags` can run (by default this one).

    None where there is none.
    """
    if not folder.is_dir():
        return None
    libraries = (library(kind, folder) for kind in kinds if kind.why_not(machine, flags) is None)
    return next((path for path in libraries if path.is_file()), None)
