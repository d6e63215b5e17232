"""The feed-forward half of a layer: this rank's columns of the first matrices, its rows of the last.

Every mlp returns this rank's summand; the layer sums over the ranks (see `RowLinear`).

Shapes: T tokens, D model width, F local width of the mlp, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from server.layers.linear import ColumnLinear, LinearFormat, MakeFormat, RowLinear, load_column, load_row
from server.model.spec import Activation, ArchSpec, Dense, Gated, Moe
from server.weights import Weights

Mlp = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.RELU: F.relu,
    Activation.SILU: F.silu,
}


@dataclass(frozen=True)
class DenseMlp:
    """x [T, D] → down(activation(up(x)))."""

    up: ColumnLinear
    down: RowLinear
    activation: Callable[[Tensor], Tensor]

    @property
    def nbytes(self) -> int:
        return self.up.weight.nbytes + self.down.weight.nbytes

    @property
    def bias(self) -> Tensor | None:
        return self.down.bias

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


@dataclass(frozen=True)
class GatedMlp:
    """x [T, D] → down(activation(gate(x)) * up(x)); gate and up are one matrix [gate | up]."""

    gate_up: ColumnLinear
    down: RowLinear
    activation: Callable[[Tensor], Tensor]

    @property
    def nbytes(self) -> int:
        return self.gate_up.weight.nbytes + self.down.weight.nbytes

    @property
    def bias(self) -> Tensor | None:
        return self.down.bias

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


@dataclass(frozen=True)
class MoeMlp:
    """x [T, D] → the sum of each token's k best experts, weighted by the router's probabilities."""

    router: Tensor  # [E, D], on every rank: all must choose the same experts
    experts: Sequence[GatedMlp]
    top_k: int
    renormalise: bool
    bias: None = None

    @property
    def nbytes(self) -> int:
        return self.router.nbytes + sum(expert.nbytes for expert in self.experts)

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = F.linear(x, self.router).float().softmax(dim=-1).topk(self.top_k, dim=-1)  # [T, k]
        if self.renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, place = torch.nonzero(chosen == index, as_tuple=True)
            if len(token):
                out.index_add_(0, token, expert(x[token]) * weights[token, place].unsqueeze(1).to(x.dtype))
        return out


def load_mlp(
    weights: Weights, spec: ArchSpec, kind: Dense | Gated | Moe, make_format: MakeFormat
) -> DenseMlp | GatedMlp | MoeMlp:
    """This rank's part of one layer's mlp."""
    if isinstance(kind, Moe):
        return _load_moe(weights, spec, kind, make_format)
    hidden, activation = spec.hidden_size, ACTIVATIONS[kind.activation]
    down = load_row(weights, "mlp_down", (hidden, kind.width), make_format, bias=spec.mlp_bias)
    if isinstance(kind, Gated):
        return GatedMlp(_load_gate_up(weights, spec, kind.width, make_format), down, activation)
    up = load_column(weights, "mlp_up", (kind.width, hidden), make_format, bias=spec.mlp_bias)
    return DenseMlp(up, down, activation)


def _load_gate_up(weights: Weights, spec: ArchSpec, width: int, make_format: MakeFormat) -> ColumnLinear:
    """[gate | up] of this rank, from one tensor or from two."""
    start, stop = weights.shard.range(width)
    if weights.has("mlp_gate_up"):
        ranges = [(start, stop), (width + start, width + stop)]
        size = (2 * width, spec.hidden_size)
        return load_column(weights, "mlp_gate_up", size, make_format, bias=spec.mlp_bias, ranges=ranges)
    size, part = (width, spec.hidden_size), [(start, stop)]
    roles = ("mlp_gate", "mlp_up")
    weight = torch.cat([weights.rows(role, size, part) for role in roles])
    bias = torch.cat([weights.bias(role, width, ranges=part) for role in roles]) if spec.mlp_bias else None
    return ColumnLinear(make_format(weight), bias)


def _load_moe(weights: Weights, spec: ArchSpec, kind: Moe, make_format: MakeFormat) -> MoeMlp:
    part = weights.shard.range(kind.width)
    inner, outer = (kind.width, spec.hidden_size), (spec.hidden_size, kind.width)

    def expert(index: int) -> GatedMlp:
        gate_up = torch.cat([weights.rows(role, inner, [part], expert=index) for role in ("expert_gate", "expert_up")])
        down: LinearFormat = make_format(weights.columns("expert_down", outer, part, expert=index))
        activation = ACTIVATIONS[kind.activation]
        return GatedMlp(ColumnLinear(make_format(gate_up), None), RowLinear(down, None), activation)

    return MoeMlp(
        router=weights.rows("router", (kind.num_experts, spec.hidden_size)),
        experts=[expert(index) for index in range(kind.num_experts)],
        top_k=kind.top_k,
        renormalise=kind.renormalise,
    )
