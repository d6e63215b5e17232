"""The Triton kernels through the compiler, for an H200 and without one: run by `test_triton.py`, in its own process.

The interpreter runs code that the compiler refuses (a float as a condition, a type that changes in a loop), and cannot
read bfloat16. What is compiled here is what the launches ask for: only the launch itself is left out.
`python -m benchmark kernels` shows the same for other GPUs.
"""

from __future__ import annotations

from itertools import product
from unittest.mock import patch

import pytest
import torch

from benchmark.commands.kernels import HEAD_CASES, MANY_DECODES, HeadCase, launch_attention
from server.arch.recurrences import GatedDelta, Mamba2, ShortConv
from server.arch.spec import Activation, Scoring
from server.backends.cuda.attention import PagedAttention
from server.backends.cuda.fused import fused_gate
from server.backends.cuda.kernels import prefill
from server.backends.cuda.kernels.convolution import FusedShortConv
from server.backends.cuda.kernels.delta import FusedDelta
from server.backends.cuda.kernels.mamba import FusedMamba
from server.backends.cuda.kernels.routing import FusedRouting
from server.backends.cuda.kernels.splits import LEAST_PROGRAM_KIB
from server.backends.cuda.machine_code import MATRIX, MachineCode, compiled_for
from server.backends.protocol import SOFTMAX, RouterRule, Scores, Summand, split_heads
from server.backends.reference.linear import DenseFormat
from server.blocks import BLOCK_SIZE
from server.quantisation.kv import AS_COMPUTED, KV_FORMATS, KvFormat
from tests.server.backends.cuda.compiled_cases import CPU, found, of_kernel
from tests.server.backends.cuda.kernel_cases import (
    BLOCKS,
    HALVES,
    INTERLEAVED,
    MANY_SPLITS,
    RAGGED,
    Case,
    LatentCase,
    all_terms,
    chunked,
    in_suite,
    learned,
    norms,
    plain,
    sinking,
)
from tests.server.backends.recurrence_cases import delta_weights, mamba_weights, meta_of, short_conv_weights

__all__ = ["found"]

SIGMOID = RouterRule(Scoring.SIGMOID, torch.zeros(60), scale=2.5)
BY_MODEL = {case.model: case for case in HEAD_CASES}
# Every head size, and where it matters also with kv heads of another kind; the others are left to the command. In the
# suite are the largest tiles.
WITH_PROMPTS = in_suite(["Gemma-2-9B"], ["bloom-560m", "bloomz-3b", "Mistral-7B"])
DECODES_ALONE = in_suite(
    ["like MPT-30B, shared kv heads"], ["Phi-3-mini", "bloomz-7b1", "TinyLlama-1.1B", "StarCoder", "Gemma-7B"]
)
# Programs that must fit on a multiprocessor: as many as `choose_splits` wants where a head has its kv head for itself;
# of a group's larger tiles, two keep as many bytes under way.
LEAST_PROGRAMS = {"decode_head": 4, "decode_group": 2}


@pytest.mark.parametrize("model", WITH_PROMPTS)
def test_attention_takes_matrix_units_and_loads_ahead(model: str, found: list[MachineCode]) -> None:
    launch_attention(case := BY_MODEL[model])
    decode, store, prefill = found
    check_decode(case, decode)
    assert store.kernel == ("_rotate_and_store" if case.rotated_pairs else "_store"), case
    assert prefill.kernel == "_prefill" and prefill.programs_per_processor >= 1, (case, prefill)
    assert prefill.instructions["HGMMA"] > 0 and prefill.instructions["LDGSTS"] > 0, (case, prefill)


@pytest.mark.parametrize("model", DECODES_ALONE)
def test_decodes_are_one_launch_though_their_keys_are_split(model: str, found: list[MachineCode]) -> None:
    launch_attention(case := BY_MODEL[model], chunk=0)
    (code,) = found
    check_decode(case, code)
    launch_attention(case, MANY_DECODES, chunk=0)
    _, *plan, planned = found
    # One kv head for all has parts enough for each of so many sequences.
    assert (["_plan"] if case.kv_heads > 1 else []) == [code.kernel for code in plan]
    check_decode(case, planned)


