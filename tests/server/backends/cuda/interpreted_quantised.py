"""The quantised products of the backend for GPUs on a CPU, in Triton's interpreter: run by `test_triton.py`.

bfloat16 is left out: the interpreter computes on its bit patterns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from benchmark.commands import kernels as kernels_command
from benchmark.commands.kernels import QUANTISED_KINDS, LayerShape
from benchmark.cost.roofline import Ceilings
from server.backends.cuda.backend import CudaBackend
from server.backends.cuda.choice import MeasuredShare, Shares
from server.backends.cuda.packing import pack, why_not_packed
from server.backends.cuda.quantised import CudaQuantised
from server.backends.reference.linear import stock_gate
from server.backends.reference.quantised import QuantisedFormat
from server.quantisation.random_weight import noise
from server.quantisation.stored import RoundedInputs
from tests.combinations import by_turns
from tests.server.backends.cuda.interpreted_cases import check_model, inside, interpreted_backend, quick_calls
from tests.server.backends.cuda.kernel_cases import MANY_SPLITS, ONE_SPLIT, in_suite
from tests.server.backends.cuda.linear_cases import products
from tests.server.backends.cuda.quantised_cases import (
    CUT,
    ROUNDED,
    WEIGHT_ONLY,
    WeightCase,
    check_codes,
    check_grouped,
    check_rounded,
    check_weight_only,
    check_widened,
)

__all__ = ["inside", "quick_calls"]

# numpy, which interprets, says what a GPU leaves unsaid.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
CPU = torch.device("cpu")
BY_NAME = {case.name: case for case in (*WEIGHT_ONLY, *ROUNDED, *CUT)}


FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "fp8e4nv": torch.float8_e4m3fn}


@pytest.fixture(autouse=True, scope="module")
def exact_float8() -> Iterator[None]:
    """Numbers become float8 as GPUs and torch make them: the interpreter forgets to carry where it rounds."""

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        bits = torch.from_numpy(np.ascontiguousarray(values).view(f"uint{source.primitive_bitwidth}"))
        found = bits.view(FLOATS[source.name]).to(FLOATS[target.name])
        return found.view(getattr(torch, f"uint{target.primitive_bitwidth}")).numpy()

    with patch.object(interpreter, "_convert_float", convert):
        yield


# Of groups, zeros, levels, bits, orders and cuts each once, in 32 bits or in 16.
IN_32_BITS = [
    "int4 in groups of 96",
    "int4 in whole rows, zeros",
    "int4, a last group that is short",
    "int4, groups out of order and cut",
    "int4, both ends cut",
    "levels in groups of 16",
    "int2",
    "int8 in groups out of order",
    "int8, odd inputs",
    "int4, divided, not all have a part",
]
IN_16_BITS = ["int4 in groups of 128", "int4, zeros in fractions", "nf4, cut", "int3", "nf4, divided"]


@pytest.mark.parametrize("name", in_suite(IN_32_BITS, [case.name for case in WEIGHT_ONLY]))
def test_weight_only_products_equal_the_reference(name: str) -> None:
    check_weight_only(BY_NAME[name], 3, torch.float32, CPU)


@pytest.mark.parametrize("name", in_suite(IN_16_BITS, [case.name for case in WEIGHT_ONLY[:3] + WEIGHT_ONLY[12:18]]))
def test_weight_only_products_in_16_bits_are_close_to_the_reference(name: str) -> None:
    check_weight_only(BY_NAME[name], 3, torch.float16, CPU)


@pytest.mark.parametrize("name", in_suite(IN_32_BITS + IN_16_BITS, [case.name for case in WEIGHT_ONLY]))
def test_products_of_thousands_of_rows_take_the_weight_as_numbers(name: str) -> None:
    check_widened(BY_NAME[name], torch.float16, CPU)
    check_widened(BY_NAME[name], torch.float16, CPU, is_gated=True)


@pytest.mark.parametrize(
    ("rows", "is_gated"), in_suite([(1, True), (9, False), (130, True)], product((1, 9, 40, 130, 260), (False, True)))
)
def test_many_rows_and_gates(rows: int, is_gated: bool) -> None:
    check_weight_only(BY_NAME["int4 in groups of 32"], rows, torch.float16, CPU, is_gated=is_gated)


@pytest.mark.parametrize("name", ["int4 in whole rows, zeros", "nf4", "int8 in groups", "int8 in whole rows"])
def test_gates_of_other_weights(name: str) -> None:
    check_weight_only(BY_NAME[name], 2, torch.float16, CPU, is_gated=True)


# As many rows as one tile has and more, by turns.
ROUNDED_NAMES = [case.name for case in (*ROUNDED, *CUT)]


@pytest.mark.parametrize(("name", "rows"), in_suite(by_turns(ROUNDED_NAMES, (2, 19)), product(ROUNDED_NAMES, (2, 19))))
def test_products_of_rounded_inputs_equal_the_emulation(name: str, rows: int) -> None:
    check_rounded(BY_NAME[name], rows, torch.float32, CPU)


@pytest.mark.parametrize("case", [*ROUNDED, *CUT], ids=lambda case: case.name)
def test_inputs_are_rounded_as_the_reference_does(case: WeightCase) -> None:
    check_codes(case, 60, torch.float16, CPU)


@pytest.mark.parametrize(
    ("name", "rows", "processors"),
    [
        ("int4 in groups of 32", 20, ONE_SPLIT),
        ("int4, groups out of order", 2, MANY_SPLITS),
        ("int8 in whole rows", 2, MANY_SPLITS),
        ("w8a8", 20, ONE_SPLIT),
    ],
)
def test_experts_in_one_launch_equal_one_after_the_other(name: str, rows: int, processors: int) -> None:
    check_grouped(BY_NAME[name], rows, torch.float32, CPU, processors)


@pytest.mark.parametrize("quantise", in_suite(["int8"], ["eetq"]))
def test_a_quantised_mixture_gives_the_tokens_of_the_reference(quantise: str, tmp_path: Path) -> None:
    """A dense one: `interpreted_kernels.py`."""
    check_model("mixtral", tmp_path, {"num_hidden_layers": 1}, quantise=quantise)


def test_what_is_measured_on_a_gpu_runs_but_for_the_clock(tmp_path: Path) -> None:
    """Every way of every layer, with shapes in miniature; torch's operators decide by what was measured."""
    shape, gated = LayerShape(64, 128), LayerShape(64, 128, is_gated=True)
    models = [("model", kind, (shape, gated)) for kind in ("int4, groups of 128, zero points", "W8A8")]

    def clock(trial: Callable[[], object]) -> float:
        trial()
        return 0.5

    shared = products(CPU, ONE_SPLIT)
    found = list(kernels_command.timed([2, 20], clock, shared, Ceilings(1e9, 1e12), CPU, torch.float16, models))
    assert {"torch._int_mm", "rounding alone", "the layer"} < {row.way for row in found}
    assert all(row.milliseconds is not None for row in found if row.rows > 16 or "torch" not in row.way)
    path = tmp_path / "shares.json"
    kernels_command.write_shares(found, path)
    shares = Shares.read(path)
    assert {"int_mm"} == {row.operator for row in shares.measured}
    assert not shares.is_good("int_mm", 64, 128, 20) and not shares.is_good("scaled_mm", 64, 128, 20)
    good = Shares((MeasuredShare("int_mm", 64, 128, 2048, 0.9), *shares.measured))
    assert good.is_good("int_mm", 64, 128, 1500) and not good.is_good("int_mm", 64, 128, 17)


