"""`lockstep-bench kernels`: what every Triton kernel compiles to, for GPUs that need not be there; runs nothing.

A kernel that spills registers, that finds no room in a multiprocessor's shared memory, or whose loads are not pipelined
is slow in a way that is seen here before it is measured. The cases are one for each head size of the models that are
served, in bfloat16; `tests/server/compiled_kernels.py` holds the same cases to what the tile sizes assume. Speed is
`probes`' business. Needs Triton, which is imported only when the command runs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmark.report import BenchError, table

if TYPE_CHECKING:
    from server.backends.cuda.machine_code import MachineCode

CAPABILITIES = ("8.0", "8.9", "9.0", "10.0")
PROCESSORS = 132  # to fill: those of an H200, so that the keys of few sequences are split
DECODES, CHUNK, BLOCKS, BLOCK_SIZE = 2, 20, 64, 16
WIDTH = 4096  # of the model, and of a gated mlp
HEADERS = [
    "case", "kernel", "capability", "registers", "spills", "local memory", "shared memory", "matrix instructions",
    "asynchronous loads", "programs per multiprocessor",
]  # fmt: skip


@dataclass(frozen=True)
class HeadCase:
    """Heads of one model: how many, how wide, how placed."""

    model: str
    heads: int
    kv_heads: int
    head_dim: int
    rotated_pairs: int = 0  # 0: ALiBi
    is_interleaved: bool = False
    cap: float = 0.0
    window: int = 0

    @property
    def name(self) -> str:
        """As in the table: "32 / 8 heads of 128 (Llama-3-8B)"."""
        return f"{self.heads} / {self.kv_heads} heads of {self.head_dim} ({self.model})"


HEAD_CASES = (
    HeadCase("bloom-560m", 16, 16, 64),
    HeadCase("TinyLlama-1.1B", 32, 4, 64, rotated_pairs=32),
    HeadCase("Falcon-7B", 71, 1, 64, rotated_pairs=32),
    HeadCase("bloomz-3b", 32, 32, 80),
    HeadCase("like Phi-2, shared kv heads", 32, 8, 80, rotated_pairs=16),
    HeadCase("Phi-3-mini", 32, 32, 96, rotated_pairs=48),
    HeadCase("like Phi-3-mini, shared kv heads", 32, 8, 96, rotated_pairs=48),
    HeadCase("MPT-30B", 64, 64, 112),
    HeadCase("like MPT-30B, shared kv heads", 64, 8, 112),
    HeadCase("bloomz-7b1", 32, 32, 128),
    HeadCase("Llama-2-7B", 32, 32, 128, rotated_pairs=64),
    HeadCase("Mistral-7B", 32, 8, 128, rotated_pairs=64, window=4096),
    HeadCase("ChatGLM3-6B", 32, 2, 128, rotated_pairs=32, is_interleaved=True),
    HeadCase("StarCoder", 48, 1, 128),
    HeadCase("Gemma-7B", 16, 16, 256, rotated_pairs=128),
    HeadCase("Gemma-2-9B", 16, 8, 256, rotated_pairs=128, cap=50.0, window=4096),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument(
        "--capability",
        nargs="+",
        choices=CAPABILITIES,
        default=CAPABILITIES,
        help="compute capabilities to compile for (default: all of them)",
    )


def run(args: argparse.Namespace) -> int:
    """Print a Markdown table of all kernels. Raises BenchError."""
    if importlib.util.find_spec("triton") is None:
        raise BenchError("Triton is not installed: it exists for Linux on x86-64, and `.[dev]` installs it")
    codes = [row for capability in args.capability for row in rows(capability)]
    print(table(HEADERS, [line(name, code) for name, code in codes], centred=True))
    version = importlib.metadata.version("triton")
    print(f"\n- Triton {version}, bfloat16; compiled, not run: no GPU was used, and nothing was timed")
    for name, code in codes:
        for complaint in complaints(code):
            print(f"- {name}, {code.kernel}, {code.capability}: {complaint}")
    return 0


def rows(capability: str) -> Iterator[tuple[str, MachineCode]]:
    """Every kernel of every case, compiled for one compute capability."""
    from server.backends.cuda.machine_code import compiled_for

    with compiled_for(capability) as found:
        for case in HEAD_CASES:
            launch_attention(case)
            yield from ((case.name, code) for code in found)
            found.clear()
        launch_others()
        yield from ((f"width {WIDTH}", code) for code in found)


def launch_attention(case: HeadCase, chunk: int = CHUNK) -> None:
    """A step of decodes, whose keys are split, and a chunk of a prompt."""
    import torch

    from server.backends.cuda.attention import PagedAttention
    from server.backends.protocol import Rotation, Scores, StepMeta

    tokens, longest = DECODES + chunk, BLOCKS * BLOCK_SIZE
    starts = [*range(DECODES + 1), *([tokens] if chunk else [])]
    sequences, ones = len(starts) - 1, torch.ones(tokens, dtype=torch.int64)
    tables = torch.zeros(sequences, BLOCKS, dtype=torch.int64)
    on_device = torch.tensor(starts, dtype=torch.int32)
    meta = StepMeta(DECODES, starts, [longest] * sequences, chunk, on_device, ones, ones, ones, ones, tables)
    kv = torch.zeros(2, 1, case.kv_heads, BLOCK_SIZE, case.head_dim, dtype=torch.bfloat16)
    heads = torch.zeros(tokens, case.heads + 2 * case.kv_heads, case.head_dim, dtype=torch.bfloat16)
    angles = torch.zeros(tokens, 1, case.rotated_pairs)
    rotation = Rotation(angles, angles, case.is_interleaved) if case.rotated_pairs else None
    slopes = () if rotation else (0.5,) * case.heads
    attention = PagedAttention(Scores(case.head_dim**-0.5, slopes, case.cap), PROCESSORS)
    attention.self_attend(heads, kv, rotation, meta, case.window)


def launch_others() -> None:
    """What stands between the matrix products of a layer."""
    import torch

    from server.arch.spec import Activation
    from server.backends.cuda.fused import FusedNorm, fused_gate
    from server.backends.protocol import Summand

    x, weight = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((2, WIDTH), (WIDTH,)))
    FusedNorm(weight, weight, 1e-5, is_centred=True).add(x, Summand((x,), (weight,)))
    FusedNorm(weight, None, 1e-5, is_centred=False).add(x, Summand((x,)))
    fused_gate(Activation.SILU, torch.zeros(2, 2 * WIDTH, dtype=torch.bfloat16))


def line(name: str, code: MachineCode) -> list[str | int]:
    """One row of the table."""
    from server.backends.cuda.machine_code import ASYNCHRONOUS, KIB, MATRIX

    return [
        name,
        f"`{code.kernel}`",
        code.capability,
        code.registers,
        code.spills,
        code.local_bytes,
        f"{code.shared_bytes / KIB:.1f} KiB" + ("" if code.fits else " (too much)"),
        _counts(code, MATRIX),
        _counts(code, ASYNCHRONOUS),
        code.programs_per_processor,
    ]


def _counts(code: MachineCode, names: tuple[str, ...]) -> str:
    return ", ".join(f"{code.instructions[name]} {name}" for name in names if code.instructions[name]) or "none"


def complaints(code: MachineCode) -> Iterator[str]:
    """What no kernel should do."""
    from server.backends.cuda.machine_code import KIB, PROCESSORS

    if code.spills or code.local_bytes:
        yield f"spills registers: {code.spills} instructions, {code.local_bytes} bytes of local memory"
    if not code.fits:
        most = PROCESSORS[code.capability].program_bytes
        yield f"needs {code.shared_bytes / KIB:.1f} KiB of shared memory, a program has {most / KIB:.0f}: cannot run"
