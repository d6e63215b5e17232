"""The Triton kernels on a GPU: the cases of the interpreter, in every dtype, and captured in a graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from server.arch.spec import Activation, Scoring
from server.backends.reference.attention import ReferenceAttention
from server.quantisation.kv import AS_COMPUTED, KV_FORMATS, KvFormat
from tests.gpu.selection import DTYPES, GPU, NEEDS_GPU, first
from tests.server.backends.cuda.kernel_cases import (
    CASES,
    HALVES,
    LATENT_CASES,
    SPLIT_CHUNKS,
    STORED_CASES,
    TOLERANCES,
    Case,
    LatentCase,
    alibi,
    check_attention,
    check_attention_to_stored,
    check_codes,
    check_gate,
    check_latent,
    check_norm,
    check_norm_of_heads,
    check_padding,
    check_quantised,
    check_rotation,
    check_routing,
    check_split_chunk,
)

pytestmark = NEEDS_GPU
FORMATS = [format for format in KV_FORMATS.values() if format != AS_COMPUTED]
CODED = [
    "decode, split, heads of 80 in a window",
    "decode, shared kv heads, rotated pairs",
    "decodes and a chunk, rotated",
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention_equals_the_reference(case: Case, dtype: torch.dtype) -> None:
    check_attention(case, dtype, GPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", STORED_CASES.values(), ids=STORED_CASES.keys())
def test_attention_to_what_is_stored_equals_the_reference(case: Case, dtype: torch.dtype) -> None:
    check_attention_to_stored(case, dtype, GPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LATENT_CASES.values(), ids=LATENT_CASES.keys())
def test_attention_over_rows_that_are_keys_and_values_equals_the_reference(
    case: LatentCase, dtype: torch.dtype
) -> None:
    check_latent(case, dtype, GPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SPLIT_CHUNKS)
def test_split_keys_of_chunks_give_what_they_do_unsplit(name: str, dtype: torch.dtype) -> None:
    for _ in range(20):  # programs finish in any order
        check_split_chunk(SPLIT_CHUNKS[name], dtype, GPU)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("name", first(CODED, CODED[:2]))
def test_attention_over_codes_equals_the_reference(name: str, format: KvFormat) -> None:
    check_quantised(CASES[name], format, torch.bfloat16, GPU)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_codes_are_to_the_bit_what_the_reference_stores(format: KvFormat) -> None:
    check_codes(format, GPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (70, 1)], ids=["mha", "gqa", "mqa"])
def test_a_row_without_a_sequence_is_harmless(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    check_padding(heads, kv_heads, dtype, GPU)


@pytest.mark.parametrize("kv_heads", [16, 4, 1], ids=["mha", "gqa", "mqa"])
def test_programs_that_finish_in_any_order_give_the_same_every_time(kv_heads: int) -> None:
    """The last program of a sequence must see what all the others wrote, whichever it is."""
    from server.backends.cuda.attention import PagedAttention

    case = Case([(600, 1), (20, 1), (300, 1)], (16, kv_heads), 128, rotation=(64, HALVES))
    kv, heads = case.inputs(torch.bfloat16, GPU)
    backend, meta, rotation = PagedAttention(case.scores_on(GPU)), case.meta(GPU), case.rotation_on(GPU)
    first = backend.self_attend(heads, kv, rotation, meta, window=0)
    for _ in range(1000):
        assert torch.equal(first, backend.self_attend(heads, kv, rotation, meta, window=0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_centred", [True, False], ids=["layer norm", "rms norm"])
def test_norms_equal_the_operators(is_centred: bool, dtype: torch.dtype) -> None:
    check_norm(is_centred, dtype, GPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_centred", [True, False], ids=["layer norm", "rms norm"])
@pytest.mark.parametrize(("counts", "size"), [((4, 1), 64), ((20, 9), 128)], ids=["one kv head", "two tiles"])
def test_norms_of_heads_equal_the_operators(
    counts: tuple[int, int], size: int, is_centred: bool, dtype: torch.dtype
) -> None:
    check_norm_of_heads(counts, size, is_centred, dtype, GPU)


@pytest.mark.parametrize("scoring", Scoring)
@pytest.mark.parametrize("sizes", [(1, 8, 2), (5, 8, 3), (700, 128, 8)], ids=str)
def test_tokens_find_their_experts_as_by_the_operators(sizes: tuple[int, int, int], scoring: Scoring) -> None:
    if scoring is Scoring.SPARSE_MIXER:
        sizes = (*sizes[:2], 2)  # of which it chooses no more
    check_routing(sizes, scoring is Scoring.SOFTMAX, torch.float32, GPU, scoring)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("half", [40, 10], ids=["whole head", "part of a head"])
@pytest.mark.parametrize("is_interleaved", [True, False], ids=["interleaved", "halves"])
def test_rotating_and_storing_equals_both_apart(is_interleaved: bool, half: int, dtype: torch.dtype) -> None:
    check_rotation(is_interleaved, half, dtype, GPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", Activation)
def test_gates_equal_the_operators(activation: Activation, dtype: torch.dtype) -> None:
    check_gate(activation, dtype, GPU)


@pytest.mark.parametrize("processors", [None, 4], ids=["alike", "by length"])
@pytest.mark.parametrize("kv_heads", [4, 2], ids=["mha", "gqa"])
def test_a_captured_decode_follows_its_sequences(kv_heads: int, processors: int | None) -> None:
    """A graph captured for some lengths attends to others when its tensors say so."""
    from server.backends.cuda.attention import PagedAttention

    case = Case([(200, 1), (3, 1), (120, 1)], (4, kv_heads), 128, alibi, rotation=(64, HALVES))
    backend, rotation = PagedAttention(case.scores_on(GPU), processors), case.rotation_on(GPU)
    kv, heads = case.inputs(torch.bfloat16, GPU)
    meta = case.meta(GPU)

    def step() -> Tensor:
        return backend.self_attend(heads, kv, rotation, replace(meta), window=0)  # whose plan is captured too

    step()  # compiles, and makes the slopes and the counts of programs on the device
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    # The first sequence is now in its middle, the others one token further.
    positions = torch.tensor([77, 3, 120], device=GPU)
    meta.positions.copy_(positions)
    meta.visible.copy_(positions + 1)
    expected_kv = kv.float()
    graph.replay()
    now = replace(meta, context_lengths=[78, 4, 121])
    reference = ReferenceAttention(case.scores_on(GPU))
    expected = reference.self_attend(heads.float(), expected_kv, rotation, now, window=0)
    torch.testing.assert_close(expected, out.float(), atol=TOLERANCES[torch.bfloat16], rtol=TOLERANCES[torch.bfloat16])
