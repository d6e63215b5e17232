"""The Triton kernels on a GPU: the cases of the interpreter, in every dtype, and captured in a graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from server.arch.spec import Activation
from server.backends.reference.attention import ReferenceAttention
from server.blocks import BLOCK_SIZE
from tests.server.kernel_cases import (
    CASES,
    TOLERANCES,
    Case,
    alibi,
    check_attention,
    check_gate,
    check_norm,
    check_padding,
    check_rotation,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda", 0)
DTYPES = list(TOLERANCES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention_equals_the_reference(case: Case, dtype: torch.dtype) -> None:
    check_attention(case, dtype, GPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_heads", [2, 1], ids=["mha", "gqa"])
def test_a_row_without_a_sequence_is_harmless(kv_heads: int, dtype: torch.dtype) -> None:
    check_padding(kv_heads, dtype, GPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_centred", [True, False], ids=["layer norm", "rms norm"])
def test_norms_equal_the_operators(is_centred: bool, dtype: torch.dtype) -> None:
    check_norm(is_centred, dtype, GPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("half", [40, 10], ids=["whole head", "part of a head"])
@pytest.mark.parametrize("is_interleaved", [True, False], ids=["interleaved", "halves"])
def test_rotating_and_storing_equals_both_apart(is_interleaved: bool, half: int, dtype: torch.dtype) -> None:
    check_rotation(is_interleaved, half, dtype, GPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", Activation)
def test_gates_equal_the_operators(activation: Activation, dtype: torch.dtype) -> None:
    check_gate(activation, dtype, GPU)


@pytest.mark.parametrize("kv_heads", [4, 2], ids=["mha", "gqa"])
def test_a_captured_decode_follows_its_sequences(kv_heads: int) -> None:
    """A graph captured for some lengths attends to others when its tensors say so."""
    from server.backends.cuda.attention import PagedAttention

    case = Case([(200, 1), (3, 1), (120, 1)], (4, kv_heads), 128, alibi)
    backend = PagedAttention(case.scores_on(GPU))
    kv, q, k, v = case.inputs(torch.bfloat16, GPU)
    meta = case.meta(GPU)

    def step() -> Tensor:
        backend.write(kv, k, v, meta)
        return backend.attend(q, kv, meta, window=0)

    step()  # compiles, and moves the slopes to the device
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    # The first sequence is now in its middle, the others one token further.
    positions = torch.tensor([77, 3, 120], device=GPU)
    tables = meta.block_tables[torch.arange(3, device=GPU), positions // BLOCK_SIZE]
    meta.positions.copy_(positions)
    meta.visible.copy_(positions + 1)
    meta.slots.copy_(tables * BLOCK_SIZE + positions % BLOCK_SIZE)
    graph.replay()
    now = replace(meta, context_lengths=[78, 4, 121])
    expected = ReferenceAttention(case.scores_on(GPU)).attend(q.float(), kv.float(), now, window=0)
    torch.testing.assert_close(expected, out.float(), atol=TOLERANCES[torch.bfloat16], rtol=TOLERANCES[torch.bfloat16])
