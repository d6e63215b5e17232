"""Attention whose values are the first numbers of its keys, by the compiled kernels, against the reference.

Shapes: T tokens of all contexts, N heads, W numbers of a token's row.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from server.arch.spec import Rope
from server.backends.cpu import Kernels
from server.backends.cpu.attention import KernelAttention
from server.backends.protocol import Scores, StepMeta
from server.backends.reference.attention import BatchedAttention, ReferenceAttention, StoringAttention
from server.blocks import BLOCK_SIZE
from server.layers.position import Rotary
from server.quantisation.kv import AS_COMPUTED, Int8, KvFormat
from tests.combinations import all_pairs, by_turns
from tests.server.backends.cpu.test_attention import BLOCKS, QUANTISED, STEPS, named
from tests.server.backends.cpu.test_kernels import DTYPES, EACH, assert_near, random, threads
from tests.server.backends.test_attention import step_of

__all__ = ["threads"]

HEADS = 8
SIZES = ((512, 64), (32, 8), (20, 6), (8, 4))  # what is a value, and what is rotated behind it


def rows_of(meta: StepMeta, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Queries of all heads and the key of each token of all contexts: [T, N + 1, W]."""
    width = sum(size)
    return random(sum(meta.context_lengths), HEADS + 1, width, dtype=dtype) / width**0.25


def attended(
    attention: StoringAttention,
    format: KvFormat,
    meta: StepMeta,
    rows: Tensor,
    rope_dim: int,
    elsewhere: float = torch.nan,
) -> Tensor:
    """What the step's queries find in all contexts. elsewhere: what the cache holds beside these."""
    tokens = [(s, p) for s, length in enumerate(meta.context_lengths) for p in range(length)]
    owners, positions = torch.tensor(tokens).t()
    whole = replace(meta, owners=owners, positions=positions, visible=positions + 1)
    width, stored = format.width(rows.shape[2]), format.stored(rows.dtype)
    if stored == torch.uint8 and elsewhere:
        elsewhere = 255  # which is no number either, where one can be none
    kv = torch.full((1, BLOCKS, 1, BLOCK_SIZE, width), elsewhere).to(stored)
    rotation = Rotary(Rope(10000.0, rope_dim, interleaved=True), torch.device("cpu"))(positions, positions + 1)
    q = attention.rotate_and_write(rows.clone(), kv, rotation, whole)
    counts = torch.tensor(meta.query_starts).diff()
    is_asked = positions >= (torch.tensor(meta.context_lengths) - counts)[owners]
    return attention.attend(q[is_asked], kv, meta, 0)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("format", [AS_COMPUTED, *QUANTISED], ids=named)
def test_batched_equals_reference(format: KvFormat, step: str) -> None:
    meta, scores = step_of(STEPS[step], BLOCKS, seed=3), Scores(0.3, rank=32)
    rows = rows_of(meta, (32, 8), torch.float32)
    backends = (ReferenceAttention(scores, format), BatchedAttention(scores, format))
    assert_near(*(attended(backend, format, meta, rows, 8, elsewhere=0) for backend in backends))


@pytest.mark.parametrize(
    ("dtype", "format", "step", "size"), all_pairs(EACH, [AS_COMPUTED, *QUANTISED], STEPS, SIZES), ids=named
)
def test_kernels_equal_the_reference(
    kernels: Kernels, dtype: torch.dtype, format: KvFormat, step: str, size: tuple[int, int]
) -> None:
    meta, scores = step_of(STEPS[step], BLOCKS, seed=3), Scores(0.3, rank=size[0])
    rows = rows_of(meta, size, dtype)
    backends = (ReferenceAttention(scores, format), KernelAttention(kernels, scores, format))
    expected, found = (attended(backend, format, meta, rows, size[1]) for backend in backends)
    assert size[0] == found.shape[2]
    assert_near(expected, found)


@pytest.mark.parametrize(("dtype", "format"), by_turns(EACH * 2, [AS_COMPUTED, *QUANTISED]), ids=named)
def test_chunks_neighbours_and_threads_change_nothing(
    kernels: Kernels, dtype: torch.dtype, format: KvFormat, threads: int
) -> None:
    attention = KernelAttention(kernels, Scores(0.3, rank=48), format)
    rows = rows_of(step_of([(290, 290), (70, 70)], BLOCKS, seed=3), (48, 8), dtype)

    def last(count: int, *others: tuple[int, int]) -> Tensor:
        meta = step_of([(290, count), *others], BLOCKS, seed=3)
        return attended(attention, format, meta, rows[: sum(meta.context_lengths)], 8)[:count]

    at_once = last(290)
    for count in (77, 1):
        assert torch.equal(at_once[-count:], last(count))
        assert torch.equal(at_once[-count:], last(count, (70, 1 if count == 1 else 70)))
    torch.set_num_threads(1)
    assert torch.equal(at_once, last(290))


@DTYPES
def test_odd_ranks_go_to_stock_operators_where_pairs_share_a_word(kernels: Kernels, dtype: torch.dtype) -> None:
    meta, scores = step_of(STEPS["a later chunk"], BLOCKS, seed=3), Scores(0.3, rank=21)
    rows = rows_of(meta, (21, 5), dtype)[..., :25]
    backends = (BatchedAttention(scores, Int8()), KernelAttention(kernels, scores, Int8()))
    assert_near(*(attended(backend, Int8(), meta, rows, 4, elsewhere=0) for backend in backends))
