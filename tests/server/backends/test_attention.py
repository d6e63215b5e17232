"""Attention backends against the reference, which defines correct."""

from __future__ import annotations

import random

import pytest
import torch

from server.arch.spec import Alibi
from server.backends.protocol import Scores, StepMeta
from server.backends.reference.attention import BatchedAttention, ReferenceAttention, _groups
from server.blocks import BLOCK_SIZE, num_blocks
from server.layers.position import alibi_slopes
from server.quantisation.kv import AS_COMPUTED
from tests.combinations import all_pairs

SLOPES = tuple(alibi_slopes(8, Alibi()))


def step_of(lengths: list[tuple[int, int]], num_blocks_total: int, seed: int) -> StepMeta:
    """Sequences of (context length, queries), decodes first, on randomly scattered blocks."""
    rng = random.Random(seed)
    free = rng.sample(range(num_blocks_total), num_blocks_total)
    longest = max(num_blocks(length) for length, _ in lengths)
    tables, positions, owners, starts = [], [], [], [0]
    for sequence, (length, queries) in enumerate(lengths):
        table = [free.pop() for _ in range(num_blocks(length))]
        tables.append(table + [0] * (longest - len(table)))
        positions += range(length - queries, length)
        owners += [sequence] * queries
        starts.append(starts[-1] + queries)
    return StepMeta(
        num_decodes=sum(queries == 1 for _, queries in lengths),
        query_starts=starts,
        context_lengths=[length for length, _ in lengths],
        longest=max((queries for _, queries in lengths if queries > 1), default=0),
        starts=torch.tensor(starts, dtype=torch.int32),
        positions=torch.tensor(positions),
        visible=torch.tensor(positions) + 1,
        prompt_lengths=torch.tensor(positions) + 1,
        owners=torch.tensor(owners),
        block_tables=torch.tensor(tables),
    )


STEPS = {
    "one decode": [(1, 1)],
    "decodes of ragged lengths": [(1, 1), (16, 1), (17, 1), (200, 1), (64, 1)],
    "fresh prompts": [(5, 5), (33, 33)],
    "a later chunk": [(90, 40)],
    "decodes, a chunk and a fresh prompt": [(3, 1), (120, 1), (60, 20), (31, 31)],
}


SCORES = {
    "plain": Scores(0.3),
    "alibi": Scores(0.3, tuple(alibi_slopes(8, Alibi()))),
    "cap": Scores(0.3, cap=2.0),
    "alibi and cap": Scores(0.3, tuple(alibi_slopes(8, Alibi())), 2.0),
    "sinks": Scores(0.3, sinks=torch.linspace(-3, 5, 8)),
    "chunks": Scores(0.3, chunk=24),
}


