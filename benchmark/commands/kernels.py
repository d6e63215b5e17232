"""`lockstep-bench kernels`: compile every Triton kernel and report its resources, without a GPU; or time some on one.

A kernel that spills registers, that finds no room in a multiprocessor's shared memory, or whose loads are not pipelined
is slow in a way that is seen here before it is measured. The cases are attention for each head size of the models that
are served, matrix products of few rows in every tiling, and all that stands between and behind them, in bfloat16;
`tests/server/backends/cuda/compiled_*.py` hold some of these cases to what the tile sizes assume. Needs Triton, which
is imported only when the command runs.

With --time, on a GPU, quantised products are timed instead of compiled: for the layers of served models and some
numbers of rows each tiling of our kernel, torch's operator where it has one for such codes (`_int_mm`, `_scaled_mm`,
`_weight_int4pack_mm`), the launch that rounds the inputs, and the layer as a server computes it. A limit is the larger
one of the time to read the weight and the inputs at the bandwidth and the time to multiply at the rate of matrix units,
which is taken to be twice bfloat16's for 8 bits. Caches are emptied before each run, and the median counts. With
--write the shares of torch's operators go into `server/backends/cuda/shares.json`, by which the server takes them as
the usual way or not (`server/backends/cuda/choice.py`). Not yet run on a GPU.

Shapes: T rows, F output features, D input features.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmark.cost.devices import GPU_READ_BYTES, Probe, known
from benchmark.cost.roofline import Ceilings
from benchmark.result import BenchError, prepare_output, table, write_atomically
from benchmark.terminal import Progress, Stage, shown
from server.quantisation.random_weight import Kind, noise

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from server.backends.cuda.kernels.linear import Tiling
    from server.backends.cuda.linear import Products
    from server.backends.cuda.machine_code import MachineCode
    from server.backends.cuda.quantised import CudaQuantised


CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
PROCESSORS = 132  # to fill: those of an H200, so that the keys of few sequences are split
DECODES, MANY_DECODES, CHUNK, BLOCKS, BLOCK_SIZE = 2, 64, 20, 64, 16
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
    timing = parser.add_argument_group("products with quantised weights, on a GPU")
    timing.add_argument("--time", action="store_true", help="time every way to multiply, against its limit")
    timing.add_argument("--rows", nargs="+", type=int, default=list(ROWS), help="(default: 1 8 32 128 2048)")
    timing.add_argument("--write", action="store_true", help="write the rates of torch's operators into shares.json")
    timing.add_argument("--output", type=Path, metavar="DIR", help="folder for products.md")


def run(args: argparse.Namespace) -> int:
    """Print a Markdown table of all kernels, or of the times of products. Raises BenchError."""
    if importlib.util.find_spec("triton") is None:
        raise BenchError("Triton is not installed: it exists for Linux on x86-64, and `.[dev]` installs it")
    if args.time:
        _time_products(args)
        return 0
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
        launched = list(cases(capability))
        for case in launched:
            before = len(found)
            case.launch()
            # What is launched several times in a case is one row.
            named += ((case, code) for code in {code.ptx: code for code in found[before:]}.values())
            if view is not None:
                view.advance(1 / len(launched))
    yield from named


def cases(capability: str) -> Iterator[Case]:
    """What the table has for GPUs of one compute capability."""
    from server.backends.cuda import FLOAT8_SINCE
    from server.backends.cuda.kernels.splits import KIB
    from server.backends.cuda.machine_code import PROCESSOR_OF, number

    program_kib = PROCESSOR_OF[capability].program_bytes // KIB
    for case in HEAD_CASES:
        yield Case(case.name, partial(launch_attention, case, program_kib=program_kib))
        many = partial(launch_attention, case, MANY_DECODES, 0, program_kib)
        yield Case(f"{case.name}, many sequences", many)
    yield from product_cases()
    yield from quantised_cases(has_float8=number(capability) >= FLOAT8_SINCE)
    yield from adapted_cases()
    yield from norm_cases()
    yield from (Case(f"{k} of {experts} experts", partial(launch_routing, experts, k)) for experts, k in MIXTURES)
    yield from logit_cases()


def launch_attention(
    case: HeadCase, decodes: int = DECODES, chunk: int = CHUNK, program_kib: int | None = None
) -> None:
    """A step of decodes, whose keys are split, and a chunk of a prompt."""
    import torch

    from server.backends.cuda.attention import PagedAttention
    from server.backends.protocol import Rotation, Scores, StepMeta

    tokens, longest = decodes + chunk, BLOCKS * BLOCK_SIZE
    starts = [*range(decodes + 1), *([tokens] if chunk else [])]
    sequences, ones = len(starts) - 1, torch.ones(tokens, dtype=torch.int64)
    tables = torch.zeros(sequences, BLOCKS, dtype=torch.int64)
    on_device = torch.tensor(starts, dtype=torch.int32)
    meta = StepMeta(decodes, starts, [longest] * sequences, chunk, on_device, ones, ones, ones, ones, tables)
    kv = torch.zeros(2, 1, case.kv_heads, BLOCK_SIZE, case.head_dim, dtype=torch.bfloat16)
    heads = torch.zeros(tokens, case.heads + 2 * case.kv_heads, case.head_dim, dtype=torch.bfloat16)
    angles = torch.zeros(tokens, 1, case.rotated_pairs)
    rotation = Rotation(angles, angles, case.is_interleaved) if case.rotated_pairs else None
    slopes = () if rotation else (0.5,) * case.heads
    attention = PagedAttention(Scores(case.head_dim**-0.5, slopes, case.cap), PROCESSORS, program_kib)
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


def quantised_cases(*, has_float8: bool) -> Iterator[Case]:
    """Products with quantised weights, and what rounds their inputs."""
    for kind in (name for name, kind in QUANTISED_KINDS.items() if has_float8 or not kind.codes.startswith("float8")):
        for rows, is_gated in ((8, False), (8, True), (16, False), (64, False), (64, True), (128, False)):
            name = f"product of {rows} rows, {kind}{', gated' if is_gated else ''}"
            yield Case(name, partial(launch_quantised, kind, rows, is_gated=is_gated))
        if QUANTISED_KINDS[kind].inputs is None:
            yield Case(f"{kind}, as numbers", partial(launch_widened, kind))


def launch_quantised(kind: str, rows: int, *, is_gated: bool, only_first: bool = False) -> list[Tiling]:
    """A product in every tiling, or only in the first, with all that may follow; the tilings. kind: of `KINDS`."""
    import torch

    from server.arch.spec import Activation
    from server.backends.cuda.choice import Chooser
    from server.backends.cuda.fused import fused_gate
    from server.backends.cuda.kernels.linear import Epilogue, Workspace
    from server.backends.cuda.linear import Products
    from server.backends.cuda.quantised import CudaQuantised

    products = Products(Chooser(None), workspace=Workspace(torch.device("cpu"), PROCESSORS))
    shape = LayerShape(QUANTISED_WIDTH * (2 if is_gated else 1), QUANTISED_WIDTH)
    weight = noise(QUANTISED_KINDS[kind], shape.features, shape.inputs, torch.device("cpu"))
    layer = CudaQuantised(weight, torch.bfloat16, is_gated=is_gated, gate=fused_gate, products=products)
    tilings = layer.tilings(rows)[: 1 if only_first else None]
    epilogue = Epilogue(zeros(shape.features), Activation.GELU, zeros(rows, QUANTISED_WIDTH))
    for tiling in tilings:
        layer.by_kernel(layer.inputs(zeros(rows, shape.inputs)), epilogue, torch.bfloat16, tiling=tiling)
    return tilings


def launch_widened(kind: str) -> None:
    """A weight as numbers."""
    import torch

    from server.backends.cuda.kernels.packed import widened
    from server.backends.cuda.packing import pack

    weight = noise(QUANTISED_KINDS[kind], QUANTISED_WIDTH, QUANTISED_WIDTH, torch.device("cpu"))
    widened(pack(weight, torch.bfloat16), torch.bfloat16)


def adapted_cases() -> Iterator[Case]:
    """What adapters add to a product."""
    import torch

    for rows in (8, 64):
        for is_gated in (False, True):
            name = f"adapters of {rows} rows, bfloat16{', gated' if is_gated else ''}"
            yield Case(name, partial(launch_adapted, rows, torch.bfloat16, is_gated=is_gated))


def launch_adapted(rows: int, dtype: torch.dtype, *, is_gated: bool) -> None:
    """A layer of a captured step, as far as its adapters are concerned: what they are does not matter."""
    import torch

    from server.arch.spec import Activation
    from server.backends.cuda.kernels.adapters import finish, group, shrink
    from server.backends.cuda.kernels.linear import Epilogue

    x, table = torch.zeros(rows, WIDTH, dtype=dtype), torch.zeros(65, dtype=torch.int64)
    groups = group(torch.zeros(rows, dtype=torch.int64), num_rows=64)
    product_dtype = torch.float32 if rows == 8 else dtype
    product = torch.zeros(rows, WIDTH * (2 if is_gated else 1), dtype=product_dtype)
    shrunk = shrink(x, table, groups, dtype, most=1024)
    epilogue = Epilogue(None, Activation.SILU, None) if is_gated else Epilogue(residual=x)
    finish(product, x, shrunk, table, groups, epilogue, dtype, is_gated=is_gated, out_dtype=dtype)


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
    from server.backends.cuda.kernels.splits import KIB
    from server.backends.cuda.machine_code import ASYNCHRONOUS, MATRIX

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
    from server.backends.cuda.kernels.splits import KIB
    from server.backends.cuda.machine_code import PROCESSOR_OF, WHOLE_UNITS

    if code.spills or code.local_bytes:
        yield f"spills registers: {code.spills} instructions, {code.local_bytes} bytes of local memory"
    if not code.fits:
        most = PROCESSOR_OF[code.capability].program_bytes
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


# -------------------------------------------------------------------------------------------------------------- timed


ROWS = (1, 8, 32, 128, 2048)
GROUP = 128  # inputs of a group in `_weight_int4pack_mm`
INNER_TILES = 8  # of its packing: what torch's own tests take
TIMED_HEADERS = ["model", "layer", "rows", "way", "µs"]
OPERATORS = {"torch._int_mm": "int_mm", "torch._scaled_mm": "scaled_mm"}  # the names in shares.json

# Computes something once, and how many milliseconds that takes.
Trial = Callable[[], object]
Clock = Callable[[Trial], float]


@dataclass(frozen=True)
class Timed:
    """One way to compute one product."""

    model: str
    shape: LayerShape
    rows: int
    way: str
    milliseconds: float | None  # None: the device refuses it
    limit: float  # milliseconds
    bound: str

    @property
    def share(self) -> float:
        """Of the limit, 0 where it is refused."""
        return self.limit / self.milliseconds if self.milliseconds else 0.0

    def line(self) -> list[object]:
        """A row of the table."""
        gated = " gated" if self.shape.is_gated else ""
        layer = f"{self.shape.features} x {self.shape.inputs}{gated}"
        if self.milliseconds is None:
            return [self.model, layer, self.rows, self.way, "refused", "", self.bound]
        return [
            self.model, layer, self.rows, self.way, f"{1e3 * self.milliseconds:.1f}", f"{100 * self.share:.0f} %",
            self.bound,
        ]  # fmt: skip


def _time_products(args: argparse.Namespace) -> None:
    """Time everything and print a Markdown table. Raises BenchError."""
    import torch

    if not torch.cuda.is_available():
        raise BenchError("there is no GPU: products are timed on one; without --time it is shown what they compile to")
    from server.backends.cuda.choice import Chooser, EventClock
    from server.backends.cuda.linear import Products

    prepare_output(args.output)
    device = torch.device("cuda", 0)
    ceilings = _ceilings(torch.cuda.get_device_name(device))
    found: list[Timed] = []
    stages = [Stage(model, len(shapes)) for model, _, shapes in QUANTISED_MODELS]
    with torch.inference_mode(), shown("timing products", stages) as view:
        products = Products(Chooser(None))
        for model in view.each(QUANTISED_MODELS):
            found += timed(args.rows, EventClock(device), products, ceilings, device, torch.bfloat16, [model])
            _keep(found, ceilings, args)
    print(_products(found, ceilings))


def _products(found: Sequence[Timed], ceilings: Ceilings) -> str:
    return table([*TIMED_HEADERS, f"% of limit ({ceilings.source})", "bound by"], [row.line() for row in found])


def _keep(found: Sequence[Timed], ceilings: Ceilings, args: argparse.Namespace) -> None:
    """Write what was found so far: after each model, as the time may be over before the last."""
    if args.output:
        write_atomically(args.output / "products.md", f"{_products(found, ceilings)}\n")
    if args.write:
        write_shares(found)
        if args.output:  # the checkout of a machine that is lent does not come back
            write_shares(found, args.output / "shares.json")


def _ceilings(name: str) -> Ceilings:
    """Of a GPU, by its data sheet, or else measured."""
    if sheet := known(name):
        return sheet.dense_ceilings("bfloat16", 1)
    probe = Probe("cuda", "bfloat16", threads=1, num_devices=1, step_weight_bytes=GPU_READ_BYTES)
    for _ in range(3):
        probe.measure()
    return probe.best


def timed(
    rows: Sequence[int],
    clock: Clock,
    products: Products,
    ceilings: Ceilings,
    device: torch.device,
    dtype: torch.dtype,
    models: Sequence[tuple[str, str, Sequence[LayerShape]]] = QUANTISED_MODELS,
) -> Iterator[Timed]:
    """Every way for every layer and number of rows. dtype: of the inputs."""
    import torch

    from server.backends.cuda.fused import fused_gate
    from server.backends.cuda.quantised import CudaQuantised

    for model, kind, shapes in models:
        for shape in shapes:
            weight = noise(QUANTISED_KINDS[kind], shape.features, shape.inputs, device)
            layer = CudaQuantised(weight, dtype, is_gated=shape.is_gated, gate=fused_gate, products=products)
            for count in rows:
                x = torch.randn(count, shape.inputs, device=device).to(dtype)
                limit, bound = limit_of(layer, shape, count, ceilings)
                for way, trial in trials(layer, shape, x, weight.scale.device):
                    yield Timed(model, shape, count, way, _time(clock, trial), limit, bound)


def limit_of(layer: CudaQuantised, shape: LayerShape, rows: int, ceilings: Ceilings) -> tuple[float, str]:
    """Milliseconds that such a product takes at least, and which of both binds it."""
    is_wide = layer.inputs.is_rounded
    outputs = shape.features // (2 if shape.is_gated else 1)
    num_bytes = layer.nbytes + rows * (shape.inputs * (1 if is_wide else 2) + outputs * 2)
    flops = 2 * rows * shape.features * shape.inputs
    moving = num_bytes / ceilings.bytes_per_second
    computing = flops / (ceilings.flops_per_second * (2 if is_wide else 1))
    return 1e3 * max(moving, computing), "bandwidth" if moving >= computing else "arithmetic"


def trials(layer: CudaQuantised, shape: LayerShape, x: Tensor, device: torch.device) -> Iterator[tuple[str, Trial]]:
    """The ways to compute a product, by name."""
    from server.arch.spec import Activation
    from server.backends.cuda.kernels.linear import Epilogue

    activation = Activation.SILU if shape.is_gated else None
    epilogue, taken = Epilogue(activation=activation), layer.inputs(x)
    for tiling in layer.tilings(len(x)):
        name = f"kernel, {tiling.rows} rows x {tiling.features} features"
        yield name, partial(layer.by_kernel, taken, epilogue, x.dtype, tiling=tiling)
    if layer.inputs.is_rounded:
        yield "rounding alone", partial(layer.inputs, x)
    else:
        yield "widened", partial(layer.by_widening, taken, epilogue, x.dtype)
    if layer.operator is not None:
        name = next(name for name, short in OPERATORS.items() if short == layer.operator)
        yield name, partial(layer.by_torch, taken, epilogue, x.dtype)
    if layer.packed.bits == 4 and device.type == "cuda":
        yield "torch._weight_int4pack_mm", _Int4Pack(shape, x)
    yield "the layer", partial(layer, x, None, activation)


class _Int4Pack:
    """torch's product with weights in 4 bits, which are noise of its own; made when it is first asked for."""

    def __init__(self, shape: LayerShape, x: Tensor):
        self._shape = shape
        self._x = x
        self._packed: tuple[Tensor, Tensor] | None = None

    def __call__(self) -> object:
        import torch

        if self._packed is None:
            features, inputs = self._shape.features, self._shape.inputs
            pairs = torch.randint(0, 256, (features, inputs // 2), dtype=torch.uint8, device=self._x.device)
            scales = torch.rand(inputs // GROUP, features, 2, device=self._x.device).to(torch.bfloat16)
            self._packed = torch._convert_weight_to_int4pack(pairs, INNER_TILES), scales
        return torch._weight_int4pack_mm(self._x, self._packed[0], GROUP, self._packed[1])


def _time(clock: Clock, trial: Trial) -> float | None:
    """Milliseconds; None where an operator refuses its shapes or this GPU."""
    try:
        return clock(trial)
    except RuntimeError:
        return None


def write_shares(found: Sequence[Timed], path: Path | None = None) -> None:
    """Keep what torch's operators reach, as the server reads it."""
    from server.backends.cuda.choice import SHARES_FILE, MeasuredShare, Shares

    rows = tuple(
        MeasuredShare(OPERATORS[row.way], row.shape.features, row.shape.inputs, row.rows, round(row.share, 3))
        for row in found
        if row.way in OPERATORS
    )
    Shares(rows).write(path or SHARES_FILE)