def decode_kernel(case: HeadCase) -> str:
    return "decode_head" if case.heads == case.kv_heads else "decode_group"


def check_decode(case: HeadCase, code: MachineCode) -> None:
    """It loads ahead, and so many programs share a multiprocessor that enough is under way."""
    assert code.kernel == decode_kernel(case), (case, code)
    assert code.instructions["LDGSTS"] > 0, (case, code)
    assert code.programs_per_processor >= LEAST_PROGRAMS[code.kernel], (case, code)
    assert (code.kernel == "decode_group") == any(code.instructions[name] for name in MATRIX), (case, code)


@pytest.mark.parametrize("kernel", ["decode_head", "_prefill"])
def test_the_last_program_of_split_keys_reads_what_the_others_wrote(kernel: str, found: list[MachineCode]) -> None:
    launch_attention(BY_MODEL["bloom-560m"])
    ptx = of_kernel(found, kernel).ptx
    count = ptx.index("atom.")
    assert ptx[count:].startswith("atom.global.gpu.acq_rel.add")
    written, barrier = ptx.rindex("st.global", 0, count), ptx.rindex("bar.sync", 0, count)
    assert written < barrier < count
    read = ptx.index("ld.global.cg", count)
    assert "bar.sync" in ptx[count:read]
    assert "ld.global.cg" not in ptx[:count]


def test_how_many_keys_there_are_does_not_decide_what_is_compiled(found: list[MachineCode]) -> None:
    """A request would wait for the compiler, as warm-up computes short prompts alone."""
    with patch.object(prefill, "LEAST_KEYS", 64):
        for context in (20, 900):
            case = Case([(context, 20)], (8, 4), 64, plain, processors=132)
            kv, heads = case.inputs(torch.bfloat16, CPU)
            PagedAttention(case.scores_on(CPU), 132).self_attend(heads, kv, None, case.meta(CPU), 0)
    assert 2 == [code.kernel for code in found].count("_prefill")
    assert 1 == len({code.ptx for code in found if code.kernel == "_prefill"})


REST = [
    Case(RAGGED, (32, 32), 80, all_terms, processors=MANY_SPLITS, rotation=(20, INTERLEAVED)),
    Case([*RAGGED, (60, 20)], (64, 8), 64, sinking, 128, MANY_SPLITS, rotation=(32, HALVES)),
    Case([*RAGGED, (60, 20)], (12, 12), 64, sinking, processors=MANY_SPLITS),
    Case(RAGGED, (12, 12), 64, learned),
    Case(RAGGED, (8, 4), 256, all_terms, 4096, MANY_SPLITS),
    Case([*RAGGED, (60, 20)], (32, 4), 512, chunked, processors=MANY_SPLITS, rotation=(256, HALVES)),
    Case([*RAGGED, (60, 20)], (8, 8), 512, chunked, processors=MANY_SPLITS, rotation=(256, HALVES)),
]


@pytest.mark.parametrize("case", in_suite(REST[:2], REST))
def test_every_term_of_the_scores_compiles(case: Case, found: list[MachineCode]) -> None:
    kv, heads = case.inputs(torch.bfloat16, CPU)
    backend = PagedAttention(case.scores_on(CPU), case.processors)
    backend.self_attend(heads, kv, case.rotation_on(CPU), case.meta(CPU), case.window)
    is_planned = found[0].kernel == "_plan"
    assert (3 if case.meta(CPU).longest else 1) == len(found) - is_planned


@pytest.mark.parametrize("kv_heads", in_suite([12], [2]))
def test_attention_to_what_is_stored_compiles(kv_heads: int, found: list[MachineCode]) -> None:
    case = Case(RAGGED, (12, kv_heads), 64, learned, processors=MANY_SPLITS)
    kv, heads = case.inputs(torch.bfloat16, CPU)
    PagedAttention(case.scores_on(CPU), case.processors).attend(split_heads(heads, kv_heads)[0], kv, case.meta(CPU), 0)
    assert ["_plan", "decode_head" if kv_heads == 12 else "decode_group"] == [code.kernel for code in found]


