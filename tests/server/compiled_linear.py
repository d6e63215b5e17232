"""The matrix products of the backend for GPUs through the compiler, for an H200 and without one: see `test_triton.py`.

Beside what `compiled_kernels.py` asks, the machine code must keep everything in registers, and read the weight in whole
units of memory, ahead of its use: a decode is as fast as that.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from server.arch.spec import Activation
from server.backends.cpu.device import CpuDevice
from server.backends.cuda.backend import CudaBackend
from server.backends.cuda.fused import fused_gate
from server.backends.cuda.kernels.linear import Epilogue, Tiling, Workspace, multiply_rows, tilings
from server.backends.cuda.linear import CudaDense, CudaInt8
from server.layers.mlp import MoeMlp
from tests.server.compiled_kernels import CPU, SHARED_MEMORY_BYTES, NoGpu
from tests.server.kernel_cases import MANY_SPLITS
from tests.server.linear_cases import products

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
REGISTERS_PER_PROCESSOR = 64 * 1024
FEATURES, INPUTS = 4096, 4096


@dataclass(frozen=True)
class MachineCode:
    """What a kernel was compiled to."""

    instructions: Counter[str]
    registers: int  # of a thread
    stack_bytes: int
    local_bytes: int
    shared_bytes: int


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[MachineCode]:
    """What each launch is compiled to, instead of being launched."""
    found: list[MachineCode] = []
    run = JITFunction.run

    def only_compile(kernel: JITFunction, *args: object, **kwargs: object) -> None:
        result = run(kernel, *args, **kwargs | {"warmup": True})
        path = tmp_path / "kernel.cubin"
        path.write_bytes(result.asm["cubin"])
        found.append(read_machine_code(path, result.metadata.shared))

    monkeypatch.setattr(JITFunction, "run", only_compile)
    triton.runtime.driver.set_active(NoGpu())
    return found


def read_machine_code(path: Path, shared_bytes: int) -> MachineCode:
    usage, code = (
        subprocess.run([*command, str(path)], capture_output=True, text=True, check=True).stdout
        for command in ((TOOLS / "cuobjdump", "-res-usage"), (TOOLS / "nvdisasm",))
    )
    registers, stack, local = (
        int(value) for value in re.findall(r"Function _\w+:\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)[0]
    )
    return MachineCode(Counter(re.findall(r"\b[A-Z][A-Z0-9]+(?:\.\w+)*", code)), registers, stack, local, shared_bytes)


def multiply(
    rows: int,
    dtype: torch.dtype,
    *,
    is_gated: bool,
    tiling: Tiling | None = None,
    inputs: int = INPUTS,
    experts: int = 0,
) -> None:
    """A product with all that may follow one."""
    outputs = FEATURES * (2 if is_gated else 1)
    kind = torch.bfloat16 if dtype == torch.int8 else dtype
    x, residual = torch.zeros(rows, inputs, dtype=kind), torch.zeros(rows, FEATURES, dtype=kind)
    stack = (experts,) if experts else ()
    weight, scale = torch.zeros(*stack, outputs, inputs, dtype=dtype), torch.zeros(*stack, outputs, dtype=kind)
    multiply_rows(
        x,
        weight,
        scale if dtype == torch.int8 else None,
        Epilogue(activation=Activation.SILU) if experts else Epilogue(scale.to(kind), Activation.GELU, residual),
        Workspace(CPU, MANY_SPLITS),
        is_gated=is_gated,
        tiling=tiling,
        ends=torch.zeros(experts, dtype=torch.int32) if experts else None,
    )


def check(code: MachineCode, tiling: Tiling) -> None:
    """Nothing is spilled, and as many programs fit on a multiprocessor as the grid counts on."""
    assert 0 == code.stack_bytes == code.local_bytes
    assert code.shared_bytes * tiling.resident <= SHARED_MEMORY_BYTES
    assert code.registers * 32 * tiling.warps * tiling.resident <= REGISTERS_PER_PROCESSOR


TILINGS = [
    pytest.param(rows, dtype, is_gated, tiling, id=f"{rows} rows, {dtype}{', gated' if is_gated else ''}, {number}")
    for rows, dtype in (
        *((rows, dtype) for rows in (8, 16, 64) for dtype in (torch.bfloat16, torch.int8)),
        (128, torch.int8),
        (8, torch.float32),
    )
    for is_gated in (False, True)
    for number, tiling in enumerate(tilings(rows, dtype, is_gated=is_gated))
]


@pytest.mark.parametrize(("rows", "dtype", "is_gated", "tiling"), TILINGS)
def test_products_read_ahead_and_spill_nothing(
    rows: int, dtype: torch.dtype, is_gated: bool, tiling: Tiling, compiled: list[MachineCode]
) -> None:
    multiply(rows, dtype, is_gated=is_gated, tiling=tiling)
    (code,) = compiled
    check(code, tiling)
    assert code.instructions["LDGSTS.E.BYPASS.128"]
    products = sum(count for name, count in code.instructions.items() if name.startswith(("HMMA", "HGMMA")))
    assert (products > 0) == (dtype != torch.float32)
    if dtype == torch.bfloat16:
        copies = sum(count for name, count in code.instructions.items() if name.startswith("LDGSTS"))
        narrow_copies = copies - code.instructions["LDGSTS.E.BYPASS.128"]
        assert narrow_copies <= tiling.stages  # of the rows alone, once a stage


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("is_gated", [False, True])
def test_experts_read_ahead_and_spill_nothing(is_gated: bool, dtype: torch.dtype, compiled: list[MachineCode]) -> None:
    for rows in (2, 64):
        multiply(rows, dtype, is_gated=is_gated, experts=8)
    for code, rows in zip(compiled, (8, 16), strict=True):
        check(code, tilings(rows, dtype, is_gated=is_gated)[0])
        assert code.instructions["LDGSTS.E.BYPASS.128"]


def test_inputs_that_are_no_whole_units_compile(compiled: list[MachineCode]) -> None:
    multiply(3, torch.bfloat16, is_gated=True, inputs=77)
    (code,) = compiled
    assert 0 == code.stack_bytes == code.local_bytes


class Operators(TorchDispatchMode):
    """Notes the operators that compute something: views and fresh memory cost no launch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func.name():
            self.names.append(func.name().removeprefix("aten::"))
        return func(*args, **kwargs or {})


