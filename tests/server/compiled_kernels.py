"""The Triton kernels through the compiler, for an H200 and without one: run by `test_triton.py`, in its own process.

The interpreter runs code that the compiler refuses (a float as a condition, a type that changes in a loop), and cannot
read bfloat16. What is compiled here is what the launches ask for: only the launch itself is left out.
`python -m benchmark kernels` shows the same for other GPUs.
"""

from __future__ import annotations

import pytest
import torch

from benchmark.kernels import HEAD_CASES, HeadCase, launch_attention
from server.arch.spec import Activation
from server.backends.cuda.attention import PagedAttention
from server.backends.cuda.fused import FusedNorm, fused_gate
from server.backends.cuda.machine_code import MATRIX, MachineCode
from server.backends.protocol import Summand, split_heads
from tests.server.compiled_cases import CPU, found, of_kernel
from tests.server.kernel_cases import HALVES, INTERLEAVED, MANY_SPLITS, RAGGED, Case, all_terms, learned, plain

__all__ = ["found"]

BY_MODEL = {case.model: case for case in HEAD_CASES}
# Every head size, and where it matters also with kv heads of another kind; the others are left to the command.
WITH_PROMPTS = ("bloom-560m", "bloomz-3b", "Mistral-7B", "Gemma-2-9B")
DECODES_ALONE = ("TinyLlama-1.1B", "Phi-3-mini", "like MPT-30B, shared kv heads", "bloomz-7b1", "StarCoder", "Gemma-7B")
# Programs that must fit on a multiprocessor: as many as `choose_splits` wants where a head has its kv head for itself;
# of a group's larger tiles, two keep as many bytes under way.
LEAST_PROGRAMS = {"_decode_head": 4, "_decode_group": 2}


def test_attention_takes_matrix_units_and_loads_ahead(found: list[MachineCode]) -> None:
    for case in (cases := [BY_MODEL[model] for model in WITH_PROMPTS]):
        launch_attention(case)
    for number, case in enumerate(cases):
        decode, store, prefill = found[3 * number : 3 * number + 3]
        check_decode(case, decode)
        assert store.kernel == ("_rotate_and_store" if case.rotated_pairs else "_store"), case
        assert prefill.kernel == "_prefill" and prefill.programs_per_processor >= 1, (case, prefill)
        assert prefill.instructions["HGMMA"] > 0 and prefill.instructions["LDGSTS"] > 0, (case, prefill)
    assert 3 * len(cases) == len(found)


def test_decodes_are_one_launch_though_their_keys_are_split(found: list[MachineCode]) -> None:
    for case in (cases := [BY_MODEL[model] for model in DECODES_ALONE]):
        launch_attention(case, chunk=0)
    for case, code in zip(cases, found, strict=True):
        check_decode(case, code)


def decode_kernel(case: HeadCase) -> str:
    return "_decode_head" if case.heads == case.kv_heads else "_decode_group"


def check_decode(case: HeadCase, code: MachineCode) -> None:
    """It loads ahead, and so many programs share a multiprocessor that enough is under way."""
    assert code.kernel == decode_kernel(case), (case, code)
    assert code.instructions["LDGSTS"] > 0, (case, code)
    assert code.programs_per_processor >= LEAST_PROGRAMS[code.kernel], (case, code)
    assert (code.kernel == "_decode_group") == any(code.instructions[name] for name in MATRIX), (case, code)


def test_the_last_program_of_a_split_sequence_reads_what_the_others_wrote(found: list[MachineCode]) -> None:
    launch_attention(BY_MODEL["bloom-560m"], chunk=0)
    ptx = of_kernel(found, "_decode_head").ptx
    count = ptx.index("atom.")
    assert ptx[count:].startswith("atom.global.gpu.acq_rel.add")
    written, barrier = ptx.rindex("st.global", 0, count), ptx.rindex("bar.sync", 0, count)
    assert written < barrier < count
    read = ptx.index("ld.global.cg", count)
    assert "bar.sync" in ptx[count:read]
    assert "ld.global.cg" not in ptx[:count]


REST = {
    "heads of 64, a learned bias, not split": Case(RAGGED, (12, 12), 64, learned),
    "heads of 80, all terms": Case(RAGGED, (32, 32), 80, all_terms, processors=MANY_SPLITS, rotation=(20, INTERLEAVED)),
    "shared kv heads of 256, all terms": Case(RAGGED, (8, 4), 256, all_terms, 4096, MANY_SPLITS),
}


@pytest.mark.parametrize("case", REST.values(), ids=REST.keys())
def test_every_term_of_the_scores_compiles(case: Case, found: list[MachineCode]) -> None:
    kv, heads = case.inputs(torch.bfloat16, CPU)
    backend = PagedAttention(case.scores_on(CPU), case.processors)
    backend.self_attend(heads, kv, case.rotation_on(CPU), case.meta(CPU), case.window)
    assert 1 == len(found)


@pytest.mark.parametrize("kv_heads", [12, 2], ids=["mha", "gqa"])
def test_attention_to_what_is_stored_compiles(kv_heads: int, found: list[MachineCode]) -> None:
    case = Case(RAGGED, (12, kv_heads), 64, learned, processors=MANY_SPLITS)
    kv, heads = case.inputs(torch.bfloat16, CPU)
    PagedAttention(case.scores_on(CPU), case.processors).attend(split_heads(heads, kv_heads)[0], kv, case.meta(CPU), 0)
    assert ["_decode_head" if kv_heads == 12 else "_decode_group"] == [code.kernel for code in found]


def test_float32_attention_compiles_to_exact_products(found: list[MachineCode]) -> None:
    case = Case([*RAGGED, (60, 20)], (4, 2), 16, plain, rotation=(8, HALVES))
    kv, heads = case.inputs(torch.float32, CPU)
    backend = PagedAttention(case.scores_on(CPU), case.processors)
    backend.self_attend(heads, kv, case.rotation_on(CPU), case.meta(CPU), case.window)
    assert {"_decode_group", "_rotate_and_store", "_prefill"} == {code.kernel for code in found}
    assert not any(code.instructions[name] for code in found for name in MATRIX)


@pytest.mark.parametrize("is_centred", [True, False], ids=["layer norm", "rms norm"])
def test_norms_compile(is_centred: bool, found: list[MachineCode]) -> None:
    x, summand, weight, bias = (
        torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((2, 4096),) * 2 + ((4096,),) * 2
    )
    norm = FusedNorm(weight, bias if is_centred else None, 1e-5, is_centred=is_centred)
    norm(x)
    norm.add(x, Summand((summand,), (bias,)))
    assert {"_add_norm"} == {code.kernel for code in found}


@pytest.mark.parametrize("activation", Activation)
def test_gates_compile(activation: Activation, found: list[MachineCode]) -> None:
    fused_gate(activation, torch.zeros(2, 3000, dtype=torch.bfloat16))
    assert ["_gate"] == [code.kernel for code in found]