@pytest.fixture
def ours() -> Iterator[CudaBackend]:
    with interpreted_backend() as backend:
        yield backend


def test_what_no_kernel_multiplies_is_left_to_the_reference_and_said(ours: CudaBackend) -> None:
    weight = BY_NAME["int4 in groups of 32"].weight(CPU)
    odd = replace(weight, levels=torch.linspace(-1, 1, 16))  # and zero points
    assert isinstance(ours.linear(weight), CudaQuantised)
    assert "Triton kernels" == ours.description
    x = torch.randn(2, 192)
    torch.testing.assert_close(x @ odd.dequantised().t(), ours.linear(odd)(x, None))
    expected = "quantised layers in stock operators: a table of levels beside zero points has no kernel"
    assert f"Triton kernels; {expected}" == ours.description
    assert ours.why_not_captured(None, "some", 1) is None  # type: ignore[arg-type]


REFUSED = {
    "float8 weights without float8 inputs": replace(BY_NAME["fp8"], inputs=None),
    "different kinds of numbers": replace(BY_NAME["fp8"], inputs=RoundedInputs(torch.int8)),
    "cut or out of order": replace(BY_NAME["w8a8, groups"], inputs=RoundedInputs(torch.int8, group=32)),
    "a zero point have no kernel": replace(
        BY_NAME["w8a8, groups"], inputs=RoundedInputs(torch.int8, scale=torch.tensor(0.1), zero=torch.tensor(3.0))
    ),
    "need 9 bits": replace(BY_NAME["int8 in groups"], inputs=RoundedInputs(torch.int8)),
}


@pytest.mark.parametrize("said", REFUSED)
def test_a_weight_without_a_kernel_says_why(said: str) -> None:
    assert said in str(why_not_packed(REFUSED[said].weight(CPU)))


@pytest.mark.parametrize(
    ("name", "expected"), [("w8a8, fixed", "different layouts"), ("int4 in groups of 32", None), ("w8a8", None)]
)
def test_experts_that_are_called_one_by_one_are_not_captured(
    name: str, expected: str | None, ours: CudaBackend
) -> None:
    case = BY_NAME[name]
    weights = [case.weight(CPU, seed=seed) for seed in range(3)]
    experts = ours.grouped(weights, 3)
    why = ours.why_not_captured(None, "some", 1)  # type: ignore[arg-type]
    assert (why is None) if expected is None else (expected in str(why) and expected in ours.description)
    x, ends = torch.randn(4, 192), torch.tensor([1, 1, 4], dtype=torch.int32)
    exact = [QuantisedFormat(weight, None) for weight in weights]
    found = experts(x, ends)
    torch.testing.assert_close(torch.cat([exact[0](x[:1], None), exact[2](x[1:], None)]), found, atol=1e-4, rtol=1e-4)


def test_memory_is_that_of_the_codes() -> None:
    weight = WeightCase("shape", group=128, zero="each", features=256, num_inputs=4096).weight(CPU)
    packed = pack(weight, torch.float16)
    assert 256 * 4096 // 2 + 256 * 32 * (2 + 1) == packed.nbytes


@pytest.mark.parametrize("shares", [Shares(), Shares((MeasuredShare("int_mm", 64, 128, 32, 0.8),))], ids=["no", "good"])
def test_torchs_operator_is_the_usual_way_where_it_was_measured_to_be_good(shares: Shares) -> None:
    shared = products(CPU, ONE_SPLIT)
    shared.shares = shares
    weight = noise(QUANTISED_KINDS["W8A8"], 64, 128, CPU)
    layer = CudaQuantised(weight, torch.float32, gate=stock_gate, products=shared)
    assert (layer.by_torch == layer.ways(32)[0]) == bool(shares.measured)
    assert layer.by_torch not in layer.ways(16)  # which refuses so few rows
    assert layer.by_torch in layer.ways(17)
