"""The feed-forward half of a layer: this rank's columns of the first matrices, its rows of the last.

Every mlp is a `Branch`, whose parts the layer sums over the ranks.

Shapes: T tokens, D model width, F local width of the mlp, E experts, k experts per token.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from server.arch.spec import Activation, ArchSpec, Dense, Gated, Moe
from server.backends.protocol import Backend, GroupedLinear, LinearFormat, MakeLinear, Norm, RouterRule, Routing
from server.checkpoint.experts import SeparateExperts, StackedExperts
from server.checkpoint.weights import Adapting, Weights
from server.layers.linear import (
    Branch,
    ColumnLinear,
    Matrix,
    RowLinear,
    load_column,
    load_dense,
    load_linear,
    load_row,
)


@dataclass(frozen=True)
class DenseMlp:
    """x [T, D] → down(activation(up(x))), or down(activation(gate(x)) * up(x)) where `up` is gated.

    divisors: [F], by which activations are divided, as AutoAWQ does where no weight before them can be; None: by none.
    """

    up: ColumnLinear
    down: RowLinear
    activation: Activation
    divisors: Tensor | None = None
    in_scale: float = 1.0  # see `spec.Gated`
    out_scale: float = 1.0

    @property
    def matrices(self) -> list[Matrix]:
        """Its weights but for biases."""
        return [self.up.weight, self.down.weight]

    def branch(self, x: Tensor) -> Branch:
        """What it adds for input x [T, D]."""
        activated = self.up(x if self.in_scale == 1.0 else x * self.in_scale, self.activation)
        if self.out_scale != 1.0:
            activated = activated * self.out_scale
        return Branch(self.down, activated if self.divisors is None else activated / self.divisors)


@dataclass(frozen=True)
class MoeMlp:
    """x [T, D] → the sum of each token's k best experts, weighted by the router's scores, and of what all share.

    Tokens are sorted by expert, so that each expert's are in one run and the products of all experts are one operator.
    Nothing of that is read by the host, unless the experts' format does.
    """

    router: LinearFormat  # [E, D], on every rank: all must choose the same experts
    routing: Routing
    up: GroupedLinear  # [gate | up] of each expert, or up
    down: GroupedLinear
    activation: Activation
    router_bias: Tensor | None = None  # [E]
    up_bias: Tensor | None = None  # [E, 2 F], as the weights are
    down_bias: Tensor | None = None  # [E, D], on one rank alone: it is added once to the sum over the ranks
    shared: DenseMlp | None = None  # for all tokens
    shared_gate: LinearFormat | None = None  # [1, D], on every rank
    router_norm: Norm | None = None
    weighs_inputs: bool = False
    adapting: Adapting | None = None
    bias: None = None

    @property
    def matrices(self) -> list[Matrix]:
        """Its weights."""
        gate = [] if self.shared_gate is None else [self.shared_gate]
        return [self.router, self.up, self.down, *gate, *(self.shared.matrices if self.shared else [])]

    def branch(self, x: Tensor) -> Branch:
        """What it adds for input x [T, D]."""
        return Branch(self, x)

    def __call__(self, x: Tensor, base: Tensor | None = None, *, with_bias: bool = False) -> Tensor:
        """base + this rank's part, as of a `RowLinear`; a mixture has no bias but its experts'."""
        total = self.routed(x, x)
        if self.shared is not None:
            activated = self.shared.up(x, self.shared.activation)
            if self.shared_gate is not None:
                activated = activated * self.shared_gate(x, None, Activation.SIGMOID)
            total = self.shared.down(activated, total)
        return total if base is None else base + total

    def routed(self, x: Tensor, stream: Tensor) -> Tensor:
        """This rank's part of what the experts make of x [T, D]. stream: [T, D], which the router may read instead."""
        read = x if self.router_norm is None else self.router_norm(stream)
        routes = self.routing(self.router, read, self.router_bias)
        pairs = routes.weighed(x) if self.weighs_inputs else routes.spread(x)
        with nullcontext() if self.adapting is None else self.adapting.pairs(routes.spread):
            y = self.up(pairs, routes.ends, self.activation, self.up_bias)
            y = self.down(y, routes.ends, None, self.down_bias)
        return routes.total(y) if self.weighs_inputs else routes.combine(y)


def load_mlp(weights: Weights, spec: ArchSpec, kind: Dense | Gated | Moe, backend: Backend) -> DenseMlp | MoeMlp:
    """This rank's part of one layer's mlp."""
    if isinstance(kind, Moe):
        return _load_moe(weights, spec, kind, backend)
    if isinstance(kind, Gated):
        up = _load_gate_up(weights, spec, kind.width, backend.linear)
    else:
        up = load_column(weights, "mlp_up", (kind.width, spec.hidden_size), backend.linear, bias=spec.mlp_bias)
    down = load_row(weights, "mlp_down", (spec.hidden_size, kind.width), backend.linear, bias=spec.mlp_bias)
    divisors = weights.divisors("activation", kind.width, weights.shard.range(kind.width))
    scales = (kind.in_scale, kind.out_scale) if isinstance(kind, Gated) else (1.0, 1.0)
    return DenseMlp(up, down, kind.activation, divisors, *scales)


