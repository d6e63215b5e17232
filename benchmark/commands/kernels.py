"""`lockstep-bench kernels`: compile every Triton kernel and report its resources; needs no GPU.

A kernel that spills registers, that finds no room in a multiprocessor's shared memory, or whose loads are not pipelined
is slow in a way that is seen here before it is measured. The cases are attention for each head size of the models that
are served, matrix products of few rows in every tiling, and all that stands between and behind them, in bfloat16;
`tests/server/compiled_*.py` hold some of these cases to what the tile sizes assume. Speed is `probes`' business. Needs
Triton, which is imported only when the command runs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmark.result import BenchError, table
from benchmark.terminal import Progress, Stage, shown
from server.quantisation.random_weight import Kind

if TYPE_CHECKING:
    import torch

    from server.backends.cuda.kernels.linear import Tiling
    from server.backends.cuda.machine_code import MachineCode


CAPABILITIES = ("8.0", "8.9", "9.0", "10.0")
PROCESSORS = 132  # to fill: those of an H200, so that the keys of few sequences are split
DECODES, CHUNK, BLOCKS, BLOCK_SIZE = 2, 20, 64, 16
WIDTH = 4096  # of the model, and of a gated mlp
VOCABULARY = 250_880  # Bloom's
MOST_ROWS = 64  # of a dense product: beyond, it is left to cuBLAS
QUANTISED_WIDTH = 1024  # of products with quantised weights, whose tiles do not depend on it
EXPERTS, EXPERT_ROWS = 8, (2, 64, 128)  # of a mixture; rows of all experts together
MIXTURES = ((8, 2), (128, 8), (60, 6))  # experts, and how many each token goes to
HEADERS = [
    "case", "kernel", "capability", "registers", "spills", "local memory", "shared memory", "matrix instructions",
    "asynchronous loads", "programs per multiprocessor",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What is compiled, and for a product how many of its programs a multiprocessor should hold."""

    name: str
    launch: Callable[[], object]
    resident: int = 0


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
    stages = [Stage(f"compute capability {capability}") for capability in args.capability]
    with shown("compiling every kernel", stages) as view:
        codes = [row for capability in view.each(args.capability) for row in rows(capability, view)]
    print(table(HEADERS, [line(case.name, code) for case, code in codes], centred=True))
    version = importlib.metadata.version("triton")
    print(f"\n- Triton {version}, bfloat16; compiled, not run: no GPU was used, and nothing was timed")
    for case, code in codes:
        for complaint in complaints(code, case.resident):
            print(f"- {case.name}, {code.kernel}, {code.capability}: {complaint}")
    return 0


def rows(capability: str, view: Progress | None = None) -> Iterator[tuple[Case, MachineCode]]:
    """Every kernel of every case, compiled for one compute capability."""
    from server.backends.cuda.machine_code import compiled_for

    with compiled_for(capability) as found:
        named: list[tuple[Case, MachineCode]] = []
        launched = list(cases())
        for case in launched:
            before = len(found)
            case.launch()
            # What is launched several times in a case is one row.
            named += ((case, code) for code in {code.ptx: code for code in found[before:]}.values())
            if view is not None:
                view.advance(1 / len(launched))
    yield from named


def cases() -> Iterator[Case]:
    """What the table has."""
    yield from (Case(case.name, partial(launch_attention, case)) for case in HEAD_CASES)
    yield from product_cases()
    yield from quantised_cases()
    yield from norm_cases()
    yield from (Case(f"{k} of {experts} experts", partial(launch_routing, experts, k)) for experts, k in MIXTURES)
    yield from logit_cases()


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


def product_cases() -> Iterator[Case]:
    """Products of few rows in every tiling, and those of a mixture's experts."""
    import torch

    from server.backends.cuda.kernels.linear import tilings

    for is_gated in (False, True):
        kind = f"bfloat16{', gated' if is_gated else ''}"
        for rows in (rows for rows in (8, 16, 32, 64) if rows <= MOST_ROWS):
            for tiling in tilings(rows, torch.bfloat16, is_gated=is_gated):
                name = f"product of {rows} rows, {kind}, tiles of {tiling.features} features"
                launch = partial(launch_product, rows, torch.bfloat16, is_gated=is_gated, tiling=tiling)
                yield Case(name, launch, tiling.resident)
        for rows in EXPERT_ROWS:
            launch = partial(launch_product, rows, torch.bfloat16, is_gated=is_gated, experts=EXPERTS)
            yield Case(f"product of {rows} rows with {EXPERTS} experts, {kind}", launch)


