"""The feed-forward half of a layer: this rank's columns of the first matrices, its rows of the last.

Every mlp is a `Branch`, whose parts the layer sums over the ranks.

Shapes: T tokens, D model width, F local width of the mlp, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from server.arch.spec import Activation, ArchSpec, Dense, Gated, Moe
from server.backends.protocol import Backend, GroupedLinear, LinearFormat, MakeLinear
from server.checkpoint.weights import Weights
from server.layers.linear import Branch, ColumnLinear, RowLinear, load_column, load_row


@dataclass(frozen=True)
class DenseMlp:
    """x [T, D] → down(activation(up(x))), or down(activation(gate(x)) * up(x)) where `up` is gated."""

    up: ColumnLinear
    down: RowLinear
    activation: Activation

    @property
    def nbytes(self) -> int:
        """Memory of its matrices."""
        return self.up.weight.nbytes + self.down.weight.nbytes

    def branch(self, x: Tensor) -> Branch:
        """What it adds for input x [T, D]."""
        return Branch(self.down, self.up(x, self.activation))


@dataclass(frozen=True)
class MoeMlp:
    """x [T, D] → the sum of each token's k best experts, weighted by the router's probabilities.

    Tokens are sorted by expert, so that each expert's are in one run and the products of all experts are one operator.
    Nothing of that is read by the host, unless the experts' format does.
    """

    router: LinearFormat  # [E, D], on every rank: all must choose the same experts
    expert_ids: Tensor  # [E]: 0 … E - 1
    up: GroupedLinear  # [gate | up] of each expert
    down: GroupedLinear
    activation: Activation
    top_k: int
    renormalise: bool
    bias: None = None

    @property
    def nbytes(self) -> int:
        """Memory of its matrices."""
        return self.router.nbytes + self.up.nbytes + self.down.nbytes

    def branch(self, x: Tensor) -> Branch:
        """What it adds for input x [T, D]."""
        return Branch(self, x)

    def __call__(self, x: Tensor, base: Tensor | None = None, *, with_bias: bool = False) -> Tensor:
        """base + this rank's part, as of a `RowLinear`; a mixture has no bias."""
        weights, chosen = self._route(x)
        sorted_experts, order = chosen.flatten().sort(stable=True)  # of the T * k pairs of a token and an expert
        ends = torch.searchsorted(sorted_experts, self.expert_ids, right=True, out_int32=True)
        y = self.down(self.up(x.index_select(0, order // self.top_k), ends, self.activation), ends)
        pairs = torch.empty_like(y).index_copy_(0, order, y).view(len(x), self.top_k, -1)
        total = (pairs * weights.unsqueeze(2)).sum(dim=1)
        return total if base is None else base + total

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights, in x's dtype, and the numbers of each token's experts, both [T, k]."""
        weights, chosen = self.router.finest(x, None).float().softmax(dim=-1).topk(self.top_k, dim=-1)
        if self.renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen


def load_mlp(
    weights: Weights, spec: ArchSpec, kind: Dense | Gated | Moe, backend: Backend, format: str
) -> DenseMlp | MoeMlp:
    """This rank's part of one layer's mlp, stored in `format`."""
    make_format = backend.formats[format]
    if isinstance(kind, Moe):
        return _load_moe(weights, spec, kind, backend, format)
    if isinstance(kind, Gated):
        up = _load_gate_up(weights, spec, kind.width, make_format)
    else:
        up = load_column(weights, "mlp_up", (kind.width, spec.hidden_size), make_format, bias=spec.mlp_bias)
    down = load_row(weights, "mlp_down", (spec.hidden_size, kind.width), make_format, bias=spec.mlp_bias)
    return DenseMlp(up, down, kind.activation)


def _load_gate_up(weights: Weights, spec: ArchSpec, width: int, make_format: MakeLinear) -> ColumnLinear:
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


def _load_moe(weights: Weights, spec: ArchSpec, kind: Moe, backend: Backend, format: str) -> MoeMlp:
    part = weights.shard.range(kind.width)
    inner, outer = (kind.width, spec.hidden_size), (spec.hidden_size, kind.width)

    def ups() -> Iterator[Tensor]:
        for e in range(kind.num_experts):
            yield torch.cat([weights.rows(role, inner, [part], expert=e) for role in ("expert_gate", "expert_up")])

    def downs() -> Iterator[Tensor]:
        for e in range(kind.num_experts):
            yield weights.columns("expert_down", outer, part, expert=e)

    return MoeMlp(
        router=backend.formats["dense"](weights.rows("router", (kind.num_experts, spec.hidden_size))),
        expert_ids=torch.arange(kind.num_experts, device=weights.device),
        up=backend.grouped(ups(), kind.num_experts, format, is_gated=True),
        down=backend.grouped(downs(), kind.num_experts, format),
        activation=kind.activation,
        top_k=kind.top_k,
        renormalise=kind.renormalise,
    )
