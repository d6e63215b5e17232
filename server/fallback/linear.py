"""The linear layers of a transformers model in a backend's formats, divided over the ranks by the model's own plan.

A plan names modules and parameters and how each is divided, in transformers' words (`base_model_tp_plan`). What it does
not name is on every rank. Experts that are one parameter are divided, and stay as dense as transformers computes them.

Shapes: F output features, D input features, T tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from server.backends.protocol import Backend, LinearFormat
from server.fallback.asked import UnbatchedError
from server.quantisation.stored import Quantise, Stored
from server.ranks.collectives import Shard

# What `PreTrainedConfig`s call the number of experts: a linear layer of so many outputs is a router, and stays dense.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Style:
    """How a linear layer or a parameter is divided, and what that takes around it."""

    dim: int | None = None  # of the weight: -2 its outputs, -1 its inputs; None: every rank has all of it
    parts: int = 1  # that are stacked in this dimension, each of which is divided
    splits_input: bool = False  # which every rank has whole
    gathers: bool = False  # the outputs
    sums: bool = False  # the outputs


WHOLE = Style()
STYLES: Mapping[str, Style] = {
    "colwise": Style(-2),
    "colwise_gather_output": Style(-2, gathers=True),
    "colwise_rep": Style(-2, gathers=True),
    "packed_colwise": Style(-2, parts=2),
    "rowwise": Style(-1, sums=True),
    "rowwise_split_input": Style(-1, splits_input=True, sums=True),
    "rowwise_rep": Style(-1, splits_input=True, sums=True),
    "packed_rowwise": Style(-1, parts=2, sums=True),
    "moe_tp_experts": Style(sums=True),
    "all_reduce": Style(sums=True),
    **dict.fromkeys(("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params"), WHOLE),
    **dict.fromkeys(("embedding_rowwise", "embedding_colwise"), WHOLE),
}


@dataclass(frozen=True)
class Plan:
    """Which styles a model's modules and parameters have, by names in which * is a layer's number."""

    styles: Mapping[str, str]

    @property
    def divides(self) -> bool:
        """Whether layers are divided at all."""
        return any(STYLES.get(style, WHOLE).sums for style in self.styles.values())

    def style(self, name: str) -> Style:
        """Of a module or parameter. Raises UnbatchedError for one that is not known here."""
        style = self.styles.get(re.sub(r"\d+", "*", name), "replicate")
        if style not in STYLES:
            raise UnbatchedError(f"its plan for several shards divides {name} in a way that is not served, {style}")
        return STYLES[style]


class FormatLinear(nn.Module):
    """What stands for an `nn.Linear`: this rank's part of it in a backend's format."""

    def __init__(self, format: LinearFormat, width: int, bias: Tensor | None, style: Style, shard: Shard):
        super().__init__()
        self.format, self.width, self.bias, self.style, self.shard = format, width, bias, style, shard

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] → [..., F]."""
        style, flat = self.style, x.reshape(-1, x.shape[-1])
        if style.splits_input:
            first, last = self.shard.range(x.shape[-1])
            flat = flat[:, first:last]
        y = self.format(flat.contiguous(), None if style.sums else self.bias)
        if style.sums:
            y = self.shard.all_reduce(y)
            y = y if self.bias is None else y + self.bias
        elif style.gathers:
            y = torch.cat(self.shard.all_gather(y), dim=-1)
        return y.view(*x.shape[:-1], -1)


@dataclass(frozen=True)
class Divider:
    """Replaces the linear layers of a model and divides what its plan says, in place."""

    backend: Backend
    shard: Shard
    plan: Plan
    dtype: torch.dtype  # of layers that are replaced
    device: torch.device
    quantise: Quantise | None  # None: weights stay dense

    def divide(self, body: nn.Module, prefix: str, config: object) -> None:
        """prefix: of the names in the plan. Raises UnbatchedError for what the ranks cannot share evenly."""
        experts = {getattr(config, name, None) for name in EXPERTS}
        for name, module in list(body.named_modules()):
            style = self._style(prefix + name)
            if type(module) is nn.Linear and module.weight.dtype == self.dtype:
                quantise = None if module.out_features in experts else self.quantise
                body.set_submodule(name, self._replaced(name, module, style, quantise))
                continue
            if style.dim is not None:
                raise UnbatchedError(f"its plan for several shards divides {name}, which is no plain linear layer")
            self._divide_parameters(module, prefix + name)
            if style.sums:
                module.register_forward_hook(self._sum)

    def _style(self, name: str) -> Style:
        return WHOLE if self.shard.world_size == 1 else self.plan.style(name)

    def _replaced(self, name: str, linear: nn.Linear, style: Style, quantise: Quantise | None) -> FormatLinear:
        weight = linear.weight.detach().to(self.device)
        bias = None if linear.bias is None else linear.bias.detach().to(self.device)
        if bias is not None and style.dim == -2:
            bias = self._part(name, bias, style)
        maximum = self.shard.all_reduce_max if style.dim == -1 else None
        stored = self._stored(name, weight, style, quantise)
        return FormatLinear(self.backend.linear(stored, maximum=maximum), stored.shape[0], bias, style, self.shard)

    def _stored(self, name: str, weight: Tensor, style: Style, quantise: Quantise | None) -> Stored:
        if quantise is None:
            return self._part(name, weight, style)
        if style.dim != -1:  # scales are those of rows
            return quantise(self._part(name, weight, style).float())
        if style.parts > 1:
            raise UnbatchedError(f"its plan for several shards divides {name} in parts, which is not served quantised")
        self._refuse_uneven(name, weight.shape[1], style)
        return quantise(weight.float()).columns(*self.shard.range(weight.shape[1]))

    def _divide_parameters(self, module: nn.Module, name: str) -> None:
        for own, parameter in list(module.named_parameters(recurse=False)):
            style = self._style(f"{name}.{own}")
            is_whole = style.dim is None or (style.dim == -1 and own == "bias")
            if not is_whole:
                part = self._part(f"{name}.{own}", parameter.detach(), style)
                setattr(module, own, nn.Parameter(part, requires_grad=False))

    def _part(self, name: str, tensor: Tensor, style: Style) -> Tensor:
        """This rank's part of a weight [..., F, D] or a bias [F]."""
        if style.dim is None:
            return tensor
        dim = -1 if tensor.dim() == 1 else style.dim
        self._refuse_uneven(name, tensor.shape[dim], style)
        ranges = [self.shard.range(part.shape[dim]) for part in tensor.chunk(style.parts, dim)]
        parts = [
            part.narrow(dim, start, stop - start)
            for part, (start, stop) in zip(tensor.chunk(style.parts, dim), ranges, strict=True)
        ]
        return torch.cat(parts, dim).contiguous()

    def _refuse_uneven(self, name: str, size: int, style: Style) -> None:
        if size % (style.parts * self.shard.world_size):
            raise UnbatchedError(f"{self.shard.world_size} shards cannot share the {size} features of {name} evenly")

    def _sum(self, module: nn.Module, args: object, output: Tensor) -> Tensor:
        return self.shard.all_reduce(output)