def launches(compiled: list[MachineCode], rows: int, activation: Activation | None, format: str = "dense") -> list[str]:
    """What a product with a bias launches: "kernel" for each of ours, and the operators of torch."""
    before = len(compiled)
    kinds = {"dense": CudaDense, "int8": CudaInt8}
    sizes = (rows, 256), (128, 256), (128,)
    x, weight, bias = (torch.empty(*size, dtype=torch.bfloat16, device="meta") for size in sizes)
    layer = kinds[format](weight, gate=fused_gate, products=products(torch.device("meta"), MANY_SPLITS))
    with Operators() as operators:
        layer(x, bias, activation)
    return ["kernel"] * (len(compiled) - before) + operators.names


def test_a_decodes_product_is_one_launch_whatever_follows_it(compiled: list[MachineCode]) -> None:
    for format in ("dense", "int8"):
        for activation in (None, Activation.GELU_TANH, Activation.GELU):
            assert ["kernel"] == launches(compiled, 1, activation, format)


def test_many_rows_have_bias_and_activation_in_the_product_of_cublas(compiled: list[MachineCode]) -> None:
    assert ["addmm"] == launches(compiled, 32, None)
    assert ["_addmm_activation"] == launches(compiled, 32, Activation.GELU_TANH)
    assert ["_addmm_activation"] == launches(compiled, 4096, Activation.RELU)
    assert ["addmm", "gelu"] == launches(compiled, 32, Activation.GELU)  # the exact one has no epilogue
    assert ["kernel"] == launches(compiled, 32, Activation.GELU, "int8")


@pytest.mark.parametrize("format", ["dense", "int8"])
def test_a_mixtures_products_are_three_launches_and_ask_the_host_nothing(
    format: str, compiled: list[MachineCode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On tensors without values, from which nothing can be read."""
    properties = SimpleNamespace(multi_processor_count=MANY_SPLITS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    backend = CudaBackend(CpuDevice(), torch.bfloat16)
    make = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    mixture = MoeMlp(
        router=backend.formats["dense"](make(8, 256)),
        expert_ids=torch.empty(8, dtype=torch.int64, device="meta"),
        up=backend.grouped(make(8, 256, 256), 8, format, is_gated=True),
        down=backend.grouped(make(8, 256, 128), 8, format),
        activation=Activation.SILU,
        top_k=2,
        renormalise=True,
    )
    assert (1, 256) == mixture(make(1, 256)).shape
    assert 3 == len(compiled)
