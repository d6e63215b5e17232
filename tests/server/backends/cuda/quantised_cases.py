"""What quantised products on a GPU are checked on, in the interpreter and on a GPU: against the reference's meaning.

The modules under test are imported by the checks, not here: see `kernel_cases.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from server.arch.spec import Activation
from server.backends.reference.linear import DenseFormat, LoopedExperts, stock_gate
from server.backends.reference.quantised import QuantisedFormat
from server.quantisation.stored import QuantisedWeight, RoundedInputs, contiguous_groups
from tests.server.backends.cuda.kernel_cases import MANY_SPLITS, ONE_SPLIT, random
from tests.server.backends.cuda.linear_cases import close, products

FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class WeightCase:
    """How a weight is stored."""

    name: str
    bits: int = 4
    group: int = 32  # inputs; 0: the whole row
    zero: str = "none"  # none, fixed, each, fractions
    has_levels: bool = False
    is_ordered: bool = True
    columns: tuple[int, int] | None = None  # the part of a rank
    inputs: RoundedInputs | None = None
    kind: str = "unsigned"  # codes: unsigned, signed, float8
    features: int = 40
    num_inputs: int = 192

    def weight(self, device: torch.device, features: int | None = None, seed: int = 0) -> QuantisedWeight:
        """Products with it are around 1."""
        made = torch.Generator().manual_seed(seed + len(self.name))
        features, inputs = features or self.features, self.num_inputs
        groups = contiguous_groups(self.group, inputs)
        if not self.is_ordered:
            groups = groups[torch.randperm(inputs, generator=made)]
        count = int(groups.max()) + 1
        most = 1 << self.bits
        codes = torch.randint(0, most, (features, inputs), generator=made)
        if self.kind == "signed":
            codes = codes - most // 2
        stored = {"unsigned": codes.byte(), "signed": codes.to(torch.int8)}.get(self.kind)
        if stored is None:
            stored = torch.randn(features, inputs, generator=made).mul(30).to(FLOAT8)
        zero = {
            "none": None,
            "fixed": torch.full((features, count), most / 2),
            "each": torch.randint(0, most + 1, (features, count), generator=made).float(),
            "fractions": torch.rand(features, count, generator=made) * most,
        }[self.zero]
        spread = 30.0 if self.kind == "float8" else most / 4
        scale = (torch.rand(features, count, generator=made) + 0.5) / spread / inputs**0.5
        levels = torch.linspace(-1, 1, most).pow(3) * most / 2 if self.has_levels else None
        whole = QuantisedWeight(stored, self.bits, scale.half().float(), groups, zero, levels, self.inputs)
        part = whole if self.columns is None else whole.columns(*self.columns)
        return part.to(device)


def each_token(dtype: torch.dtype, **options: Any) -> RoundedInputs:
    """Inputs whose scales the tokens decide."""
    return RoundedInputs(dtype, **options)


WEIGHT_ONLY = [
    WeightCase("int4 in groups of 32", zero="each"),
    WeightCase("int4 in groups of 64", group=64, zero="fixed"),
    WeightCase("int4 in groups of 128", group=128, zero="each", num_inputs=384),
    WeightCase("int4 in groups of 96", group=96, zero="fixed"),
    WeightCase("int4 in groups of 256", group=256, zero="each", num_inputs=512),
    WeightCase("int4 in whole rows", group=0, zero="fixed"),
    WeightCase("int4 in whole rows, zeros", group=0, zero="each"),
    WeightCase("int4, a last group that is short", group=64, zero="each", num_inputs=160),
    WeightCase("int4, groups out of order", zero="each", is_ordered=False),
    WeightCase("int4, groups out of order and cut", zero="each", is_ordered=False, columns=(50, 150)),
    WeightCase("int4, a cut group", group=64, zero="each", columns=(96, 192)),
    WeightCase("int4, both ends cut", group=64, zero="each", columns=(40, 170)),
    WeightCase("int4, groups of 24", group=24, zero="each"),
    WeightCase("int4, zeros in fractions", zero="fractions"),
    WeightCase("nf4", group=64, has_levels=True),
    WeightCase("nf4, cut", group=64, has_levels=True, columns=(32, 128)),
    WeightCase("int3", bits=3, group=64, zero="each"),
    WeightCase("int2", bits=2, group=64, zero="each", num_inputs=320),
    WeightCase("int8 in whole rows", bits=8, group=0, kind="signed"),
    WeightCase("int8 in groups", bits=8, group=64, zero="each"),
    WeightCase("int8 in groups out of order", bits=8, group=64, zero="each", is_ordered=False),
    WeightCase("int8, odd inputs", bits=8, group=0, kind="signed", num_inputs=77),
    WeightCase("int4, odd inputs", group=0, zero="fixed", num_inputs=77),
    WeightCase("levels in groups of 16", group=16, has_levels=True),
    WeightCase("levels in groups of 32", has_levels=True),
    # So many that they are divided among programs: 16 steps, and 33, of which the last of eight programs has none.
    WeightCase("int4, divided", group=128, zero="each", num_inputs=2048),
    WeightCase("int4, zeros in fractions, divided", zero="fractions", num_inputs=2048),
    WeightCase("nf4, divided", group=64, has_levels=True, num_inputs=2048),
    WeightCase("int4, divided, not all have a part", group=128, zero="each", features=32, num_inputs=4224),
]
INT8 = each_token(torch.int8)
ROUNDED = [
    WeightCase("w8a8", bits=8, group=0, kind="signed", inputs=INT8),
    WeightCase("w8a8, odd inputs", bits=8, group=0, kind="signed", inputs=INT8, num_inputs=77),
    WeightCase("w8a8, fixed", bits=8, group=0, kind="signed", inputs=each_token(torch.int8, scale=torch.tensor(0.02))),
    WeightCase(
        "w8a8, fixed with a zero point",
        bits=8,
        group=0,
        kind="signed",
        inputs=each_token(torch.int8, scale=torch.tensor(0.02), zero=torch.tensor(-7.0)),
    ),
    WeightCase("w8a8, groups", bits=8, group=64, kind="signed", inputs=INT8),
    WeightCase("w4a8, groups", bits=4, group=32, zero="fixed", inputs=INT8),
    WeightCase("fp8", bits=8, group=0, kind="float8", inputs=each_token(FLOAT8)),
    WeightCase("fp8, at most", bits=8, group=0, kind="float8", inputs=each_token(FLOAT8, most=torch.tensor(0.004))),
    WeightCase("fp8, fixed", bits=8, group=0, kind="float8", inputs=each_token(FLOAT8, scale=torch.tensor(0.01))),
    WeightCase("fp8, blocks", bits=8, group=128, kind="float8", inputs=each_token(FLOAT8, group=128), num_inputs=320),
    WeightCase("w8a8, divided", bits=8, group=0, kind="signed", inputs=INT8, num_inputs=2048),
]
# The part that a rank has of a layer whose inputs are divided.
CUT = [
    WeightCase("w8a8, cut", bits=8, group=0, kind="signed", inputs=INT8, columns=(96, 192)),
    WeightCase("fp8, cut", bits=8, group=0, kind="float8", inputs=each_token(FLOAT8), columns=(96, 192)),
    WeightCase(
        "fp8, blocks cut",
        bits=8,
        group=128,
        kind="float8",
        inputs=each_token(FLOAT8, group=128),
        num_inputs=640,
        columns=(192, 480),
    ),
]


def layer(weight: QuantisedWeight, dtype: torch.dtype, *, is_gated: bool, processors: int, maximum: Any = None) -> Any:
    """A format of the backend."""
    from server.backends.cuda.packing import why_not_packed
    from server.backends.cuda.quantised import CudaQuantised

    assert why_not_packed(weight) is None
    shared = products(weight.device, processors)
    return CudaQuantised(weight, dtype, is_gated=is_gated, gate=stock_gate, products=shared, maximum=maximum)


def check_weight_only(
    case: WeightCase, rows: int, dtype: torch.dtype, device: torch.device, *, is_gated: bool = False
) -> None:
    """As the dequantised weight in float32, with all that may follow, split or not, and its memory is as packed."""
    from server.backends.cuda.quantised import MOST_MEASURED_ROWS

    features = case.features * (2 if is_gated else 1)
    weight = case.weight(device, features)
    x = random(rows, weight.shape[1], dtype=dtype, device=device)
    bias, residual = (random(*size, dtype=dtype, device=device) for size in ((features,), (rows, case.features)))
    dense = DenseFormat(weight.dequantised(), is_gated=is_gated)
    for processors in (ONE_SPLIT, MANY_SPLITS):
        made = layer(weight, dtype, is_gated=is_gated, processors=processors)
        expected = dense(x.float(), bias.float(), Activation.SILU, residual.float())
        close(expected, made(x, bias, Activation.SILU, residual), dtype)
        assert not made._products.workspace(device).counters.any()
        if not is_gated:
            close(dense(x.float(), None), made(x, None), dtype)
        found = made.finest(x, bias)
        assert (torch.float32 if rows <= MOST_MEASURED_ROWS else dtype) == found.dtype
        close(dense.finest(x.float(), bias.float()), found, dtype)


def check_widened(case: WeightCase, dtype: torch.dtype, device: torch.device, *, is_gated: bool = False) -> None:
    """As `check_weight_only`, by the weight as numbers, as thousands of rows are multiplied."""
    from server.backends.cuda.kernels.linear import Epilogue
    from server.backends.cuda.quantised import MOST_UNPACKED_ROWS

    features = case.features * (2 if is_gated else 1)
    weight = case.weight(device, features)
    x = random(5, weight.shape[1], dtype=dtype, device=device)
    bias, residual = (random(*size, dtype=dtype, device=device) for size in ((features,), (5, case.features)))
    made = layer(weight, dtype, is_gated=is_gated, processors=ONE_SPLIT)
    (way,) = made.ways(2 * MOST_UNPACKED_ROWS)
    assert (dtype != torch.float32) is (way == made.by_widening) and way not in made.ways(MOST_UNPACKED_ROWS)
    dense = DenseFormat(weight.dequantised(), is_gated=is_gated)
    found = made.by_widening(made.inputs(x), Epilogue(bias, Activation.SILU, residual), dtype)
    close(dense(x.float(), bias.float(), Activation.SILU, residual.float()), found, dtype)


def check_rounded(case: WeightCase, rows: int, dtype: torch.dtype, device: torch.device) -> None:
    """As the reference's emulation: to the last bit in int8 and one group, else but for the order of sums."""
    from server.backends.cuda.kernels.linear import Epilogue

    weight = case.weight(device)
    x = random(rows, weight.shape[1], dtype=dtype, device=device)
    bias = random(case.features, dtype=dtype, device=device)
    largest = (lambda found: found.clamp(min=3.0)) if case.columns else None
    expected = QuantisedFormat(weight.to(torch.device("cpu")), largest)(x.cpu(), bias.cpu()).to(device)
    for processors in (ONE_SPLIT, MANY_SPLITS):
        made = layer(weight, dtype, is_gated=False, processors=processors, maximum=largest)
        for way in made.ways(rows):
            found = way(made.inputs(x), Epilogue(bias), dtype)
            if case.inputs is not None and case.inputs.dtype == torch.int8 and case.group == 0:
                assert torch.equal(expected, found), case
            else:
                close(expected.float(), found, dtype)


