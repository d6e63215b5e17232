"""What the Triton kernels are checked on, in the interpreter, by the compiler and on a GPU, and against what.

The kernels' modules are imported by the checks, not here: Triton is not everywhere that tests are collected, and has to
be told before its import whether to interpret.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from server.arch.spec import Activation, Alibi
from server.backends.protocol import Norm, Rotation, Scores, StepMeta, Summand
from server.backends.reference.activation import stock_gate
from server.backends.reference.attention import ReferenceAttention
from server.backends.reference.linear import DenseFormat
from server.backends.reference.norm import LayerNorm, RmsNorm
from server.backends.reference.routing import StockRouting
from server.backends.reference.scoring import rotate, write_slots
from server.blocks import BLOCK_SIZE
from server.layers.position import alibi_slopes
from tests.server.test_attention import step_of

# Largest difference from the reference, for values around 1: some roundings of each dtype.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
BLOCKS = 64
ONE_SPLIT, MANY_SPLITS = 1, 132  # multiprocessors to fill: with one, a sequence is never split


def plain(num_heads: int) -> Scores:
    return Scores(0.1)


def alibi(num_heads: int) -> Scores:
    return Scores(0.1, tuple(alibi_slopes(num_heads, Alibi())))


def capped(num_heads: int) -> Scores:
    return Scores(0.3, cap=2.0)


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

    def meta(self, device: torch.device) -> StepMeta:
        meta = step_of(self.lengths, BLOCKS, seed=3)
        if not self.is_causal:
            counts = torch.tensor(self.lengths)
            meta = replace(meta, visible=counts[:, 0].repeat_interleave(counts[:, 1]))
        tensors = {name: t.to(device) for name, t in vars(meta).items() if isinstance(t, Tensor)}
        return replace(meta, **tensors)

    def scores_on(self, device: torch.device) -> Scores:
        scores = self.scores(self.heads[0])
        return scores if scores.bias is None else replace(scores, bias=scores.bias.to(device))

    def inputs(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A cache [2, B, K, P, H], and q, k, v [T, heads, H] as they come out of one matrix product."""
        heads, kv_heads = self.heads
        tokens = sum(queries for _, queries in self.lengths)
        kv = random(2, BLOCKS, kv_heads, BLOCK_SIZE, self.head_dim, dtype=dtype, device=device)
        qkv = random(tokens, heads + 2 * kv_heads, self.head_dim, dtype=dtype, device=device)
        return kv, *qkv.split([heads, kv_heads, kv_heads], dim=1)


RAGGED = [(1, 1), (16, 1), (17, 1), (120, 1)]
CASES = {
    "decode": Case(RAGGED, (2, 2), 64),
    "decode, split": Case(RAGGED, (2, 2), 128, alibi, processors=MANY_SPLITS),
    "decode, split, heads of 80 in a window": Case(RAGGED, (2, 2), 80, all_terms, 50, MANY_SPLITS),
    "decode, heads of 256": Case(RAGGED, (2, 2), 256, capped),
    "decode, learned bias": Case(RAGGED, (2, 2), 64, learned),
    "decode, an encoder's output": Case(RAGGED, (2, 2), 64, learned, processors=MANY_SPLITS, is_causal=False),
    "decode, shared kv heads": Case(RAGGED, (4, 2), 128, alibi, 30),
    "decode, shared kv heads, split": Case(RAGGED, (6, 2), 96, all_terms, 0, MANY_SPLITS),
    "decode, shared kv heads of 256, split": Case(RAGGED, (4, 2), 256, capped, 70, MANY_SPLITS),
    "decode, shared kv heads, learned bias": Case(RAGGED, (4, 2), 64, learned),
    "decode, more heads to a kv head than a program takes": Case([(40, 1)], (71, 1), 64),
    "fresh prompts": Case([(5, 5), (33, 33), (90, 90)], (2, 2), 64),
    "a later chunk": Case([(90, 40)], (4, 2), 80, alibi),
    "a prompt behind a cached prefix": Case([(100, 4), (96, 95)], (2, 1), 96, all_terms),
    "a chunk in a window": Case([(150, 60)], (2, 1), 128, alibi, 20),
    "a chunk with heads of 256": Case([(70, 40)], (2, 1), 256, capped, 30),
    "encoder": Case([(40, 40), (17, 17)], (2, 2), 64, learned, is_causal=False),
    "encoder in a window": Case([(40, 40), (17, 17)], (2, 2), 64, plain, 10, is_causal=False),
    "decodes, a chunk and a fresh prompt": Case([(3, 1), (120, 1), (60, 20), (31, 31)], (4, 2), 64, all_terms),
}


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def check_attention(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """Write and attend as the reference does."""
    from server.backends.cuda.attention import PagedAttention

    meta, scores = case.meta(device), case.scores_on(device)
    kv, q, k, v = case.inputs(dtype, device)
    caches, outputs = [], []
    for backend, kind in (
        (ReferenceAttention(scores), torch.float32),
        (PagedAttention(scores, case.processors), dtype),
    ):
        cache = kv.to(kind, copy=True)
        backend.write(cache, k.to(kind), v.to(kind), meta)
        outputs.append(backend.attend(q.to(kind), cache, meta, case.window).float())
        caches.append(cache.float())
    torch.testing.assert_close(caches[0], caches[1], atol=0, rtol=0)
    torch.testing.assert_close(outputs[0], outputs[1], atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def check_padding(kv_heads: int, dtype: torch.dtype, device: torch.device) -> None:
    """A row of a captured batch that no sequence fills is stored nowhere, and attends to nothing: it gets 0."""
    from server.backends.cuda.attention import PagedAttention

    meta = Case([(20, 1), (1, 1)], (2, kv_heads), 64).meta(device)
    meta.slots[1], meta.visible[1] = -1, 0
    kv = torch.zeros(2, BLOCKS, kv_heads, BLOCK_SIZE, 64, dtype=dtype, device=device)
    ones = torch.ones(2, kv_heads, 64, dtype=dtype, device=device)
    for processors in (ONE_SPLIT, MANY_SPLITS):
        backend, cache = PagedAttention(Scores(1.0), processors), kv.clone()
        backend.write(cache, ones, ones, meta)
        assert 2 * kv_heads * 64 == cache.float().sum()
        out = backend.attend(torch.ones(2, 2, 64, dtype=dtype, device=device), cache, meta, window=0)
        assert 0 < out[0].float().min()
        assert 0 == out[1].float().abs().max()


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


def check_routing(sizes: tuple[int, int, int], renormalise: bool, dtype: torch.dtype, device: torch.device) -> None:
    """Tokens go to the same experts in the same order, and come back weighted alike. sizes: T, E, k."""
    from server.backends.cuda.kernels.routing import FusedRouting

    tokens, experts, top_k = sizes
    width = 1100 if tokens < 10 else 40  # a tile and a part, where that is soon computed
    x = random(tokens, 64, dtype=dtype, device=device)
    router = DenseFormat(random(experts, 64, dtype=dtype, device=device))
    stock = StockRouting(torch.arange(experts, device=device), top_k, renormalise)(router, x)
    fused = FusedRouting(experts, top_k, renormalise)(router, x)
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
    write_slots(separate, rotate(rotation, k)[:4], v[:4], slots[:4])
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
