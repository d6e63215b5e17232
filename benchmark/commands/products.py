"""`lockstep-bench products`: what every way to multiply with a quantised weight takes on this GPU, against its limit.

For the layers of served models and some numbers of rows each tiling of our kernel is timed, torch's operator where it
has one for such codes (`_int_mm`, `_scaled_mm`, `_weight_int4pack_mm`), the launch that rounds the inputs, and the
layer as a server computes it. A limit is the larger one of the time to read the weight and the inputs at the
bandwidth and the time to multiply at the rate of matrix units, which is taken to be twice bfloat16's for 8 bits;
bandwidth and rate are the data sheet's, or measured where none is known. Caches are emptied before each run, and the
median counts.

With --write the shares of torch's operators go into `server/backends/cuda/shares.json`, by which the server takes them
as the usual way or not (`server/backends/cuda/choice.py`). Not yet run on a GPU.

Shapes: T rows, F output features, D input features.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmark.commands.kernels import QUANTISED_KINDS, QUANTISED_MODELS, LayerShape
from benchmark.cost.ceilings import GPU_READ_BYTES, Ceilings, Probe
from benchmark.cost.devices import known
from benchmark.result import BenchError, prepare_output, table
from benchmark.terminal import Stage, shown
from server.quantisation.random_weight import noise

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from server.backends.cuda.linear import Products
    from server.backends.cuda.quantised import CudaQuantised


ROWS = (1, 8, 32, 128, 2048)
GROUP = 128  # inputs of a group in `_weight_int4pack_mm`
INNER_TILES = 8  # of its packing: what torch's own tests take
HEADERS = ["model", "layer", "rows", "way", "µs"]
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), help="(default: 1 8 32 128 2048)")
    parser.add_argument("--write", action="store_true", help="write the rates of torch's operators into shares.json")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for products.md")


def run(args: argparse.Namespace) -> int:
    """Time everything and print a Markdown table. Raises BenchError."""
    import torch

    if not torch.cuda.is_available():
        raise BenchError("there is no GPU: products are timed on one; `kernels` shows what they compile to")
    if importlib.util.find_spec("triton") is None:
        raise BenchError("Triton is not installed: it exists for Linux on x86-64, and `.[dev]` installs it")
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
    text = table([*HEADERS, f"% of limit ({ceilings.source})", "bound by"], [row.line() for row in found])
    print(text)
    if args.output:
        (args.output / "products.md").write_text(f"{text}\n")
    if args.write:
        write_shares(found)
    return 0


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
    if layer.operator is not None:
        name = next(name for name, short in OPERATORS.items() if short == layer.operator)
        yield name, partial(layer.by_torch, taken, epilogue, x.dtype)
    if layer.inputs.is_rounded:
        yield "rounding alone", partial(layer.inputs, x)
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
