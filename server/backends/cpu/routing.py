"""How tokens find their experts and come back from them, by compiled kernels (`routes.cpp`).

Of rules there are a softmax over all experts, and sigmoids with all that belongs to them; others are left to stock
operators. Weights and sums are float32, and rounded once.

Shapes: T tokens, D model width, E experts, k experts per token.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from server.arch.spec import Scoring
from server.backends.cpu.kernels import Kernels
from server.backends.cpu.layers import address_of
from server.backends.protocol import SOFTMAX, LinearFormat, RouterRule
from server.backends.reference import router as stock


@dataclass(frozen=True)
class KernelRoutes:
    """See `protocol.Routes`."""

    kernels: Kernels
    weights: Tensor  # [T, k] float32
    tokens: Tensor  # [T * k] int32: of each pair
    places: Tensor  # [T, k] int32: where each pair stands
    ends: Tensor

    def spread(self, x: Tensor) -> Tensor:
        x = x if x.is_contiguous() else x.contiguous()
        out = x.new_empty(len(self.tokens), x.shape[1])
        gather, threads = self.kernels.gather_rows[x.dtype], torch.get_num_threads()
        gather(x.data_ptr(), self.tokens.data_ptr(), out.data_ptr(), *out.shape, threads)
        return out

    def weighed(self, x: Tensor) -> Tensor:
        weights = torch.empty(len(self.tokens), 1)
        weights.index_copy_(0, self.places.flatten().long(), self.weights.view(-1, 1))
        return (self.spread(x) * weights).to(x.dtype)

    def total(self, y: Tensor) -> Tensor:
        return replace(self, weights=torch.ones_like(self.weights)).combine(y)

    def combine(self, y: Tensor) -> Tensor:
        assert y.is_contiguous()
        (tokens, top_k), width = self.weights.shape, y.shape[1]
        out = y.new_empty(tokens, width)
        self.kernels.weigh_rows[y.dtype](
            y.data_ptr(),
            self.weights.data_ptr(),
            self.places.data_ptr(),
            out.data_ptr(),
            tokens,
            top_k,
            width,
            torch.get_num_threads(),
        )
        return out


@dataclass(frozen=True)
class KernelRouting:
    """See `protocol.Routing`."""

    kernels: Kernels
    num_experts: int
    top_k: int
    renormalise: bool
    rule: RouterRule = SOFTMAX

    def choose(self, router: LinearFormat, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        logits = router.finest(x, bias).float()
        if not self.rule.is_softmax_alone and self.rule.scoring is not Scoring.SIGMOID:
            weights, chosen = stock.choose(logits, self.top_k, self.rule, renormalise=self.renormalise)
            return weights, chosen.int()
        assert logits.is_contiguous()
        weights = torch.empty(len(x), self.top_k)
        chosen = torch.empty(len(x), self.top_k, dtype=torch.int32)
        found, threads = (weights.data_ptr(), chosen.data_ptr()), torch.get_num_threads()
        if self.rule.scoring is Scoring.SIGMOID:
            rule = ctypes.addressof(self._sigmoid)
            self.kernels.choose_experts_by_sigmoid(rule, logits.data_ptr(), len(x), *found, threads)
        else:
            sizes = (len(x), self.num_experts, self.top_k, self.renormalise)
            self.kernels.choose_experts(logits.data_ptr(), *sizes, *found, threads)
        return weights, chosen

    @cached_property
    def _sigmoid(self) -> _SigmoidRule:
        rule = self.rule
        assert rule.bias is None or (rule.bias.dtype == torch.float32 and rule.bias.is_contiguous())
        groups = (rule.num_groups, rule.top_groups)
        return _SigmoidRule(self.num_experts, self.top_k, self.renormalise, *groups, address_of(rule.bias), rule.scale)

    def __call__(self, router: LinearFormat, x: Tensor, bias: Tensor | None = None) -> KernelRoutes:
        weights, chosen = self.choose(router, x, bias)
        tokens, places = torch.empty(chosen.numel(), dtype=torch.int32), torch.empty_like(chosen)
        ends = torch.empty(self.num_experts, dtype=torch.int32)
        self.kernels.sort_pairs(
            chosen.data_ptr(),
            len(x),
            self.num_experts,
            self.top_k,
            tokens.data_ptr(),
            places.data_ptr(),
            ends.data_ptr(),
        )
        return KernelRoutes(self.kernels, weights, tokens, places, ends)


class _SigmoidRule(ctypes.Structure):
    """`SigmoidRule` of routes.cpp."""

    _fields_ = (
        *((name, ctypes.c_long) for name in ("experts", "top_k", "renormalise", "num_groups", "top_groups")),
        ("bias", ctypes.c_void_p),
        ("scale", ctypes.c_float),
    )
