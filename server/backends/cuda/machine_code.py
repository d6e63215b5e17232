# mypy: disable-error-code="import-untyped, import-not-found"
"""What Triton makes of kernels for a GPU, without one: registers, memory and instructions of each.

Inside `compiled_for`, a launch compiles its kernel for a compute capability and is then left out. What the assembler
made is read with the tools that Triton brings along: registers and memory at once, instructions when they are asked
for, and then those of all kernels, since the disassembler takes longer to start than a kernel to compile. Nothing here
says how fast a kernel is: only whether it spills registers, how many of its programs share a multiprocessor, and which
loads and products it was made into.

For a process of its own: Triton's driver is replaced for good. Importing this module imports Triton.
"""

from __future__ import annotations

import bisect
import itertools
import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from server.backends.cuda.kernels.splits import KIB, RESERVED_BYTES

WARP = 32  # threads
REGISTERS = 65536  # of a multiprocessor
REGISTER_UNIT = 256  # registers, in which a warp takes them

# Of a line of machine code: its place, and its instruction, behind a predicate or not, with all parts of its name.
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)", re.MULTILINE)
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)")
MATRIX = ("HGMMA", "HMMA", "UTCHMMA", "QGMMA", "IMMA")
WHOLE_UNITS = "LDGSTS.E.BYPASS.128"  # what reads 16 bytes for each thread, ahead of their use
ASYNCHRONOUS = ("LDGSTS", "UTMALDG", "UBLKCP")
SPILLS = ("LDL", "STL")


@dataclass(frozen=True)
class Processor:
    """What a multiprocessor of one compute capability has room for (CUDA's programming guide, its last tables)."""

    program_bytes: int  # of shared memory, for one program
    shared_bytes: int
    threads: int
    programs: int


PROCESSOR_OF = {
    "8.0": Processor(163 * KIB, 164 * KIB, 2048, 32),
    "8.6": Processor(99 * KIB, 100 * KIB, 1536, 16),
    "8.9": Processor(99 * KIB, 100 * KIB, 1536, 24),
    "9.0": Processor(227 * KIB, 228 * KIB, 2048, 32),
    "10.0": Processor(227 * KIB, 228 * KIB, 2048, 32),
    "12.0": Processor(99 * KIB, 100 * KIB, 1536, 24),
}


def number(capability: str) -> tuple[int, int]:
    """ "8.9" → (8, 9), which can be compared."""
    major, minor = capability.split(".")
    return int(major), int(minor)


class Disassembler:
    """Tells the instructions of kernels for one compute capability: one run of the tool for all that wait for it."""

    def __init__(self, capability: str):
        self._target = f"SM{capability.replace('.', '')}"
        self._codes: list[bytes] = []
        self._counts: list[Counter[str]] = []  # of as many as have been disassembled

    def add(self, cubin: bytes) -> int:
        """Its number, by which to ask for its instructions."""
        self._codes.append(_text(cubin))
        return len(self._codes) - 1

    def instructions(self, number: int) -> Counter[str]:
        """How many there are of each, by their whole names."""
        if number >= len(self._counts):
            waiting = self._codes[len(self._counts) :]
            self._counts += self._disassemble(waiting)
        return self._counts[number]

    def _disassemble(self, codes: list[bytes]) -> list[Counter[str]]:
        listing = _output_of("nvdisasm", b"".join(codes), "--binary", self._target)
        ends = list(itertools.accumulate(map(len, codes)))
        counts: list[Counter[str]] = [Counter() for _ in codes]
        for place, name in INSTRUCTION.findall(listing):
            counts[bisect.bisect_right(ends, int(place, 16))][name] += 1
        return counts


@dataclass(frozen=True)
class MachineCode:
    """One compiled kernel."""

    kernel: str
    capability: str
    registers: int  # of a thread
    local_bytes: int  # of a thread, where spilled registers go
    shared_bytes: int  # of a program
    warps: int
    ptx: str = field(repr=False)
    disassembler: Disassembler = field(repr=False)
    number: int  # of the kernel, among those of its disassembler

    @property
    def full_instructions(self) -> Counter[str]:
        """How many there are of each instruction, by its whole name: LDGSTS.E.BYPASS.128."""
        return self.disassembler.instructions(self.number)

    @cached_property
    def instructions(self) -> Counter[str]:
        """How many there are of each instruction, by its name up to the first point: LDGSTS."""
        total: Counter[str] = Counter()
        for name, count in self.full_instructions.items():
            total[name.partition(".")[0]] += count
        return total

    @property
    def spills(self) -> int:
        """Instructions that read or write local memory."""
        return sum(self.instructions[name] for name in SPILLS) if self.local_bytes else 0

    @property
    def fits(self) -> bool:
        """Whether a program finds enough shared memory."""
        return self.shared_bytes <= PROCESSOR_OF[self.capability].program_bytes

    @property
    def programs_per_processor(self) -> int:
        """How many programs a multiprocessor has room for at the same time; 0 where none fits."""
        room = PROCESSOR_OF[self.capability]
        registers_of_warp = -(-self.registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
        by_registers = REGISTERS // (registers_of_warp * self.warps)
        by_memory = room.shared_bytes // (self.shared_bytes + RESERVED_BYTES)
        by_threads = room.threads // (self.warps * WARP)
        return min(by_registers, by_memory, by_threads, room.programs) if self.fits else 0


class _Target:
    """Stands in for Triton's driver: names the target, has nothing to launch on."""

    def __init__(self, capability: str):
        major, minor = number(capability)
        self._capability = 10 * major + minor

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, WARP)

    def get_current_device(self) -> int:
        return self._capability  # Triton keeps what it has compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiled_for(capability: str) -> Iterator[list[MachineCode]]:
    """In this block launches only compile, for `capability`; the list grows by each, in order."""
    found: list[MachineCode] = []
    disassembler = Disassembler(capability)
    run = JITFunction.run

    def only_compile(kernel: JITFunction[Any], *args: object, **kwargs: object) -> None:
        result = run(kernel, *args, **kwargs | {"warmup": True})
        found.append(_read(kernel.fn.__name__, capability, result, disassembler))

    triton.runtime.driver.set_active(_Target(capability))
    with patch.object(JITFunction, "run", only_compile):
        yield found


def _read(kernel: str, capability: str, compiled: Any, disassembler: Disassembler) -> MachineCode:
    cubin = compiled.asm["cubin"]
    listing = _output_of("cuobjdump", cubin, "--dump-resource-usage")
    resources = RESOURCES.search(listing)
    assert resources is not None, f"cuobjdump says nothing of {kernel}: {listing[:200]}"
    registers, stack, local = map(int, resources.groups())
    return MachineCode(
        kernel,
        capability,
        registers,
        stack + local,
        compiled.metadata.shared,
        compiled.metadata.num_warps,
        compiled.asm["ptx"],
        disassembler,
        disassembler.add(cubin),
    )


def _output_of(tool: str, content: bytes, *options: str) -> str:
    """What one of Triton's tools says of a file."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(content)
        file.flush()
        return subprocess.run([path, *options, file.name], capture_output=True, text=True, check=True).stdout


def _text(cubin: bytes) -> bytes:
    """The instructions of a kernel: the section ".text.NAME" of its file, which is in the format ELF, of 64 bits."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    # Of each section: where its name is, its type, flags and address, where it is, and its length.
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + number * size) for number in range(count)]
    all_names = sections[names][4]
    (text,) = (section for section in sections if cubin.startswith(b".text.", all_names + section[0]))
    start, length = text[4:]
    return cubin[start : start + length]