def launch_product(
    rows: int,
    dtype: torch.dtype,
    *,
    is_gated: bool,
    tiling: Tiling | None = None,
    inputs: int = WIDTH,
    experts: int = 0,
) -> None:
    """A product with all that may follow one. dtype: the weight's."""
    import torch

    from server.arch.spec import Activation
    from server.backends.cuda.kernels.linear import Epilogue, Workspace, multiply_rows

    outputs = WIDTH * (2 if is_gated else 1)
    x, residual = torch.zeros(rows, inputs, dtype=dtype), torch.zeros(rows, WIDTH, dtype=dtype)
    stack = (experts,) if experts else ()
    weight, bias = torch.empty(*stack, outputs, inputs, dtype=dtype), torch.zeros(outputs, dtype=dtype)
    multiply_rows(
        x,
        weight,
        Epilogue(activation=Activation.SILU) if experts else Epilogue(bias, Activation.GELU, residual),
        Workspace(torch.device("cpu"), PROCESSORS),
        is_gated=is_gated,
        tiling=tiling,
        ends=torch.zeros(experts, dtype=torch.int32) if experts else None,
    )


def quantised_cases() -> Iterator[Case]:
    """Products with quantised weights, and what rounds their inputs."""

    for kind in QUANTISED_KINDS:
        for rows, is_gated in ((8, False), (8, True), (16, False), (64, False), (64, True), (128, False)):
            name = f"product of {rows} rows, {kind}{', gated' if is_gated else ''}"
            yield Case(name, partial(launch_quantised, kind, rows, is_gated=is_gated))


def launch_quantised(kind: str, rows: int, *, is_gated: bool, only_first: bool = False) -> list[Tiling]:
    """A product in every tiling, or only in the first, with all that may follow; the tilings. kind: of `KINDS`."""
    import torch

    from server.arch.spec import Activation
    from server.backends.cuda.choice import Chooser
    from server.backends.cuda.fused import fused_gate
    from server.backends.cuda.kernels.linear import Epilogue, Workspace
    from server.backends.cuda.linear import Products
    from server.backends.cuda.quantised import CudaQuantised
    from server.quantisation.random_weight import noise

    products = Products(Chooser(None), workspace=Workspace(torch.device("cpu"), PROCESSORS))
    shape = LayerShape(QUANTISED_WIDTH * (2 if is_gated else 1), QUANTISED_WIDTH)
    weight = noise(QUANTISED_KINDS[kind], shape.features, shape.inputs, torch.device("cpu"))
    layer = CudaQuantised(weight, torch.bfloat16, is_gated=is_gated, gate=fused_gate, products=products)
    tilings = layer.tilings(rows)[: 1 if only_first else None]
    epilogue = Epilogue(zeros(shape.features), Activation.GELU, zeros(rows, QUANTISED_WIDTH))
    for tiling in tilings:
        layer.by_kernel(layer.inputs(zeros(rows, shape.inputs)), epilogue, torch.bfloat16, tiling=tiling)
    return tilings


def norm_cases() -> Iterator[Case]:
    """What stands between the matrix products of a layer."""
    from server.arch.spec import Activation
    from server.backends.cuda.fused import fused_gate

    for is_centred in (True, False):
        kind = "layer norm" if is_centred else "rms norm"
        yield Case(f"{kind} of {WIDTH}", partial(launch_norm, is_centred, 0, False))
        for deltas in (1, 2):
            for has_own_norm in (False, True):
                summands = f"{deltas} {'normalised ' if has_own_norm else ''}summand{'s' if deltas > 1 else ''}"
                yield Case(f"{kind} of {WIDTH}, {summands}", partial(launch_norm, is_centred, deltas, has_own_norm))
        yield Case(f"{kind} of 48 heads of 128", partial(launch_norm_of_heads, is_centred))
    for activation in Activation:
        yield Case(f"gate of {WIDTH}, {activation.value}", partial(fused_gate, activation, zeros(2, 2 * WIDTH)))


def launch_norm(is_centred: bool, num_deltas: int, has_own_norm: bool) -> None:
    """A norm, behind a sum where there are deltas, each with its bias, normalised or not."""
    from server.backends.cuda.fused import FusedNorm
    from server.backends.protocol import Summand

    x, weight = zeros(2, WIDTH), zeros(WIDTH)
    norm = FusedNorm(weight, weight if is_centred else None, 1e-5, is_centred=is_centred)
    if num_deltas == 0:
        norm(x)
    else:
        norm.add(x, Summand((x,) * num_deltas, (weight,) * num_deltas, norm if has_own_norm else None))


def launch_norm_of_heads(is_centred: bool) -> None:
    """The norms of queries and keys."""
    from server.backends.cuda.fused import FusedNorm

    weight = zeros(128)
    norm = FusedNorm(weight, weight if is_centred else None, 1e-5, is_centred=is_centred)
    norm.normalise_heads(norm, zeros(2, 48, 128), kv_heads=8)