def check_codes(case: WeightCase, rows: int, dtype: torch.dtype, device: torch.device) -> None:
    """Inputs become the codes of the reference, with its scales, to the last bit."""
    from server.backends.reference.quantised import InputRounding

    weight = case.weight(device)
    x = random(rows, weight.shape[1], dtype=dtype, device=device)
    x[0] = 0
    x[-1] *= 1e-3
    on_cpu = weight.to(torch.device("cpu"))
    assert on_cpu.inputs is not None
    expected, scale = InputRounding(on_cpu, on_cpu.inputs, None)(x.cpu())
    made = layer(weight, dtype, is_gated=False, processors=ONE_SPLIT)
    codes, found_scale = made.inputs(x)
    lead = made.packed.lead
    zero = 0 if on_cpu.inputs.zero is None else on_cpu.inputs.zero
    assert torch.equal(expected, codes[:, lead : lead + weight.shape[1]].float().cpu() - zero)
    assert 0 == codes[:, :lead].float().abs().sum() == codes[:, lead + weight.shape[1] :].float().abs().sum()
    first = on_cpu.first_input // on_cpu.inputs.group if on_cpu.inputs.group else 0
    assert torch.equal(scale[:, first : first + found_scale.shape[1]], found_scale.cpu())


def check_grouped(case: WeightCase, rows: int, dtype: torch.dtype, device: torch.device, processors: int) -> None:
    """All experts in one launch as one after the other; gated, then not."""
    from server.backends.cuda.quantised import CudaQuantised, grouped

    experts = 3
    shares = [0, max(rows - 2, 1), rows]
    ends = torch.tensor(shares, dtype=torch.int32, device=device)
    for is_gated in (True, False):
        features = case.features * (2 if is_gated else 1)
        weights = [case.weight(device, features, seed) for seed in range(experts)]
        x = random(rows, weights[0].shape[1], dtype=dtype, device=device)
        shared = {"is_gated": is_gated, "gate": stock_gate, "products": products(device, processors)}
        made = grouped([CudaQuantised(weight, dtype, **shared) for weight in weights], **shared)
        assert made is not None
        exact = LoopedExperts([QuantisedFormat(weight, None, is_gated=is_gated) for weight in weights])
        close(exact(x.float(), ends, Activation.SILU), made(x, ends, Activation.SILU), dtype)
        close(exact(x.float(), ends), made(x, ends), dtype)
        bias = random(experts, features, dtype=dtype, device=device)
        close(exact(x.float(), ends, Activation.RELU, bias.float()), made(x, ends, Activation.RELU, bias), dtype)
