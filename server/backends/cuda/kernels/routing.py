# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""How tokens find their experts and come back from them, on an NVIDIA GPU: three Triton kernels.

* `_choose`: each token's scores of the experts, its k best and their weights; groups, sparse mixers and scales of
  experts are left to stock operators;
* `_group`: where each pair of a token and an expert stands when pairs are sorted by expert. A sort would take three
  kernels and more; here every expert counts the pairs before its own, which are few;
* `_weigh`: the weighted sum of what a token's experts made of it, in float32 and rounded once.

Importing this module imports Triton, which a CPU server neither has nor needs. Not yet run on a GPU: the tests run the
kernels in Triton's interpreter and compile them for compute capability 9.0.

Shapes: T tokens, D model width, E experts, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.arch.spec import Scoring
from server.backends.protocol import SOFTMAX, LinearFormat, RouterRule
from server.backends.reference import router as stock

# Pairs that a program of `_group` looks at together: a decode has few, and a prompt's are soon looked through.
PAIRS_TILE = 256
# Features that a program of `_weigh` sums: 8 for each thread of 4 warps.
FEATURES_TILE = 1024
LEAST_SUM = tl.constexpr(stock.LEAST_SUM)


@dataclass(frozen=True)
class FusedRoutes:
    """See `protocol.Routes`."""

    tokens: Tensor  # [T * k] int32
    ends: Tensor
    weights: Tensor  # [T, k] float32
    places: Tensor  # [T * k] int32, where each pair stands

    def spread(self, x: Tensor) -> Tensor:
        return x.index_select(0, self.tokens)

    def weighed(self, x: Tensor) -> Tensor:
        weights = torch.empty_like(self.weights).view(-1, 1)
        weights.index_copy_(0, self.places.flatten().long(), self.weights.view(-1, 1))
        return (self.spread(x) * weights).to(x.dtype)

    def total(self, y: Tensor) -> Tensor:
        return replace(self, weights=torch.ones_like(self.weights)).combine(y)

    def combine(self, y: Tensor) -> Tensor:
        assert y.is_contiguous()
        (tokens, top_k), width = self.weights.shape, y.shape[1]
        out = y.new_empty(tokens, width)
        _weigh[(tokens, triton.cdiv(width, FEATURES_TILE))](
            y, self.weights, self.places, out, WIDTH=width, TOP_K=top_k, TILE=FEATURES_TILE
        )
        return out