def _load_gate_up(weights: Weights, spec: ArchSpec, width: int, make_linear: MakeLinear) -> ColumnLinear:
    """[gate | up] of this rank, from one tensor or from two."""
    start, stop = weights.shard.range(width)
    if weights.holds("mlp_gate_up") or not weights.has("mlp_gate"):
        ranges = [(start, stop), (width + start, width + stop)]
        size = (2 * width, spec.hidden_size)
        return load_column(weights, "mlp_gate_up", size, make_linear, bias=spec.mlp_bias, ranges=ranges, is_gated=True)
    size, part = (width, spec.hidden_size), [(start, stop)]
    roles = ("mlp_gate", "mlp_up")
    pieces = [weights.piece(role, size, rows=part) for role in roles]
    bias = torch.cat([weights.bias(role, width, ranges=part) for role in roles]) if spec.mlp_bias else None
    return ColumnLinear(load_linear(weights, pieces, make_linear, is_gated=True), bias)


def _load_moe(weights: Weights, spec: ArchSpec, kind: Moe, backend: Backend) -> MoeMlp:
    weights.refuse_other_experts(kind.num_experts)
    hidden, count = spec.hidden_size, kind.num_experts
    experts = (StackedExperts if weights.names.stacks else SeparateExperts)(weights, kind, hidden)
    down_bias = experts.down_bias() if kind.bias else None  # which every rank reads, and one adds
    up = backend.grouped(map(experts.gate_up, range(count)), count, is_gated=kind.gated)
    down = backend.grouped(map(experts.down, range(count)), count, maximum=weights.shard.all_reduce_max)
    if (adapting := weights.adapting) is not None:
        up = adapting.experts(up, [experts.gate_up_pieces(e) for e in range(count)], is_gated=kind.gated)
        down = adapting.experts(down, [experts.down_pieces(e) for e in range(count)], is_gated=False)
    return MoeMlp(
        router=load_dense(weights, [weights.piece("router", (count, hidden))], backend.linear),
        routing=_load_routing(weights, kind, backend),
        up=up,
        down=down,
        activation=kind.activation,
        router_bias=weights.bias("router", count) if kind.router_bias else None,
        up_bias=experts.gate_up_bias() if kind.bias else None,
        down_bias=down_bias if weights.shard.rank == 0 else None,
        shared=_load_shared(weights, spec, kind, backend) if kind.shared_width else None,
        shared_gate=load_dense(weights, [weights.piece("shared_router", (1, hidden))], backend.linear)
        if kind.shared_gate
        else None,
        router_norm=_load_router_norm(weights, spec, backend) if kind.router_norm else None,
        weighs_inputs=kind.weighs_inputs,
        adapting=adapting,
    )


def _load_router_norm(weights: Weights, spec: ArchSpec, backend: Backend) -> Norm:
    """Divided by the square root of the model's width, so that its output has about length 1."""
    weight = weights.bare("router_norm", spec.hidden_size) * spec.hidden_size**-0.5
    return backend.norm(weight, None, spec.norm.eps, is_centred=False)


def _load_routing(weights: Weights, kind: Moe, backend: Backend) -> Routing:
    bias = weights.bare("choice_bias", kind.num_experts) if kind.choice_bias else None
    own = weights.bare("expert_scale", kind.num_experts) if kind.expert_scale else None
    groups = (kind.num_groups, kind.top_groups, kind.group_best)
    rule = RouterRule(kind.scoring, bias, *groups, kind.scale, kind.tolerance, own)
    return backend.routing(kind.num_experts, kind.top_k, renormalise=kind.renormalise, rule=rule)


def _load_shared(weights: Weights, spec: ArchSpec, kind: Moe, backend: Backend) -> DenseMlp:
    width, size = kind.shared_width, (kind.shared_width, spec.hidden_size)
    start, stop = weights.shard.range(width)
    if not kind.gated:
        up = load_column(weights, "shared_up", size, backend.linear, bias=False)
        return DenseMlp(up, load_row(weights, "shared_down", size[::-1], backend.linear, bias=False), kind.activation)
    if weights.has("shared_gate_up"):
        rows = [(start, stop), (width + start, width + stop)]
        halves = [weights.piece("shared_gate_up", (2 * width, spec.hidden_size), rows=rows)]
    else:
        halves = [weights.piece(role, size, rows=[(start, stop)]) for role in ("shared_gate", "shared_up")]
    up = ColumnLinear(load_linear(weights, halves, backend.linear, is_gated=True), None)
    return DenseMlp(up, load_row(weights, "shared_down", size[::-1], backend.linear, bias=False), kind.activation)
