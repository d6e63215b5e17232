"""Compiles the C++ files beside this one, on the machine that serves, or before for machines without a compiler.

The library is plain C++ without torch's headers, so that it compiles in seconds, once for each kind of CPU, machine,
compiler and version of the files. Unless a kind is named, all that the machine's CPU has is used (`-march=native`), and
the result is good for this machine alone. Ranks that start together may all compile: each does so in a directory of its
own and moves the result into place, which is atomic, and the results are the same. A library ends with the digest of
what is before it, so that one of which a part was lost is compiled again; another user's is never loaded.

`python -m server.backends.cpu --portable` compiles the files once for each kind of CPU that they make a difference for,
into a folder beside them: wheels and images have these. `--machine` names another machine than this one, for which a
cross compiler is asked. A machine that can run one of them compiles nothing: `-march=native` was no faster on Zen 3. A
library's name tells from which sources and with which options it was made, so that an outdated one is never loaded.

Left out: CPUs without AVX2 or NEON, and systems other than Linux. Stock torch operators serve there.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from host.cpu_kinds import KINDS, NATIVE, Kind, cpu_flags, kinds_of
from host.folders import make_private

SOURCES = Path(__file__).parent
PORTABLE = SOURCES / "compiled"
LIBRARY = "kernels.so"
COMPILERS = ("g++", "c++")
DIGEST_BYTES = hashlib.sha256().digest_size
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden")
COMMAND_SECONDS = 300  # the longest takes 3 on a core of its own


class BuildError(Exception):
    """Why there is no library, in a sentence that names the remedy."""


def compiled_library(cache: Path | None = None, compilers: Sequence[str] = COMPILERS, kind: Kind = NATIVE) -> Path:
    """The library of a kind, from `cache` (by default a directory below the user's home) if it is there already.

    Raises BuildError.
    """
    if platform.system() != "Linux":
        raise BuildError(f"this is {platform.system()}, and compiled kernels are for Linux")
    compiler = _find_compiler(compilers)
    try:
        directory = (cache or Path.home() / ".cache" / "lockstep" / "cpu-kernels") / _key(compiler, kind)
        library = directory / LIBRARY
        make_private(directory)  # what is in it is run
        _refuse_others(directory, library)
        if not _is_whole(library):
            compile_sources(compiler, kind.options, library)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        raise BuildError(f"the compiled kernels have no place: {error}; give this user a writable home") from error
    return library


def portable_library(
    folder: Path = PORTABLE,
    machine: str = platform.machine(),
    flags: Collection[str] | None = None,
    kinds: Sequence[Kind] = KINDS,
) -> Path | None:
    """The library in `folder` of the first of `kinds` that a machine with these `flags` can run (by default this one).

    None where there is none.
    """
    if not folder.is_dir():
        return None
    libraries = (portable_path(kind, folder) for kind in kinds if kind.why_not(machine, flags) is None)
    return next((path for path in libraries if path.is_file()), None)


def portable_path(kind: Kind, folder: Path) -> Path:
    """Where in `folder` the library of a kind is, if one was made of these sources."""
    return folder / f"{kind.name}-{_digest([*FLAGS, *kind.options])}.so"


def compile_portable(
    folder: Path = PORTABLE, machine: str = platform.machine(), compilers: Sequence[str] | None = None
) -> Path:
    """Compile a library for each kind of a machine, whatever this one is; returns the folder that they are in.

    compilers: by default those that compile for `machine` here. Raises BuildError without one, or with one that does
    not know a kind; OSError.
    """
    compiler = _find_compiler(compilers_for(machine) if compilers is None else compilers)
    folder.mkdir(parents=True, exist_ok=True)
    for kind in kinds_of(machine):
        compile_sources(compiler, kind.options, portable_path(kind, folder))
    return folder


def compile_sources(compiler: str, target: Sequence[str], library: Path) -> None:
    """Compile all sources side by side for the CPU that the options `target` name, and move the linked library to
    `library`, whose folder is there. Raises BuildError, and OSError."""
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        objects = {source: Path(scratch, source.stem + ".o") for source in sorted(SOURCES.glob("*.cpp"))}
        commands = [[compiler, *FLAGS, *target, "-c", str(source), "-o", str(out)] for source, out in objects.items()]
        with ThreadPoolExecutor() as pool:
            list(pool.map(_run, commands))
        linked = Path(scratch, LIBRARY)
        _run([compiler, "-shared", "-pthread", *map(str, objects.values()), "-o", str(linked)])
        if not linked.is_file():
            raise BuildError(f"{compiler} ended without an error and without a library: is it a C++ compiler?")
        with linked.open("r+b") as file:
            file.write(hashlib.sha256(file.read()).digest())
        os.replace(linked, library)


def _is_whole(library: Path) -> bool:
    """Whether it is there as it was compiled. Raises OSError."""
    content = library.read_bytes() if library.is_file() else b""
    return content[-DIGEST_BYTES:] == hashlib.sha256(content[:-DIGEST_BYTES]).digest()


def _refuse_others(directory: Path, library: Path) -> None:
    """Raise BuildError where another user may have put a library there; OSError."""
    for path in (directory, *([library] if library.exists() else [])):
        found = path.stat()
        is_open = path == directory and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if found.st_uid not in (0, os.geteuid()) or is_open:
            raise BuildError(f"{path} is another user's, or others may write to it, and it would be run: remove it")


def compilers_for(machine: str) -> tuple[str, ...]:
    """The commands that may be a compiler for a machine: another one than this has a cross compiler."""
    return COMPILERS if machine == platform.machine() else (f"{machine}-linux-gnu-g++",)


def _find_compiler(compilers: Sequence[str]) -> str:
    """The path of the first that is installed. Raises BuildError if none is."""
    for name in compilers:
        if path := shutil.which(name):
            return path
    machine, is_cross, _ = compilers[0].partition("-linux-gnu-g++")
    package = f"g++-{machine.replace('_', '-')}-linux-gnu" if is_cross else "g++"  # as Debian calls it
    raise BuildError(f"no C++ compiler was found ({', '.join(compilers)}): install {package}")


def _key(compiler: str, kind: Kind) -> str:
    """Differs wherever the compiled library would."""
    machine = [platform.machine(), " ".join(cpu_flags())]
    return f"{kind.name}-{_digest([_run([compiler, '--version']), ' '.join((*FLAGS, *kind.options)), *machine])}"


def _digest(parts: Sequence[str]) -> str:
    """A name for what is made of the sources in the way that `parts` tell."""
    sources = [path.name + path.read_text() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cpp", ".h")]
    return hashlib.sha256("\0".join([*parts, *sources]).encode()).hexdigest()[:16]


def _run(command: Sequence[str]) -> str:
    """What the command prints."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMMAND_SECONDS)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run ({error.strerror}): install g++") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(
            f"{command[0]} took longer than {COMMAND_SECONDS} s: start again when less is running"
        ) from error
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["no message"]
        complaint = next((line for line in lines if "error" in line), lines[-1])
        raise BuildError(
            f"{command[0]} failed: {complaint.strip()}; g++ 11 or later, 1 GB of memory and 20 MB of disk are needed"
        )
    return result.stdout
