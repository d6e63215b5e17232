"""Kernels that run in another process, on the memory of this one: so an emulator runs those of another processor.

Every test of kernels then is a test of these: `Runner` stands in for the `Library` of this process. The other end,
which is compiled for the same processor as the kernels, is `runner.cpp`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import pytest

from host.cpu_kinds import DOTPROD, I8MM, NEON, Kind
from server.backends.cpu.build import compiled_library, compilers_for
from server.backends.cpu.kernels import Function, Library

FIND, CALL = range(2)
WANTED, CHANGED, DONE = range(3)
# What QEMU calls a processor that has what a kind wants, and as little more as there is.
PROCESSORS = {NEON: "cortex-a72", DOTPROD: "neoverse-n1", I8MM: "max"}
# Mappings come to be beside others, so that what is this far away now stays apart.
APART = 1 << 34
TRIES = 100


class Runner(Library):
    """A library in a process that `command` starts, which is one of runner.cpp."""

    def __init__(self, command: Sequence[str], library: Path):
        self._lock = Lock()
        self._memory = os.open("/proc/self/mem", os.O_RDONLY)
        for _ in range(TRIES):
            self._process = subprocess.Popen(
                [*command, str(library)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            assert self.address("instructions"), "the library exports it, and is loaded now"
            if not _meet(_mappings("self"), _mappings(str(self._process.pid))):
                return
            self._process.communicate()
        raise AssertionError(f"{TRIES} processes had memory at the addresses of this one")

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
        os.close(self._memory)

    def address(self, name: str) -> int:
        """In the other process."""
        text = name.encode()
        with self._lock:
            self._send(struct.pack("=qq", FIND, len(text)) + text)
            (address,) = self._receive_words(1)
        assert address, f"the library exports {name}"
        return address

    def function(self, name: str, signature: str) -> Function:
        packed = self.address(f"{name}_packed")

        def call(*arguments: int | None) -> None:
            assert len(arguments) == len(signature)
            with self._lock:
                words = [argument or 0 for argument in arguments]
                self._send(struct.pack(f"={3 + len(words)}q", CALL, packed, len(words), *words))
                while self._serve():
                    pass

        return call

    def _serve(self) -> bool:
        """Answer a question of the other process, or take what it changed; whether there will be more."""
        (kind,) = self._receive_words(1)
        if kind == DONE:
            return False
        address, size = self._receive_words(2)
        if kind == CHANGED:
            ctypes.memmove(address, self._receive(size), size)
        else:
            assert kind == WANTED
            pages = self._read(address, size)
            self._send(struct.pack("=q", len(pages)) + pages)
        return True

    def _read(self, address: int, size: int) -> bytes:
        """As many whole pages of this process as there are; none where there is no memory."""
        try:
            found = os.pread(self._memory, size, address)
        except OSError:
            return b""
        return found[: len(found) // 4096 * 4096]

    def _send(self, message: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(message)
        self._process.stdin.flush()

    def _receive_words(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f"={count}q", self._receive(8 * count))

    def _receive(self, size: int) -> bytes:
        assert self._process.stdout is not None and self._process.stderr is not None
        message = self._process.stdout.read(size)
        if len(message) < size:
            raise AssertionError(f"the process has died: {self._process.stderr.read().decode()} {self._process.wait()}")
        return message


def _mappings(process: str) -> list[tuple[int, int]]:
    """Where a process has memory that kernels may read: addresses, half-open."""
    lines = Path("/proc", process, "maps").read_text().splitlines()
    ranges = (line.split()[0].split("-") for line in lines if "[v" not in line and "[stack" not in line)
    return [(int(first, 16), int(stop, 16)) for first, stop in ranges]


def _meet(mine: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> bool:
    return any(first < stop_2 + APART and first_2 < stop + APART for first, stop in mine for first_2, stop_2 in others)


def command_for(kind: Kind, folder: Path) -> tuple[list[str], Path]:
    """What `Runner` is given for the kernels of a kind; its program is compiled into `folder`.

    Skips the test where this processor cannot run them and an emulator or a compiler is missing.
    """
    emulator: list[str] = []
    if kind.machine != platform.machine():
        emulator = [f"qemu-{kind.machine}-static", "-cpu", PROCESSORS[kind], "-L", f"/usr/{kind.machine}-linux-gnu"]
    elif problem := kind.why_not():
        pytest.skip(problem)
    compilers = compilers_for(kind.machine)
    compiler = next(filter(None, map(shutil.which, compilers)), "")
    if not compiler or not all(map(shutil.which, emulator[:1])):
        pytest.skip(f"kernels for {kind.machine} want {', '.join([*compilers, *emulator[:1]])}")
    program = folder / "runner"
    source = Path(__file__).with_suffix(".cpp")
    subprocess.run([compiler, "-std=c++17", "-O2", str(source), "-o", str(program), "-pthread", "-ldl"], check=True)
    return [*emulator, str(program)], compiled_library(compilers=compilers, kind=kind)
