"""What the Triton kernels are checked on, in the interpreter, by the compiler and on a GPU, and against what.

The kernels' modules are imported by the checks, not here: Triton is not everywhere that tests are collected, and has to
be told before its import whether to interpret.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from server.arch.spec import Activation, Alibi, Scoring
from server.backends.protocol import SOFTMAX, Norm, Rotation, RouterRule, Scores, StepMeta, Summand, split_heads
from server.backends.reference.attention import ReferenceAttention, rotate
from server.backends.reference.linear import DenseFormat, LayerNorm, RmsNorm, StockRouting, stock_gate
from server.blocks import BLOCK_SIZE
from server.layers.position import alibi_slopes
from server.quantisation.kv import AS_COMPUTED, Float8E4M3, Int8, KvFormat
from tests.server.backends.test_attention import step_of

if TYPE_CHECKING:
    from server.backends.cuda.attention import PagedAttention

# Largest difference from the reference, for values around 1: some roundings of each dtype.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
KERNELS = pytest.mark.kernels
BLOCKS = 64
# Multiprocessors to fill: with one, four programs are enough, and nothing is split; with MANY, sequences are as their
# lengths are; with MOST, all alike.
ONE_SPLIT, MANY_SPLITS, MOST_SPLITS = 1, 4, 16


@dataclass(frozen=True)
class LatentCase:
    """One step over rows that are keys and values: (context length, queries) of each sequence, decodes first."""

    lengths: list[tuple[int, int]]
    heads: int
    rank: int
    rotated: int  # behind it
    processors: int = 1
    format: KvFormat = AS_COMPUTED

    def inputs(self, dtype: torch.dtype, device: torch.device) -> tuple[StepMeta, Tensor, Tensor, Rotation]:
        """The step, a cache [1, B, 1, P, W] with numbers in every slot, heads [T, N + 1, R + r], and their rotation."""
        step = Case(self.lengths, (1, 1), 16, rotation=(self.rotated // 2, True))
        meta, rotation, width = step.meta(device), step.rotation_on(device), self.rank + self.rotated
        assert rotation is not None
        stored, size = self.format.stored(dtype), (1, BLOCKS, 1, BLOCK_SIZE, self.format.width(width))
        kv = torch.zeros(size, dtype=stored, device=device)
        rows = random(BLOCKS * BLOCK_SIZE, 1, width, dtype=dtype, device=device)
        self.format.write(kv, rows, None, torch.arange(len(rows), device=device))
        return meta, kv, random(meta.query_starts[-1], self.heads + 1, width, dtype=dtype, device=device), rotation


LATENT_CASES = {
    "decode": LatentCase([(1, 1), (16, 1), (17, 1), (120, 1)], 16, 64, 16),
    "decode, split, few heads": LatentCase([(17, 1), (120, 1)], 4, 80, 24, processors=4),
    "decode, split alike": LatentCase([(17, 1), (120, 1)], 4, 64, 16, processors=16),
    "decode, many, split as they are long": LatentCase(
        [(150, 1), (1, 1), (17, 1), (100, 1), (3, 1)], 20, 64, 16, processors=4
    ),
    "decode, split, int8": LatentCase([(17, 1), (120, 1)], 20, 64, 16, 4, Int8()),
    "decodes and chunks": LatentCase([(40, 1), (60, 20), (31, 31)], 8, 64, 16),
    "decodes and chunks, int8": LatentCase([(40, 1), (60, 20)], 4, 64, 16, format=Int8()),
    "decodes and chunks, float8": LatentCase([(40, 1), (60, 20)], 4, 64, 16, format=Float8E4M3()),
}


def check_latent(case: LatentCase, dtype: torch.dtype, device: torch.device) -> None:
    """Against the reference: what comes out, and what is stored."""
    from server.backends.cuda.attention import PagedAttention

    meta, kv, heads, rotation = case.inputs(dtype, device)
    scores = Scores(0.1, rank=case.rank)
    expected_kv, found_kv = kv.clone(), kv.clone()
    expected = ReferenceAttention(scores, case.format).self_attend(heads.clone(), expected_kv, rotation, meta, 0)
    attention = PagedAttention(scores, case.processors, cache=case.format)
    found = attention.self_attend(heads.clone(), found_kv, rotation, meta, 0)
    tolerance = TOLERANCES[dtype] * (1 if case.format == AS_COMPUTED else 10)  # a rotation may round to another code
    torch.testing.assert_close(expected, found, atol=tolerance, rtol=tolerance)
    is_other = (expected_kv != found_kv).float().mean()
    if case.format == AS_COMPUTED:
        torch.testing.assert_close(expected_kv, found_kv, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    else:
        assert is_other < 0.01
    nowhere = replace(meta, visible=torch.zeros_like(meta.visible))
    attention.self_attend(heads.clone(), untouched := kv.clone(), rotation, nowhere, 0)
    assert torch.equal(kv, untouched)


def in_suite(suite: Iterable[Any], whole: Iterable[Any]) -> list[Any]:
    """Parameters: those of the suite, then the rest of the whole, which `make test-kernels` runs."""
    kept = list(suite)
    rest = [case for case in whole if case not in kept]
    return [*kept, *(pytest.param(*(case if type(case) is tuple else [case]), marks=KERNELS) for case in rest)]


def plain(num_heads: int) -> Scores:
    return Scores(0.1)


def alibi(num_heads: int) -> Scores:
    return Scores(0.1, tuple(alibi_slopes(num_heads, Alibi())))


def capped(num_heads: int) -> Scores:
    return Scores(0.3, cap=2.0)


def sinking(num_heads: int) -> Scores:
    return Scores(0.1, sinks=torch.linspace(-3, 5, num_heads))


def chunked(num_heads: int) -> Scores:
    return Scores(0.1, chunk=48)


def all_terms(num_heads: int) -> Scores:
    return replace(alibi(num_heads), cap=2.0)


def learned(num_heads: int) -> Scores:
    """A learned bias that differs up to 20 tokens away."""
    return Scores(0.1, bias=torch.randn(num_heads, 41, generator=torch.Generator().manual_seed(2)))


@dataclass(frozen=True)
class Case:
    """One step: (context length, queries) of each sequence, decodes first, and how it is scored."""

    lengths: list[tuple[int, int]]
    heads: tuple[int, int]  # heads and kv heads
    head_dim: int
    scores: Callable[[int], Scores] = plain
    window: int = 0
    processors: int = ONE_SPLIT
    is_causal: bool = True
    rotation: tuple[int, bool] | None = None  # pairs of features that are rotated, and whether they are interleaved

    def meta(self, device: torch.device) -> StepMeta:
        meta = step_of(self.lengths, BLOCKS, seed=3)
        if not self.is_causal:
            counts = torch.tensor(self.lengths)
            meta = replace(meta, visible=counts[:, 0].repeat_interleave(counts[:, 1]))
        tensors = {name: t.to(device) for name, t in vars(meta).items() if isinstance(t, Tensor)}
        return replace(meta, **tensors)

    def scores_on(self, device: torch.device) -> Scores:
        scores = self.scores(self.heads[0])
        on_device = {name: t.to(device) for name, t in vars(scores).items() if isinstance(t, Tensor)}
        return replace(scores, **on_device)

    def rotation_on(self, device: torch.device) -> Rotation | None:
        if self.rotation is None:
            return None
        half, is_interleaved = self.rotation
        angles = random(sum(queries for _, queries in self.lengths), 1, half, dtype=torch.float32, device=device)
        return Rotation(angles.cos(), angles.sin(), is_interleaved)

    def inputs(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """A cache [2, B, K, P, H] with something in every slot, and queries, keys and values [T, N + 2 K, H]."""
        heads, kv_heads = self.heads
        tokens = sum(queries for _, queries in self.lengths)
        kv = random(2, BLOCKS, kv_heads, BLOCK_SIZE, self.head_dim, dtype=dtype, device=device)
        return kv, random(tokens, heads + 2 * kv_heads, self.head_dim, dtype=dtype, device=device)


RAGGED, LONG = [(1, 1), (16, 1), (17, 1), (120, 1)], [(17, 1), (120, 1)]
HALVES, INTERLEAVED = False, True
CASES = {
    "decode": Case(RAGGED, (2, 2), 64),
    "decode, rotated": Case(RAGGED, (2, 2), 128, rotation=(64, HALVES)),
    "decode, split": Case(LONG, (2, 2), 128, alibi, processors=MANY_SPLITS),
    "decode, split, heads of 80 in a window": Case(LONG, (2, 2), 80, all_terms, 50, MANY_SPLITS),
    "decode, split, heads of 96 rotated in part": Case(LONG, (2, 2), 96, rotation=(20, HALVES), processors=MANY_SPLITS),
    "decode, split alike": Case(LONG, (2, 2), 64, all_terms, 50, MOST_SPLITS, rotation=(32, HALVES)),
    "decode, shared kv heads, split alike": Case(LONG, (6, 2), 96, all_terms, 0, MOST_SPLITS),
    "decode, one sequence": Case([(40, 1)], (4, 4), 64, alibi),
    "decode, many, split as they are long": Case(
        [(150, 1), *RAGGED, (90, 1), (3, 1)], (2, 2), 64, alibi, 0, MANY_SPLITS, rotation=(32, HALVES)
    ),
    "decode, shared kv heads, many, split as they are long": Case(
        [(150, 1), *RAGGED, (90, 1), (3, 1)], (8, 2), 64, sinking, 100, MANY_SPLITS, rotation=(32, HALVES)
    ),
    "decode, heads of 256": Case(RAGGED, (2, 2), 256, capped, rotation=(128, HALVES)),
    "decode, learned bias": Case(RAGGED, (2, 2), 64, learned),
    "decode, sinks": Case(RAGGED, (2, 2), 64, sinking),
    "decode, split, sinks in a window": Case(LONG, (2, 2), 64, sinking, 40, MANY_SPLITS),
    "decode, shared kv heads, sinks, split": Case(LONG, (16, 2), 64, sinking, 0, MANY_SPLITS, rotation=(32, HALVES)),
    "decode, shared kv heads, sinks": Case(RAGGED, (16, 2), 64, sinking, 30),
    "decode, a window of one token": Case(LONG, (2, 2), 64, plain, 1, MANY_SPLITS),
    "decode, shared kv heads": Case(RAGGED, (4, 2), 128, alibi, 30),
    "decode, shared kv heads, rotated pairs": Case(RAGGED, (16, 2), 128, rotation=(32, INTERLEAVED)),
    "decode, shared kv heads, split": Case(LONG, (6, 2), 96, all_terms, 0, MANY_SPLITS),
    "decode, shared kv heads of 112, split, rotated": Case(
        LONG, (14, 2), 112, rotation=(56, HALVES), processors=MANY_SPLITS
    ),
    "decode, shared kv heads of 256, split": Case(LONG, (4, 2), 256, capped, 70, MANY_SPLITS),
    "decode, in chunks": Case(RAGGED, (2, 2), 64, chunked, 20),
    "decode, heads of 512": Case(RAGGED, (2, 2), 512, rotation=(256, HALVES)),
    "decode, shared kv heads of 512 in chunks, split": Case(
        LONG, (8, 2), 512, chunked, processors=MANY_SPLITS, rotation=(256, HALVES)
    ),
    "decode, shared kv heads, learned bias": Case(RAGGED, (4, 2), 64, learned),
    "decode, one kv head for sixteen, split": Case(LONG, (16, 1), 64, alibi, processors=MANY_SPLITS),
    "decode, more heads to a kv head than a program takes": Case([(40, 1)], (71, 1), 64, rotation=(32, HALVES)),
    "decode, and with them split": Case([(150, 1)], (71, 1), 64, rotation=(32, HALVES), processors=MANY_SPLITS),
    "fresh prompts": Case([(5, 5), (33, 33), (90, 90)], (2, 2), 64),
    "a later chunk": Case([(90, 40)], (4, 2), 80, alibi),
    "a prompt behind a cached prefix": Case([(100, 4), (96, 95)], (2, 1), 96, all_terms),
    "a chunk in a window with sinks": Case([(150, 60)], (4, 2), 64, sinking, 20),
    "a chunk in a window": Case([(150, 60)], (2, 1), 128, alibi, 20),
    "a chunk with heads of 256": Case([(70, 40)], (2, 1), 256, capped, 30),
    "a chunk in chunks": Case([(150, 60), (48, 5)], (4, 2), 64, chunked),
    "a chunk with heads of 512": Case([(70, 40)], (2, 1), 512, chunked, 30),
    "encoder": Case([(40, 40), (17, 17)], (2, 2), 64, learned, is_causal=False),
    "encoder in a window": Case([(40, 40), (17, 17)], (2, 2), 64, plain, 10, is_causal=False),
    "decodes, a chunk and a fresh prompt": Case([(3, 1), (120, 1), (60, 20), (31, 31)], (4, 2), 64, all_terms),
    "decodes and a chunk, rotated": Case([(3, 1), (60, 20)], (4, 2), 80, rotation=(16, INTERLEAVED)),
}
# Attention to what was stored before, as to an encoder's output.
STORED_CASES = {
    "decode, split": Case(LONG, (2, 2), 64, learned, processors=MANY_SPLITS, is_causal=False),
    "decode, shared kv heads": Case(RAGGED, (4, 2), 64, learned, is_causal=False),
    "decodes and a chunk": Case([(40, 1), (60, 20)], (2, 2), 64, is_causal=False),
}


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def check_attention(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """Rotate, store and attend as the reference does, one step after the other in the same place."""
    from server.backends.cuda.attention import PagedAttention

    meta, scores, rotation = case.meta(device), case.scores_on(device), case.rotation_on(device)
    kv, heads = case.inputs(dtype, device)
    expected_kv, found_kv = kv.float(), kv.clone()
    expected = ReferenceAttention(scores).self_attend(heads.float(), expected_kv, rotation, meta, case.window)
    backend = PagedAttention(scores, case.processors)
    found = backend.self_attend(heads.clone(), found_kv, rotation, meta, case.window)
    tolerance = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    torch.testing.assert_close(expected_kv, found_kv.float(), **tolerance)
    torch.testing.assert_close(expected, found.float(), **tolerance)
    if rotation is None:
        torch.testing.assert_close(expected_kv, found_kv.float(), atol=0, rtol=0)
    check_nothing_is_left(backend, device)


# Few queries behind many keys, which are split; some sequences have keys for fewer parts than others.
SPLIT_CHUNKS = {
    "of all terms": Case([(100, 4), (40, 40), (150, 60)], (4, 2), 64, all_terms, processors=64),
    "behind decodes, in a window with sinks": Case([(40, 1), (150, 5), (7, 7)], (4, 2), 64, sinking, 100, 16),
    "with heads of 256": Case([(130, 40)], (2, 1), 256, capped, processors=16),
    "in chunks": Case([(150, 20)], (4, 2), 80, chunked, processors=16),
}


def check_split_chunk(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """As `check_attention`, with parts of a few keys."""
    from server.backends.cuda.kernels import prefill

    chosen = []

    def noted(*given: int) -> int:
        chosen.append(choose(*given))
        return chosen[-1]

    choose = prefill.choose_splits
    with patch.object(prefill, "LEAST_KEYS", 16), patch.object(prefill, "choose_splits", noted):
        check_attention(case, dtype, device)
        check_empty_places(case, dtype, device)
    assert len(chosen) == 2 and chosen[0] == chosen[1] > 1


def check_empty_places(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """As in a captured step, which has places for more chunks than there are."""
    from server.backends.cuda.attention import PagedAttention

    meta, scores, rotation = case.meta(device), case.scores_on(device), case.rotation_on(device)
    kv, heads = case.inputs(dtype, device)
    empty = torch.zeros(8, meta.block_tables.shape[1], dtype=meta.block_tables.dtype, device=device)
    tables, starts = torch.cat([meta.block_tables, empty]), torch.cat([meta.starts, meta.starts[-1:].repeat(8)])
    expected = ReferenceAttention(scores).self_attend(heads.float(), kv.float(), rotation, meta, case.window)
    backend, padded = PagedAttention(scores, case.processors), replace(meta, block_tables=tables, starts=starts)
    found = backend.self_attend(heads.clone(), kv.clone(), rotation, padded, case.window)
    torch.testing.assert_close(expected, found.float(), atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    check_nothing_is_left(backend, device)


def check_attention_to_stored(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """Write, then attend as the reference does."""
    from server.backends.cuda.attention import PagedAttention

    meta, scores = case.meta(device), case.scores_on(device)
    kv, heads = case.inputs(dtype, device)
    caches, outputs = [], []
    for backend, kind in (
        (ReferenceAttention(scores), torch.float32),
        (PagedAttention(scores, case.processors), dtype),
    ):
        q, k, v = split_heads(heads.to(kind), case.heads[1])
        cache = kv.to(kind, copy=True)
        backend.write(cache, k, v, meta)
        outputs.append(backend.attend(q, cache, meta, case.window).float())
        caches.append(cache.float())
    torch.testing.assert_close(caches[0], caches[1], atol=0, rtol=0)
    torch.testing.assert_close(outputs[0], outputs[1], atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def check_quantised(case: Case, format: KvFormat, dtype: torch.dtype, device: torch.device) -> None:
    """Over a cache of codes: what is stored and what is found are the reference's."""
    from server.backends.cuda.attention import PagedAttention

    meta, scores, rotation = case.meta(device), case.scores_on(device), case.rotation_on(device)
    kv_heads = case.heads[1]
    heads = case.inputs(dtype, device)[1]
    shape = (2, BLOCKS, kv_heads, BLOCK_SIZE, format.width(case.head_dim))
    expected_kv = torch.zeros(shape, dtype=torch.uint8, device=device)
    slots = torch.arange(BLOCKS * BLOCK_SIZE, device=device)
    format.write(expected_kv, *random(2, len(slots), kv_heads, case.head_dim, dtype=dtype, device=device), slots)
    found_kv = expected_kv.clone()
    reference, backend = ReferenceAttention(scores, format), PagedAttention(scores, case.processors, cache=format)
    expected = reference.self_attend(heads.clone(), expected_kv, rotation, meta, case.window)
    found = backend.self_attend(heads.clone(), found_kv, rotation, meta, case.window)
    torch.testing.assert_close(expected, found, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    if rotation is None:  # else a rotated key may round to a neighbour
        assert torch.equal(expected_kv, found_kv)
    else:
        assert torch.equal(expected_kv[1], found_kv[1])
        assert (expected_kv[0] != found_kv[0]).float().mean() < 1e-3
    check_nothing_is_left(backend, device)


def check_codes(format: KvFormat, device: torch.device) -> None:
    """Rows of all sizes, ties, and what is no number are stored to the bit as the reference stores them."""
    from server.backends.cuda.kernels.cache import store

    k, v = random(2, 64, 3, 80, dtype=torch.float32, device=device)
    k *= torch.logspace(-20, 20, 64, device=device).view(64, 1, 1)
    v *= torch.logspace(-8, 6, 64, device=device).view(64, 1, 1)
    k[3], k[4, :, 3:6], k[5, 0, 0], k[6, 1, 1] = 0, float("nan"), float("-inf"), 3e38
    v[6, :, :8] = torch.tensor([0.5, 1.5, 2.5, 3.5, -0.5, 127, -127, 4.5])
    v[7, 0] = torch.arange(80) / 1024 + 2**-12
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(1))[:64].to(device)
    expected, found = torch.zeros(2, 2, BLOCKS, 3, BLOCK_SIZE, format.width(80), dtype=torch.uint8, device=device)
    format.write(expected, k, v, slots)
    store(found, k, v, slots, format=format)
    assert torch.equal(expected, found)