@dataclass(frozen=True)
class FusedRouting:
    """See `protocol.Routing`."""

    num_experts: int
    top_k: int
    renormalise: bool
    rule: RouterRule = SOFTMAX

    def choose(self, router: LinearFormat, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        logits, rule = router.finest(x, bias), self.rule
        has_own_scales = rule.expert_scales is not None
        if rule.scoring is Scoring.SPARSE_MIXER or rule.top_groups < rule.num_groups or has_own_scales:
            weights, chosen = stock.choose(logits.float(), self.top_k, rule, renormalise=self.renormalise)
            return weights, chosen.int()
        weights = logits.new_empty(len(x), self.top_k, dtype=torch.float32)
        chosen = logits.new_empty(len(x), self.top_k, dtype=torch.int32)
        _choose[(len(x),)](
            logits,
            rule.bias,
            weights,
            chosen,
            EXPERTS=self.num_experts,
            EXPERTS_PAD=triton.next_power_of_2(self.num_experts),
            TOP_K=self.top_k,
            TOP_K_PAD=triton.next_power_of_2(self.top_k),
            RENORMALISE=self.renormalise,
            SIGMOID=rule.scoring is Scoring.SIGMOID,
            SCALE=rule.scale,
        )
        return weights, chosen

    def __call__(self, router: LinearFormat, x: Tensor, bias: Tensor | None = None) -> FusedRoutes:
        weights, chosen = self.choose(router, x, bias)
        tokens, places, ends = grouped(chosen, self.num_experts, self.top_k)
        return FusedRoutes(tokens, ends, weights, places)


def grouped(chosen: Tensor, num_experts: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """chosen [T, k], experts of tokens → the pairs by expert, int32: tokens [T * k], places [T * k], and ends [E]."""
    tokens, places, ends = (
        chosen.new_empty(count, dtype=torch.int32) for count in (chosen.numel(), chosen.numel(), num_experts)
    )
    _group[(num_experts,)](
        chosen, tokens, places, ends, chosen.numel(), EXPERTS=num_experts, TOP_K=top_k, TILE=PAIRS_TILE
    )
    return tokens, places, ends


@triton.jit
def _choose(
    logits,
    bias,
    weights,
    chosen,
    EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PAD: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SIGMOID: tl.constexpr,
    SCALE: tl.constexpr,
):
    """One token. Of equally likely experts the first is taken."""
    token = tl.program_id(0).to(tl.int64)
    experts, slots = tl.arange(0, EXPERTS_PAD), tl.arange(0, TOP_K_PAD)
    real = experts < EXPERTS
    value = tl.load(logits + token * EXPERTS + experts, mask=real, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = tl.sigmoid(value)
    else:
        scores = tl.exp(value - tl.max(value, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    left = scores
    if bias is not None:
        left += tl.load(bias + experts, mask=real, other=0.0)
    left = tl.where(real, left, float("-inf"))
    best = tl.zeros([TOP_K_PAD], tl.float32)
    ids = tl.zeros([TOP_K_PAD], tl.int32)
    for slot in tl.static_range(TOP_K):
        # Never behind the last expert, even where a logit is no number: its place would be nowhere.
        expert = tl.minimum(tl.argmax(left, axis=0), EXPERTS - 1)
        best = tl.where(slots == slot, tl.sum(tl.where(experts == expert, scores, 0.0), axis=0), best)
        ids = tl.where(slots == slot, expert, ids)
        left = tl.where(experts == expert, float("-inf"), left)
    if RENORMALISE:
        best = best / (tl.sum(best, axis=0) + LEAST_SUM)
    best *= SCALE
    tl.store(weights + token * TOP_K + slots, best, mask=slots < TOP_K)
    tl.store(chosen + token * TOP_K + slots, ids, mask=slots < TOP_K)


@triton.jit
def _group(chosen, tokens, places, ends, num_pairs, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr):
    """One expert: its pairs follow those of all experts before it, in the order of their tokens."""
    expert = tl.program_id(0)
    before = tl.zeros([TILE], tl.int32)
    own = tl.zeros([TILE], tl.int32)
    for first in range(0, num_pairs, TILE):
        pairs = first + tl.arange(0, TILE)
        ids = tl.load(chosen + pairs, mask=pairs < num_pairs, other=EXPERTS)
        before += (ids < expert).to(tl.int32)
        own += (ids == expert).to(tl.int32)
    place = tl.sum(before, axis=0)
    tl.store(ends + expert, place + tl.sum(own, axis=0))
    for first in range(0, num_pairs, TILE):
        pairs = first + tl.arange(0, TILE)
        ids = tl.load(chosen + pairs, mask=pairs < num_pairs, other=EXPERTS)
        is_own = (ids == expert).to(tl.int32)
        at = place + tl.cumsum(is_own, axis=0) - 1
        tl.store(tokens + at, pairs // TOP_K, mask=ids == expert)
        tl.store(places + pairs, at, mask=ids == expert)
        place += tl.sum(is_own, axis=0)


@triton.jit
def _weigh(y, weights, places, out, WIDTH: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr):
    """One tile of one token."""
    token = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = features < WIDTH
    total = tl.zeros([TILE], tl.float32)
    for slot in tl.static_range(TOP_K):
        place = tl.load(places + token * TOP_K + slot).to(tl.int64)
        value = tl.load(y + place * WIDTH + features, mask=real, other=0.0).to(tl.float32)
        total += tl.load(weights + token * TOP_K + slot) * value
    tl.store(out + token * WIDTH + features, total.to(out.dtype.element_ty), mask=real)
