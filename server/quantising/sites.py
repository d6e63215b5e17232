"""The places in a layer where matrices read the same inputs, and what is learned of these inputs there.

A layer is the model's own; the matrices of one of its places are wrapped, so that each of their inputs is seen as it
is used. Of the inputs only sums are kept.

Shapes: T tokens, D input features, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from server.arch.spec import Activation, ArchSpec, LayerSpec, Moe
from server.backends.protocol import GroupedLinear, LinearFormat
from server.checkpoint.weights import Weights
from server.model.layer import Layer

Watch = Callable[[int, Tensor], None]  # an expert's number, 0 where there are none, and inputs [T, D] of it

# Place -> the field of a layer, the field of that, and the roles that may stand there, of which a family has the first
# that it names.
PLACES: Mapping[str, tuple[str, str, Sequence[tuple[str, ...]]]] = {
    "qkv": ("attention", "qkv", (("qkv",), ("q", "k", "v"))),
    "attention_out": ("attention", "out", (("attention_out",),)),
    "up": ("mlp", "up", (("mlp_gate_up",), ("mlp_gate", "mlp_up"), ("mlp_up",))),
    "down": ("mlp", "down", (("mlp_down",),)),
}
EXPERT_ROLES = {"up": ("expert_gate", "expert_up"), "down": ("expert_down",)}


@dataclass(frozen=True)
class Site:
    """Matrices of one layer that read the same inputs, by what the checkpoint calls them. expert: 0 without experts."""

    place: str
    expert: int
    names: Mapping[str, str]  # by role


def sites_of(weights: Weights, spec: ArchSpec, index: int) -> Iterator[Site]:
    """All of one layer, in the order in which a step comes through them."""
    of_layer = weights.of_layer(index)
    mlp = spec.layers[index].mlp
    for place, (_, _, alternatives) in PLACES.items():
        if isinstance(mlp, Moe) and place in EXPERT_ROLES:
            for expert in range(mlp.num_experts):
                yield Site(place, expert, {role: of_layer.name_of(role, expert) for role in EXPERT_ROLES[place]})
            continue
        roles = next(roles for roles in alternatives if all(_has(of_layer, role, spec.layers[index]) for role in roles))
        yield Site(place, 0, {role: of_layer.name_of(role) for role in roles})


def _has(weights: Weights, role: str, layer: LayerSpec) -> bool:
    """Whether the family names this role and the checkpoint has it: T5's gate is named for all."""
    return weights.has(role) and f"{weights.name_of(role)}.weight" in weights.checkpoint


@dataclass
class Inputs:
    """What is kept of inputs [T, D]."""

    products: Tensor  # [D, D] float32, the sum of x xᵀ
    magnitudes: Tensor  # [D] float32, the sum of |x|
    largest: Tensor  # [D] float32, the largest |x|
    count: int = 0

    @classmethod
    def of(cls, width: int, device: torch.device) -> Inputs:
        """None yet."""
        return cls(
            torch.zeros(width, width, device=device),
            torch.zeros(width, device=device),
            torch.zeros(width, device=device),
        )

    def add(self, x: Tensor) -> None:
        """More of them."""
        x = x.float()
        self.products.addmm_(x.t(), x)
        self.magnitudes += x.abs().sum(0)
        self.largest = torch.maximum(self.largest, x.abs().amax(0))
        self.count += len(x)

    @property
    def mean_products(self) -> Tensor:
        """[D, D] the mean of x xᵀ."""
        return self.products / max(self.count, 1)

    def divided(self, scale: Tensor) -> Inputs:
        """As if each input had been divided by its scale [D]."""
        return Inputs(
            self.products / (scale[:, None] * scale), self.magnitudes / scale, self.largest / scale, self.count
        )


@dataclass(frozen=True)
class WatchedLinear:
    """A `LinearFormat` that shows its inputs."""

    linear: LinearFormat
    watch: Watch

    @property
    def nbytes(self) -> int:
        """As it is."""
        return self.linear.nbytes

    def __call__(
        self, x: Tensor, bias: Tensor | None, activation: Activation | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """See `LinearFormat`."""
        self.watch(0, x)
        return self.linear(x, bias, activation, residual)

    def finest(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `LinearFormat`."""
        self.watch(0, x)
        return self.linear.finest(x, bias)


@dataclass(frozen=True)
class WatchedExperts:
    """A `GroupedLinear` that shows the inputs of each expert."""

    experts: GroupedLinear
    watch: Watch

    @property
    def nbytes(self) -> int:
        """As they are."""
        return self.experts.nbytes

    def __call__(self, x: Tensor, ends: Tensor, activation: Activation | None = None) -> Tensor:
        """See `GroupedLinear`."""
        for expert, (start, stop) in enumerate(pairwise([0, *ends.tolist()])):
            if stop > start:
                self.watch(expert, x[start:stop])
        return self.experts(x, ends, activation)


def watched(layer: Layer, place: str, watch: Watch) -> Layer:
    """The layer with the matrices of one place showing their inputs."""
    part, field, _ = PLACES[place]
    block: Any = getattr(layer, part)
    linear: Any = getattr(block, field)
    if hasattr(linear, "weight"):
        shown: Any = replace(linear, weight=WatchedLinear(linear.weight, watch))
    else:
        shown = WatchedExperts(linear, watch)
    fields: dict[str, Any] = {part: replace(block, **{field: shown})}
    return replace(layer, **fields)