def check_nothing_is_left(backend: PagedAttention, device: torch.device) -> None:
    """No program counts as arrived when a launch is over: the next one, perhaps of a graph, counts from zero."""
    _, processors = backend._on(device)
    assert 0 == processors.arrivals.abs().sum()


def check_padding(heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> None:
    """A row of a captured batch that no sequence fills is stored nowhere, and attends to nothing: it gets 0."""
    from server.backends.cuda.attention import PagedAttention

    case = Case([(20, 1), (1, 1)], (heads, kv_heads), 64, rotation=(32, HALVES))
    meta, turned = case.meta(device), case.rotation_on(device)
    meta.visible[1] = 0
    for processors, window, rotation in ((ONE_SPLIT, 0, turned), (MANY_SPLITS, 0, None), (MANY_SPLITS, 5, turned)):
        meta.positions[1] = 3 * window  # of a sequence that has left
        backend = PagedAttention(Scores(1.0), processors)
        cache = torch.zeros(2, BLOCKS, kv_heads, BLOCK_SIZE, 64, dtype=dtype, device=device)
        ones = torch.ones(2, heads + 2 * kv_heads, 64, dtype=dtype, device=device)
        out = backend.self_attend(ones, cache, rotation, meta, window)
        assert kv_heads == cache[0].any(dim=-1).sum() == cache[1].any(dim=-1).sum()
        assert kv_heads * 64 == cache[1].float().sum()
        assert 0 < out[0].float().min()
        assert 0 == out[1].float().abs().max()
        check_nothing_is_left(backend, device)


def check_norm(is_centred: bool, dtype: torch.dtype, device: torch.device) -> None:
    """Alone, of rows that lie apart too, and behind all sorts of residual additions, as the operators do."""
    x, *deltas = random(3, 3, 80, dtype=dtype, device=device)
    biases = tuple(random(2, 80, dtype=dtype, device=device))
    (norm, fused), (own_norm, own_fused) = (norms(80, is_centred, seed, dtype, device) for seed in (0, 1))
    tolerance = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    torch.testing.assert_close(norm(x), fused(x), **tolerance)
    apart = random(5, 3, 80, dtype=dtype, device=device)
    torch.testing.assert_close(norm(apart[:, 1:]), fused(apart[:, 1:]), **tolerance)
    torch.testing.assert_close(norm(apart[:, 2:]), fused(apart[:, 2:]), **tolerance)
    for summand in (
        Summand((deltas[0],)),
        Summand((deltas[0],), biases[:1]),
        Summand((deltas[0],), biases),
        Summand(tuple(deltas)),
        Summand(tuple(deltas), biases),
        Summand((deltas[0],), norm=own_norm),
        Summand((deltas[0],), biases[:1], own_norm),
    ):
        total, normed = fused.add(x, summand if summand.norm is None else replace(summand, norm=own_fused))
        torch.testing.assert_close(summand.onto(x), total, **tolerance)
        torch.testing.assert_close(norm(total), normed, **tolerance)


def check_norm_of_heads(
    counts: tuple[int, int], size: int, is_centred: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Queries and keys as each by its norm, values as they are; counts: of heads and kv heads."""
    queries, keys = (norms(size, is_centred, seed, dtype, device) for seed in (0, 1))
    heads = random(3, counts[0] + 2 * counts[1], size, dtype=dtype, device=device)
    expected = queries[0].normalise_heads(keys[0], heads, counts[1])
    found = queries[1].normalise_heads(keys[1], heads.clone(), counts[1])
    torch.testing.assert_close(expected, found, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    assert torch.equal(heads[:, -counts[1] :], found[:, -counts[1] :])


def norms(size: int, is_centred: bool, seed: int, dtype: torch.dtype, device: torch.device) -> tuple[Norm, Norm]:
    """The same norm in operators and fused."""
    from server.backends.cuda.fused import FusedNorm

    weight, bias = random(2, 2, size, dtype=dtype, device=device)[seed] / 4 + 1
    norm = LayerNorm(weight, bias, 1e-5) if is_centred else RmsNorm(weight, 1e-5)
    return norm, FusedNorm(weight, bias if is_centred else None, 1e-5, is_centred=is_centred)


def check_routing(
    sizes: tuple[int, int, int],
    renormalise: bool,
    dtype: torch.dtype,
    device: torch.device,
    scoring: Scoring = Scoring.SOFTMAX,
) -> None:
    """Tokens go to the same experts in the same order, and come back weighted alike. sizes: T, E, k.

    scoring: if it is no softmax, a bias for the choice, groups where they divide the experts, and a scale too.
    """
    from server.backends.cuda.kernels.routing import FusedRouting

    tokens, experts, top_k = sizes
    width = 1100 if tokens < 10 else 40  # a tile and a part, where that is soon computed
    x = random(tokens, 64, dtype=dtype, device=device)
    router = DenseFormat(random(experts, 64, dtype=dtype, device=device))
    rule = RouterRule(scoring, random(1, experts, dtype=torch.float32, device=device)[0], scale=2.5, tolerance=0.2)
    rule = replace(rule, num_groups=1 if experts % 4 else 4, top_groups=1 if experts % 4 else 2)
    rule = SOFTMAX if scoring is Scoring.SOFTMAX else rule
    stock = StockRouting(torch.arange(experts, device=device), top_k, renormalise, rule)(router, x)
    fused = FusedRouting(experts, top_k, renormalise, rule)(router, x)
    tolerance = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    assert torch.equal(stock.tokens, fused.tokens.long())
    assert torch.equal(stock.ends, fused.ends)
    assert torch.equal(stock.order, fused.places.argsort())
    torch.testing.assert_close(stock.weights.float(), fused.weights, **tolerance)
    y = random(tokens * top_k, width, dtype=dtype, device=device)
    torch.testing.assert_close(stock.combine(y), fused.combine(y), **tolerance)


def check_rotation(is_interleaved: bool, half: int, dtype: torch.dtype, device: torch.device) -> None:
    """Queries and cache as after rotating, then storing; the last token has no slot."""
    from server.backends.cuda.kernels.rotate import rotate_and_store

    angles = random(5, 1, half, dtype=torch.float32, device=device)
    rotation = Rotation(angles.cos(), angles.sin(), is_interleaved)
    q, k, v = random(5, 10, 80, dtype=dtype, device=device).split([6, 2, 2], dim=1)
    slots = torch.tensor([5, 17, 63, 0, -1], device=device)
    fused, separate = torch.zeros(2, 2, 4, 2, BLOCK_SIZE, 80, dtype=dtype, device=device)
    turned = rotate_and_store(q, k, v, rotation, fused, slots)
    AS_COMPUTED.write(separate, rotate(rotation, k)[:4], v[:4], slots[:4])
    tolerance = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    torch.testing.assert_close(rotate(rotation, q), turned, **tolerance)
    torch.testing.assert_close(separate, fused, **tolerance)


def check_gate(activation: Activation, dtype: torch.dtype, device: torch.device) -> None:
    """As activation, then product; a width of more than one tile."""
    from server.backends.cuda.fused import fused_gate

    gate_up = 3 * random(2, 3000, dtype=dtype, device=device)
    expected = stock_gate(activation, gate_up.float()).to(dtype)
    torch.testing.assert_close(
        expected, fused_gate(activation, gate_up), atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype]
    )