def test_float32_attention_compiles_to_exact_products(found: list[MachineCode]) -> None:
    case = Case([*RAGGED, (60, 20)], (4, 2), 16, plain, rotation=(8, HALVES))
    kv, heads = case.inputs(torch.float32, CPU)
    backend = PagedAttention(case.scores_on(CPU), case.processors)
    backend.self_attend(heads, kv, case.rotation_on(CPU), case.meta(CPU), case.window)
    assert {"_plan", "decode_group", "_rotate_and_store", "_prefill"} == {code.kernel for code in found}
    assert not any(code.instructions[name] for code in found for name in MATRIX)


@pytest.mark.parametrize(
    ("kv_heads", "name"), in_suite([(16, "int8")], product((16, 4), ("int8", "fp8_e4m3", "fp8_e5m2")))
)
def test_attention_over_a_cache_of_codes_compiles(kv_heads: int, name: str, found: list[MachineCode]) -> None:
    format = KV_FORMATS[name]
    case = Case([*RAGGED, (60, 20)], (16, kv_heads), 64, plain, processors=MANY_SPLITS, rotation=(32, HALVES))
    heads = case.inputs(torch.bfloat16, CPU)[1]
    kv = torch.zeros(2, BLOCKS, kv_heads, BLOCK_SIZE, format.width(64), dtype=torch.uint8)
    backend = PagedAttention(case.scores_on(CPU), case.processors, cache=format)
    backend.self_attend(heads, kv, case.rotation_on(CPU), case.meta(CPU), case.window)
    _, decode, *others = found
    assert (kv_heads == 4) == any(decode.instructions[name] for name in MATRIX), decode
    assert decode.programs_per_processor >= LEAST_PROGRAMS[decode.kernel], decode
    assert ["_rotate_heads", "_store", "_prefill"] == [code.kernel for code in others]


# DeepSeek's rows: all heads, those of one of 8 ranks, and in codes.
ROWS = [(128, AS_COMPUTED), (16, AS_COMPUTED), (16, KV_FORMATS["int8"]), (16, KV_FORMATS["fp8_e4m3"])]


@pytest.mark.parametrize(("heads", "format"), in_suite([ROWS[0], ROWS[2]], ROWS))
def test_attention_over_rows_that_are_keys_and_values_compiles(
    heads: int, format: KvFormat, found: list[MachineCode]
) -> None:
    case = LatentCase([*RAGGED, (60, 20)], heads, 512, 64, MANY_SPLITS, format)
    meta, kv, rows, rotation = case.inputs(torch.bfloat16, CPU)
    PagedAttention(Scores(0.1, rank=512), case.processors, cache=format).self_attend(rows, kv, rotation, meta, 0)
    _, _, decode, prefill = found
    assert ["_store_rows", "_plan", "_decode_rows", "_prefill_rows"] == [code.kernel for code in found]
    for code in (decode, prefill):
        assert any(code.instructions[name] for name in MATRIX) and code.programs_per_processor >= 1, code
        assert code.local_bytes == 0, code