@pytest.mark.parametrize(
    ("step", "kind", "kv_heads", "head_dim", "window"), all_pairs(STEPS, SCORES, (8, 2), (16, 80), (0, 20))
)
def test_batched_equals_reference(step: str, kind: str, kv_heads: int, head_dim: int, window: int) -> None:
    generator, scores = torch.Generator().manual_seed(1), SCORES[kind]
    meta = step_of(STEPS[step], 64, seed=3)
    kv = torch.randn(2, 64, kv_heads, BLOCK_SIZE, head_dim, generator=generator)
    q, k, v = (
        torch.randn(meta.query_starts[-1], heads, head_dim, generator=generator) for heads in (8, kv_heads, kv_heads)
    )
    outputs = []
    for backend in (ReferenceAttention(scores), BatchedAttention(scores)):
        cache = kv.clone()
        backend.write(cache, k, v, meta)
        outputs.append(backend.attend(q, cache, meta, window))
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -3e38])
@pytest.mark.parametrize("kind", ["plain", "sinks"])
def test_whatever_others_have_left_behind_a_context_changes_nothing(kind: str, poison: float) -> None:
    """A sequence whose adapter computes what are no numbers has written to blocks that others have now."""
    meta, attention = step_of(STEPS["decodes, a chunk and a fresh prompt"], 64, seed=3), BatchedAttention(SCORES[kind])
    generator = torch.Generator().manual_seed(1)
    seen = {
        int(table[place // BLOCK_SIZE]) * BLOCK_SIZE + place % BLOCK_SIZE
        for table, length in zip(meta.block_tables, meta.context_lengths, strict=True)
        for place in range(length)
    }
    slots = torch.tensor([slot for slot in range(64 * BLOCK_SIZE) if slot not in seen])
    q, kv = (
        torch.randn(meta.query_starts[-1], 8, 16, generator=generator),
        torch.randn(2, 64, 2, BLOCK_SIZE, 16, generator=generator),
    )
    expected = attention.attend(q, kv, meta, 0)
    rows = torch.full((len(slots), 2, 16), poison)
    AS_COMPUTED.write(kv, rows, rows, slots)
    assert torch.equal(expected, attention.attend(q, kv, meta, 0))


def test_write_touches_the_named_slots_alone() -> None:
    kv = torch.zeros(2, 3, 1, BLOCK_SIZE, 2)
    meta = step_of([(17, 1)], 3, seed=0)
    BatchedAttention(Scores(1.0)).write(kv, torch.ones(1, 1, 2), 2 * torch.ones(1, 1, 2), meta)
    slot = int(meta.slots[0])
    flat = kv.view(2, -1, 2)
    assert [[1, 1], [2, 2]] == flat[:, slot].tolist()
    assert 3 * 2 == int(kv.sum())


def test_a_nearer_key_wins_where_contents_are_equal() -> None:
    meta = step_of([(4, 1)], 2, seed=0)
    kv = torch.zeros(2, 2, 1, BLOCK_SIZE, 1)
    slots = [int(meta.block_tables[0, 0]) * BLOCK_SIZE + i for i in range(4)]
    kv.view(2, -1)[1, slots] = torch.tensor([0.0, 0.0, 0.0, 1.0])  # the value of the query's own token is 1
    flat = ReferenceAttention(Scores(1.0)).attend(torch.zeros(1, 1, 1), kv, meta, 0)
    steep = ReferenceAttention(Scores(1.0, (5.0,))).attend(torch.zeros(1, 1, 1), kv, meta, 0)
    assert 0.25 == pytest.approx(flat.item())
    assert steep.item() > 0.99


def test_a_sink_takes_its_share_of_the_weights() -> None:
    meta = step_of([(4, 1)], 2, seed=0)
    kv = torch.zeros(2, 2, 1, BLOCK_SIZE, 1)
    kv[1] = 1.0
    sink = torch.tensor([4.0]).log()  # as much as the four keys, whose scores are 0
    assert 0.5 == pytest.approx(
        ReferenceAttention(Scores(1.0, sinks=sink)).attend(torch.zeros(1, 1, 1), kv, meta, 0).item()
    )


def test_a_window_hides_what_is_before_it() -> None:
    meta = step_of([(4, 1)], 2, seed=0)
    kv = torch.zeros(2, 2, 1, BLOCK_SIZE, 1)
    slots = [int(meta.block_tables[0, 0]) * BLOCK_SIZE + i for i in range(4)]
    kv.view(2, -1)[1, slots] = torch.tensor([9.0, 9.0, 1.0, 3.0])
    assert 2.0 == pytest.approx(ReferenceAttention(Scores(1.0)).attend(torch.zeros(1, 1, 1), kv, meta, 2).item())


def test_groups_cover_every_decode_once_within_the_bound() -> None:
    lengths = [10, 9000, 9000, 3, 20000, 5, 5]
    meta = StepMeta(len(lengths), [], lengths, 0, *[torch.empty(0)] * 6)
    groups = list(_groups(meta))
    assert [i for first, last in groups for i in range(first, last)] == list(range(len(lengths)))
    assert all(last - first == 1 or max(lengths[first:last]) * (last - first) <= 16384 for first, last in groups)


def test_a_query_sees_its_own_chunk_alone() -> None:
    meta, kv = step_of([(8, 8)], 4, seed=0), torch.zeros(2, 4, 1, BLOCK_SIZE, 1)
    attention = ReferenceAttention(Scores(1.0, chunk=3))
    attention.write(kv, torch.zeros(8, 1, 1), torch.arange(8.0).view(8, 1, 1), meta)
    seen = attention.attend(torch.zeros(8, 1, 1), kv, meta, 0).flatten().tolist()
    assert [0, 0.5, 1, 3, 3.5, 4, 6, 6.5] == seen  # the means of the values 0 … 2, 3 … 5 and 6 … 7 so far