def launch_routing(experts: int, top_k: int) -> None:
    """A mixture's tokens to their experts, and back."""
    from server.backends.cuda.kernels.routing import FusedRouting
    from server.backends.reference.linear import DenseFormat

    routes = FusedRouting(experts, top_k, renormalise=True)(DenseFormat(zeros(experts, 64)), zeros(3, 64))
    routes.combine(zeros(3 * top_k, WIDTH))


def logit_cases() -> Iterator[Case]:
    """What sampling asks of the logits, of one rank and of eight."""
    import torch

    from server.backends.cuda.logits import KernelLogits

    kernels, integers = KernelLogits(), torch.zeros(2, dtype=torch.int64)
    seeds = integers.view(2, 1), integers.view(2, 1), integers
    logits = zeros(2, VOCABULARY)
    for n in (1, 5):
        yield Case(f"{n} best of {VOCABULARY} logits", partial(kernels.summarise, logits, n))
    yield Case(f"race of {VOCABULARY} logits", partial(kernels.race, logits, *seeds))
    yield Case("noise of one token", partial(kernels.log_noise, *seeds, integers.view(2, 1)))
    for ranks in (1, 8):
        gather = None if ranks == 1 else partial(_gathered, ranks)
        part = torch.zeros(2, VOCABULARY // ranks)
        where = f"{VOCABULARY} logits on {ranks} rank{'s' if ranks > 1 else ''}"
        yield Case(f"top-k of {where}", partial(kernels.top_k_threshold, part, integers.view(2, 1), 1, gather))
        yield Case(f"top-p of {where}", partial(kernels.top_p_threshold, part, torch.ones(2, 1), gather))


def _gathered(ranks: int, tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor] * ranks


def zeros(*shape: int) -> torch.Tensor:
    """In bfloat16."""
    import torch

    return torch.zeros(*shape, dtype=torch.bfloat16)


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


def complaints(code: MachineCode, resident: int = 0) -> Iterator[str]:
    """What no kernel should do. resident: of a product in whole units, programs that a multiprocessor should hold."""
    from server.backends.cuda.machine_code import KIB, PROCESSORS, WHOLE_UNITS

    if code.spills or code.local_bytes:
        yield f"spills registers: {code.spills} instructions, {code.local_bytes} bytes of local memory"
    if not code.fits:
        most = PROCESSORS[code.capability].program_bytes
        yield f"needs {code.shared_bytes / KIB:.1f} KiB of shared memory, a program has {most / KIB:.0f}: cannot run"
    elif code.programs_per_processor < resident:
        yield f"its grid counts on {resident} programs per multiprocessor, {code.programs_per_processor} fit"
    if resident and not code.full_instructions[WHOLE_UNITS]:
        yield f"reads its weight without {WHOLE_UNITS}: not ahead, or not in whole units of memory"


# ---------------------------------------------------------------------------------------------------- quantised weights


QUANTISED_KINDS: Mapping[str, Kind] = {
    "int4, groups of 128, zero points": Kind(4, 128, has_zeros=True),
    "int4, groups of 128": Kind(4, 128),
    "int4, groups of 32, zero points": Kind(4, 32, has_zeros=True),
    "nf4, groups of 64": Kind(4, 64, has_levels=True),
    "int2, groups of 64, zero points": Kind(2, 64, has_zeros=True),
    "int8, whole rows": Kind(8, codes="int8"),
    "int8, groups of 128, zero points": Kind(8, 128, has_zeros=True),
    "W8A8": Kind(8, codes="int8", inputs="int8"),
    "fp8": Kind(8, codes="float8_e4m3fn", inputs="float8_e4m3fn"),
    "fp8, blocks of 128": Kind(8, 128, codes="float8_e4m3fn", inputs="float8_e4m3fn", input_group=128),
}


@dataclass(frozen=True)
class LayerShape:
    """A linear layer [F, D]; is_gated: its F rows are [gate | up]."""

    features: int
    inputs: int
    is_gated: bool = False


LLAMA_LIKE = (
    LayerShape(6144, 4096), LayerShape(4096, 4096), LayerShape(28672, 4096, True), LayerShape(4096, 14336),
)  # fmt: skip
# The layers of models that are served: name, kind, shapes.
QUANTISED_MODELS: tuple[tuple[str, str, tuple[LayerShape, ...]], ...] = (
    ("Mistral-7B AWQ", "int4, groups of 128, zero points", LLAMA_LIKE),
    (
        "Baichuan2-13B GPTQ",
        "int4, groups of 128",
        (LayerShape(15360, 5120), LayerShape(5120, 5120), LayerShape(27392, 5120, True), LayerShape(5120, 13696)),
    ),
    ("Llama-3-8B W8A8", "W8A8", LLAMA_LIKE),
    ("Llama-3-8B FP8", "fp8", LLAMA_LIKE),
)
