"""The Triton kernels through the compiler, for an H200 and without one: run by `test_triton.py`, in its own process.

The interpreter runs code that the compiler refuses (a float as a condition, a type that changes in a loop), and cannot
read bfloat16. What is compiled here is what the launches ask for: only the launch itself is left out.
"""

from __future__ import annotations

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from server.arch.spec import Activation
from server.backends.cuda.attention import PagedAttention
from server.backends.cuda.fused import FusedNorm, fused_gate
from server.backends.cuda.kernels.rotate import rotate_and_store
from server.backends.protocol import Rotation, Summand
from tests.server.kernel_cases import MANY_SPLITS, RAGGED, Case, all_terms, learned, plain, random

CPU = torch.device("cpu")
SHARED_MEMORY_BYTES = 227 * 1024  # of an H200, for one program
Assembly = dict[str, str]  # PTX of each kernel


class NoGpu:
    """Stands in for Triton's driver: names the target, has nothing to launch on."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)  # compute capability 9.0, threads of a warp

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def assembly(monkeypatch: pytest.MonkeyPatch) -> Assembly:
    """What each launch is compiled to, instead of being launched."""
    compiled: Assembly = {}
    run = JITFunction.run

    def only_compile(kernel: JITFunction, *args: object, **kwargs: object) -> None:
        result = run(kernel, *args, **kwargs | {"warmup": True})
        assert result.metadata.shared <= SHARED_MEMORY_BYTES
        compiled[kernel.fn.__name__] = result.asm["ptx"]

    monkeypatch.setattr(JITFunction, "run", only_compile)
    triton.runtime.driver.set_active(NoGpu())
    return compiled


MIXED = [*RAGGED, (60, 20), (31, 31)]
CASES = {
    "heads of 64": Case(MIXED, (16, 16), 64, plain),
    "heads of 80, alibi": Case(MIXED, (32, 32), 80, all_terms, processors=MANY_SPLITS),
    "heads of 128, shared kv heads in a window": Case(MIXED, (32, 8), 128, plain, 4096),
    "heads of 256, shared kv heads, all terms": Case(MIXED, (8, 4), 256, all_terms, 4096, MANY_SPLITS),
    "learned bias": Case(MIXED, (12, 12), 64, learned),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention_compiles_to_matrix_instructions(case: Case, assembly: Assembly) -> None:
    kv, q, k, v = case.inputs(torch.bfloat16, CPU)
    backend, meta = PagedAttention(case.scores_on(CPU), case.processors), case.meta(CPU)
    backend.write(kv, k, v, meta)
    backend.attend(q, kv, meta, case.window)
    decode = "_decode_head" if case.heads[0] == case.heads[1] else "_decode_group"
    combine = {"_combine"} if case.processors == MANY_SPLITS else set()
    assert {"_store", decode, "_prefill"} | combine == set(assembly)
    assert "wgmma" in assembly["_prefill"]
    assert (decode == "_decode_group") == ("mma.sync" in assembly[decode])


def test_float32_attention_compiles_to_exact_products(assembly: Assembly) -> None:
    case = Case(MIXED, (4, 2), 16, plain)
    kv, q, _, _ = case.inputs(torch.float32, CPU)
    PagedAttention(case.scores_on(CPU), case.processors).attend(q, kv, case.meta(CPU), case.window)
    assert {"_decode_group", "_prefill"} == set(assembly)
    assert not any("mma" in code for code in assembly.values())


@pytest.mark.parametrize("is_centred", [True, False], ids=["layer norm", "rms norm"])
def test_norms_compile(is_centred: bool, assembly: Assembly) -> None:
    x, summand, weight, bias = (
        torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((2, 4096),) * 2 + ((4096,),) * 2
    )
    norm = FusedNorm(weight, bias if is_centred else None, 1e-5, is_centred=is_centred)
    norm(x)
    norm.add(x, Summand((summand,), (bias,)))
    assert {"_add_norm"} == set(assembly)


@pytest.mark.parametrize("is_interleaved", [True, False], ids=["interleaved", "halves"])
def test_rotating_and_storing_compiles(is_interleaved: bool, assembly: Assembly) -> None:
    kv, q, k, v = Case(MIXED, (32, 2), 128).inputs(torch.bfloat16, CPU)
    cos, sin = random(2, len(q), 1, 32, dtype=torch.float32, device=CPU)
    rotate_and_store(q, k, v, Rotation(cos, sin, is_interleaved), kv, torch.zeros(len(q), dtype=torch.int64))
    assert {"_rotate_and_store"} == set(assembly)


@pytest.mark.parametrize("activation", Activation)
def test_gates_compile(activation: Activation, assembly: Assembly) -> None:
    fused_gate(activation, torch.zeros(2, 3000, dtype=torch.bfloat16))
    assert {"_gate"} == set(assembly)
