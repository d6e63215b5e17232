# mypy: disable-error-code="import-untyped, import-not-found"
"""What Triton makes of kernels for a GPU, without one: registers, memory and instructions of each.

Inside `compiled_for`, a launch compiles its kernel for a compute capability and is then left out. What the assembler
made is read with the tools that Triton brings along (`cuobjdump`). Nothing here says how fast a kernel is: only whether
it spills registers, how many of its programs share a multiprocessor, and whether loads and products are what was meant.

For a process of its own: Triton's driver is replaced for good. Importing this module imports Triton.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

KIB = 1024
WARP = 32  # threads
REGISTERS = 65536  # of a multiprocessor
REGISTER_UNIT = 256  # registers, in which a warp takes them
RESERVED_BYTES = KIB  # of shared memory, that every program takes beside its own

# Of a line of machine code: its instruction, behind a predicate or not, up to the first point.
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)")
MATRIX = ("HGMMA", "HMMA", "UTCHMMA", "QGMMA", "IMMA")
ASYNCHRONOUS = ("LDGSTS", "UTMALDG", "UBLKCP")
SPILLS = ("LDL", "STL")


@dataclass(frozen=True)
class Processor:
    """What a multiprocessor of one compute capability has room for (CUDA's programming guide, its last tables)."""

    program_bytes: int  # of shared memory, for one program
    shared_bytes: int
    threads: int
    programs: int


PROCESSORS = {
    "8.0": Processor(163 * KIB, 164 * KIB, 2048, 32),
    "8.9": Processor(99 * KIB, 100 * KIB, 1536, 24),
    "9.0": Processor(227 * KIB, 228 * KIB, 2048, 32),
    "10.0": Processor(227 * KIB, 228 * KIB, 2048, 32),
}


@dataclass(frozen=True)
class MachineCode:
    """One compiled kernel."""

    kernel: str
    capability: str
    registers: int  # of a thread
    local_bytes: int  # of a thread, where spilled registers go
    shared_bytes: int  # of a program
    warps: int
    instructions: Counter[str]
    ptx: str

    @property
    def spills(self) -> int:
        """Instructions that read or write local memory."""
        return sum(self.instructions[name] for name in SPILLS)

    @property
    def fits(self) -> bool:
        """Whether a program finds enough shared memory."""
        return self.shared_bytes <= PROCESSORS[self.capability].program_bytes

    @property
    def programs_per_processor(self) -> int:
        """How many programs a multiprocessor has room for at the same time; 0 where none fits."""
        room = PROCESSORS[self.capability]
        registers_of_warp = -(-self.registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
        by_registers = REGISTERS // (registers_of_warp * self.warps)
        by_memory = room.shared_bytes // (self.shared_bytes + RESERVED_BYTES)
        by_threads = room.threads // (self.warps * WARP)
        return min(by_registers, by_memory, by_threads, room.programs) if self.fits else 0


class _Target:
    """Stands in for Triton's driver: names the target, has nothing to launch on."""

    def __init__(self, capability: str):
        self._capability = int(capability.replace(".", ""))

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
    run = JITFunction.run

    def only_compile(kernel: JITFunction[Any], *args: object, **kwargs: object) -> None:
        result = run(kernel, *args, **kwargs | {"warmup": True})
        found.append(_read(kernel.fn.__name__, capability, result))

    triton.runtime.driver.set_active(_Target(capability))
    with patch.object(JITFunction, "run", only_compile):
        yield found


def _read(kernel: str, capability: str, compiled: Any) -> MachineCode:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(compiled.asm["cubin"])
        binary.flush()
        command = [str(tool), "--dump-resource-usage", "--dump-sass", binary.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
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
        Counter(INSTRUCTION.findall(listing)),
        compiled.asm["ptx"],
    )