# RTX 3090 to 5090, A10, L4 and L40S, and the small ones of the newest architecture.
@pytest.mark.parametrize("capability", in_suite(["8.9"], ["8.6", "12.0"]))
@pytest.mark.parametrize("width", in_suite([256, 512], [64, 128]))
def test_attention_fits_into_the_shared_memory_of_small_gpus(capability: str, width: int) -> None:
    case = Case([*RAGGED, (60, 20)], (8, 4), width, plain, processors=MANY_SPLITS, rotation=(width // 2, HALVES))
    kv, heads = case.inputs(torch.bfloat16, CPU)
    with compiled_for(capability) as codes:
        backend = PagedAttention(case.scores_on(CPU), case.processors, LEAST_PROGRAM_KIB)
        backend.self_attend(heads, kv, case.rotation_on(CPU), case.meta(CPU), case.window)
    assert ["_plan", "decode_group", "_rotate_and_store", "_prefill"] == [code.kernel for code in codes]
    assert all(code.fits for code in codes), codes


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("is_centred", "num_deltas", "has_own_norm"),
    in_suite([(True, 1, False), (False, 2, True)], product((True, False), (1, 2), (True, False))),
)
def test_norms_alone_and_behind_summands_compile(
    is_centred: bool, num_deltas: int, has_own_norm: bool, found: list[MachineCode]
) -> None:
    (_, norm), (_, own_norm) = (norms(4096, is_centred, seed, torch.bfloat16, CPU) for seed in (0, 1))
    deltas, biases = (zeros(2, 4096),) * num_deltas, (zeros(4096),) * num_deltas
    norm(zeros(2, 4096))
    norm.add(zeros(2, 4096), Summand(deltas, biases, own_norm if has_own_norm else None))
    assert {"_add_norm"} == {code.kernel for code in found}


@pytest.mark.parametrize("is_centred", in_suite([True], [False]), ids=str)
def test_norms_of_heads_compile(is_centred: bool, found: list[MachineCode]) -> None:
    (_, queries), (_, keys) = (norms(128, is_centred, seed, torch.bfloat16, CPU) for seed in (0, 1))
    queries.normalise_heads(keys, zeros(2, 48, 128), kv_heads=8)
    assert {"_norm_heads"} == {code.kernel for code in found}


@pytest.mark.parametrize(
    ("experts", "top_k", "rule"),
    in_suite([(60, 6, SIGMOID)], [(8, 2, SOFTMAX), (128, 8, SOFTMAX)]),
    ids=["sigmoid", "few", "many"],
)
def test_routing_compiles(experts: int, top_k: int, rule: RouterRule, found: list[MachineCode]) -> None:
    routing = FusedRouting(experts, top_k, renormalise=True, rule=rule)
    routing(DenseFormat(zeros(experts, 64)), zeros(3, 64)).combine(zeros(3 * top_k, 4096))
    assert {"_choose", "_group", "_weigh"} == {code.kernel for code in found}


@pytest.mark.parametrize("decodes", in_suite([False], [True]), ids=str)
def test_the_gated_delta_rule_compiles(decodes: bool, found: list[MachineCode]) -> None:
    kind = GatedDelta(num_heads=32, num_key_heads=16, key_dim=128, value_dim=128, conv=4)
    runs, width = [(1, 0, 1), (2, 5, 1)], kind.channels + kind.num_heads * kind.value_dim
    meta, state = meta_of(runs, 2 * decodes), torch.zeros(3, kind.state_size)
    FusedDelta(delta_weights(kind))(zeros(2, width), zeros(2, 2 * kind.num_heads), state, meta)
    assert ["_convolve", "_recur"] == [code.kernel for code in found]


# Memories as in Granite 4-H and in Falcon-H1.
@pytest.mark.parametrize(
    ("decodes", "key_dim"), in_suite([(False, 128), (True, 256)], product((False, True), (128, 256)))
)
def test_mamba_compiles(decodes: bool, key_dim: int, found: list[MachineCode]) -> None:
    kind = Mamba2(num_heads=48, num_groups=1, head_dim=64, key_dim=key_dim, conv=4, eps=1e-5)
    meta, state = meta_of([(1, 0, 1), (2, 5, 1)], 2 * decodes), torch.zeros(3, kind.state_size)
    FusedMamba(mamba_weights(kind))(zeros(2, kind.step_width), state, meta)
    assert ["_convolve", "_recur_mamba"] == [code.kernel for code in found]
    assert all(code.local_bytes == 0 for code in found)


@pytest.mark.parametrize("decodes", in_suite([False], [True]), ids=str)
def test_short_convolutions_compile(decodes: bool, found: list[MachineCode]) -> None:
    kind = ShortConv(channels=2048, conv=3)
    meta, state = meta_of([(1, 0, 1), (2, 5, 1)], 2 * decodes), torch.zeros(3, kind.state_size)
    FusedShortConv(short_conv_weights(kind))(zeros(2, kind.step_width), state, meta)
    assert ["_convolve"] == [code.kernel for code in found]


@pytest.mark.parametrize("activation", in_suite([Activation.GELU], Activation))
def test_gates_compile(activation: Activation, found: list[MachineCode]) -> None:
    fused_gate(activation, torch.zeros(2, 3000, dtype=torch.bfloat16))
    assert ["_gate"] == [code.kernel for code in found]
