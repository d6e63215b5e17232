"""The kernels of logits through the compiler, for an H200 and without one: run by `test_triton.py`, in its own process.

What is compiled is what the launches ask for, in every dtype that logits come in: only the launch itself is left out.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from server.backends.cuda.logits import KernelLogits

# Registers of a thread with which two programs of 8 warps share a multiprocessor.
MOST_REGISTERS = 128
BLOOM = 250_880
Usage = dict[str, str]  # what the assembler says of each kernel


class NoGpu:
    """Stands in for Triton's driver: names the target, has nothing to launch on."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)  # compute capability 9.0, threads of a warp

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def resources(cubin: bytes, folder: Path) -> str:
    """Registers and memory of a kernel's threads, in the words of `cuobjdump`."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([cuobjdump, "-res-usage", path], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def usage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Usage:
    """What each launch would take, instead of being launched."""
    compiled: Usage = {}
    run = JITFunction.run

    def only_compile(kernel: JITFunction, *args: object, **kwargs: object) -> None:
        result = run(kernel, *args, **kwargs | {"warmup": True})
        compiled[kernel.fn.__name__] = resources(result.asm["cubin"], tmp_path)

    monkeypatch.setattr(JITFunction, "run", only_compile)
    triton.runtime.driver.set_active(NoGpu())
    return compiled


def assert_nothing_is_spilled(usage: Usage, *names: str) -> None:
    """These kernels were compiled, and keep to their registers."""
    assert set(names) == set(usage)
    for name, said in usage.items():
        assert ["0"] == re.findall(r"LOCAL:(\d+)", said), (name, said)
        assert ["0"] == re.findall(r"STACK:(\d+)", said), (name, said)
        (registers,) = re.findall(r"REG:(\d+)", said)
        assert int(registers) <= MOST_REGISTERS, (name, said)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("n", [1, 5])
def test_summaries_compile(n: int, dtype: torch.dtype, usage: Usage) -> None:
    KernelLogits().summarise(torch.zeros(2, BLOOM, dtype=dtype), n)
    assert_nothing_is_spilled(usage, "summarise_parts", "summarise_rows")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_races_compile(dtype: torch.dtype, usage: Usage) -> None:
    integers = torch.zeros(2, dtype=torch.int64)
    KernelLogits().race(torch.zeros(2, BLOOM, dtype=dtype), integers.view(2, 1), integers.view(2, 1), integers)
    KernelLogits().log_noise(integers.view(2, 1), integers.view(2, 1), integers, integers.view(2, 1))
    assert_nothing_is_spilled(usage, "race_parts", "race_rows", "noise_rows")


@pytest.mark.parametrize("ranks", [1, 8])
def test_searches_compile(ranks: int, usage: Usage) -> None:
    gather = None if ranks == 1 else lambda tensor: [tensor] * ranks
    logits = torch.zeros(2, BLOOM // ranks)
    KernelLogits().top_k_threshold(logits, torch.ones(2, 1, dtype=torch.int64), 1, gather)
    assert_nothing_is_spilled(usage, "sum_parts", "finish")
    usage.clear()
    KernelLogits().top_p_threshold(logits, torch.ones(2, 1), gather)
    assert_nothing_is_spilled(usage, "summarise_parts", "summarise_rows", "sum_parts", "finish")


def test_a_search_is_compiled_once_whatever_the_batch(monkeypatch: pytest.MonkeyPatch, usage: Usage) -> None:
    compiled = set()
    run = JITFunction.run  # the fixture's, which only compiles

    def noted(kernel: JITFunction, *args: object, **kwargs: object) -> None:
        run(kernel, *args, **kwargs)
        (cache, *_), name = kernel.device_caches[0], kernel.fn.__name__
        compiled.update((name, key) for key in cache)

    monkeypatch.setattr(JITFunction, "run", noted)
    for rows in (4, 1, 2):
        KernelLogits().top_k_threshold(torch.zeros(rows, 20000), torch.ones(rows, 1, dtype=torch.int64), 1, None)
        if rows == 4:
            first = set(compiled)
    assert first == compiled
