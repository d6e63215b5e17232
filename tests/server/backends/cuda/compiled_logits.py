"""The kernels of logits through the compiler, for an H200 and without one: run by `test_triton.py`, in its own process.

What is compiled is what the launches ask for, in every dtype that logits come in: only the launch itself is left out.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from triton.runtime.jit import JITFunction

from server.backends.cuda.backend import Compilations
from server.backends.cuda.logits import KernelLogits
from server.backends.cuda.machine_code import MachineCode
from tests.server.backends.cuda.compiled_cases import found

__all__ = ["found"]

# Registers of a thread with which two programs of 8 warps share a multiprocessor.
MOST_REGISTERS = 128
BLOOM = 250_880


def assert_nothing_is_spilled(found: list[MachineCode], *names: str) -> None:
    """These kernels were compiled, and keep to their registers."""
    assert set(names) == {code.kernel for code in found}
    for code in found:
        assert 0 == code.local_bytes, code
        assert code.registers <= MOST_REGISTERS, code


@pytest.mark.parametrize(("dtype", "n"), [(torch.bfloat16, 1), (torch.float16, 5), (torch.float32, 5)])
def test_summaries_compile(dtype: torch.dtype, n: int, found: list[MachineCode]) -> None:
    KernelLogits().summarise(torch.zeros(2, BLOOM, dtype=dtype), n)
    assert_nothing_is_spilled(found, "summarise_parts", "summarise_rows")


def test_compilations_are_counted(found: list[MachineCode]) -> None:
    compilations = Compilations()
    for _ in range(2):
        KernelLogits().summarise(torch.zeros(2, BLOOM), 17)
    assert 0 < compilations.count <= 2 < len(found)  # a kernel of this process is not compiled again


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_races_compile(dtype: torch.dtype, found: list[MachineCode]) -> None:
    integers = torch.zeros(2, dtype=torch.int64)
    KernelLogits().race(torch.zeros(2, BLOOM, dtype=dtype), integers.view(2, 1), integers.view(2, 1), integers)
    KernelLogits().log_noise(integers.view(2, 1), integers.view(2, 1), integers, integers.view(2, 1))
    assert_nothing_is_spilled(found, "race_parts", "race_rows", "noise_rows")


@pytest.mark.parametrize("ranks", [1, 8])
def test_searches_compile(ranks: int, found: list[MachineCode]) -> None:
    gather = None if ranks == 1 else lambda tensor: [tensor] * ranks
    logits = torch.zeros(2, BLOOM // ranks)
    KernelLogits().top_k_threshold(logits, torch.ones(2, 1, dtype=torch.int64), 1, gather)
    assert_nothing_is_spilled(found, "sum_parts", "finish")
    found.clear()
    KernelLogits().top_p_threshold(logits, torch.ones(2, 1), gather)
    assert_nothing_is_spilled(found, "summarise_parts", "summarise_rows", "sum_parts", "finish")


def test_a_search_is_compiled_once_whatever_the_batch(found: list[MachineCode]) -> None:
    compiled = set()
    run = JITFunction.run  # the fixture's, which only compiles

    def noted(kernel: JITFunction, *args: object, **kwargs: object) -> None:
        run(kernel, *args, **kwargs)
        (cache, *_), name = kernel.device_caches[90], kernel.fn.__name__
        compiled.update((name, key) for key in cache)

    with patch.object(JITFunction, "run", noted):
        for rows, most in ((4, 1), (1, 1), (2, 7), (2, 2**32 - 1)):
            KernelLogits().top_k_threshold(torch.zeros(rows, 20000), torch.ones(rows, 1, dtype=torch.int64), most, None)
            if rows == 4:
                first = set(compiled)
    assert first == compiled
