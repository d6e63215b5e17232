"""The feed-forward half of a layer: this rank's columns of the first matrices, its rows of the last.

Every mlp returns this rank's summand; the layer sums over the ranks (see `RowLinear`).

Shapes: T tokens, D model width, F local width of the mlp, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from server.layers.linear import ColumnLinear, LinearFormat, MakeFormat, RowLinear, load_column, load_row
from server.model.spec import Activation, ArchSpec, Dense, Gated, Moe
from server.weights import Weights


@dataclass(frozen=True)
class DenseMlp:
    """x [T, D] → down(activation(up(x))), or down(activation(gate(x)) * up(x)) where `up` is gated."""

    up: ColumnLinear
    down: RowLinear
    activation: Activation

    @property
    def nbytes(self) -> int:
        return self.up.weight.nbytes + self.down.weight.nbytes

    @property
    def bias(self) -> Tensor | None:
        return self.down.bias

    def __call__(self, x: Tensor, base: Tensor | None = None, *, with_bias: bool = False) -> Tensor:
        """base + this rank's summand, as `RowLinear` does."""
        return self.down(self.up(x, self.activation), base, with_bias=with_bias)


@dataclass(frozen=True)
class MoeMlp:
    """x [T, D] → the sum of each token's k best experts, weighted by the router's probabilities."""

    router: Tensor  # [E, D], on every rank: all must choose the same experts
    experts: Sequence[DenseMlp]
    top_k: int
    renormalise: bool
    bias: None = None

    @property
    def nbytes(self) -> int:
        return self.router.nbytes + sum(expert.nbytes for expert in self.experts)

    def __call__(self, x: Tensor, base: Tensor | None = None, *, with_bias: bool = False) -> Tensor:
        """base + this rank's summand; a mixture has no bias."""
        weights, chosen = F.linear(x, self.router).float().softmax(dim=-1).topk(self.top_k, dim=-1)  # [T, k]
        if self.renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x) if base is None else base.clone()
        for index, expert in enumerate(self.experts):
            token, place = torch.nonzero(chosen == index, as_tuple=True)
            if len(token):
                out.index_add_(0, token, expert(x[token]) * weights[token, place].unsqueeze(1).to(x.dtype))
        return out


def load_mlp(weights: Weights, spec: ArchSpec, kind: Dense | Gated | Moe, make_format: MakeFormat) -> DenseMlp | MoeMlp:
    """This rank's part of one layer's mlp."""
    if isinstance(kind, Moe):
        return _load_moe(weights, spec, kind, make_format)
    if isinstance(kind, Gated):
        up = _load_gate_up(weights, spec, kind.width, make_format)
    else:
        up = load_column(weights, "mlp_up", (kind.width, spec.hidden_size), make_format, bias=spec.mlp_bias)
    down = load_row(weights, "mlp_down", (spec.hidden_size, kind.width), make_format, bias=spec.mlp_bias)
    return DenseMlp(up, down, kind.activation)


def _load_gate_up(weights: Weights, spec: ArchSpec, width: int, make_format: MakeFormat) -> ColumnLinear:
    """[gate | up] of this rank, from one tensor or from two."""
    start, stop = weights.shard.range(width)
    make_gated = partial(make_format, is_gated=True)
    if weights.has("mlp_gate_up"):
        ranges = [(start, stop), (width + start, width + stop)]
        size = (2 * width, spec.hidden_size)
        return load_column(weights, "mlp_gate_up", size, make_gated, bias=spec.mlp_bias, ranges=ranges)
    size, part = (width, spec.hidden_size), [(start, stop)]
    roles = ("mlp_gate", "mlp_up")
    weight = torch.cat([weights.rows(role, size, part) for role in roles])
    bias = torch.cat([weights.bias(role, width, ranges=part) for role in roles]) if spec.mlp_bias else None
    return ColumnLinear(make_gated(weight), bias)


def _load_moe(weights: Weights, spec: ArchSpec, kind: Moe, make_format: MakeFormat) -> MoeMlp:
    part = weights.shard.range(kind.width)
    inner, outer = (kind.width, spec.hidden_size), (spec.hidden_size, kind.width)

    def expert(index: int) -> DenseMlp:
        gate_up = torch.cat([weights.rows(role, inner, [part], expert=index) for role in ("expert_gate", "expert_up")])
        down: LinearFormat = make_format(weights.columns("expert_down", outer, part, expert=index))
        up = ColumnLinear(make_format(gate_up, is_gated=True), None)
        return DenseMlp(up, RowLinear(down, None), kind.activation)

    return MoeMlp(
        router=weights.rows("router", (kind.num_experts, spec.hidden_size)),
        experts=[expert(index) for index in range(kind.num_experts)],
        top_k=kind.top_k,
        renormalise=kind.renormalise,
    )
