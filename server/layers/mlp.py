"""The feed-forward half of a layer: column-parallel up, activation, row-parallel down.

Shapes: T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from server.layers.linear import ColumnLinear, MakeFormat, RowLinear, load_column, load_row
from server.model.spec import Activation, ArchSpec
from server.weights import Weights

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {Activation.GELU_TANH: partial(F.gelu, approximate="tanh")}


@dataclass(frozen=True)
class DenseMlp:
    """x [T, D] → down(activation(up(x))), [T, D], summed over ranks."""

    up: ColumnLinear
    down: RowLinear
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


def load_mlp(weights: Weights, spec: ArchSpec, make_format: MakeFormat) -> DenseMlp:
    """This rank's columns of up and rows of down."""
    width, hidden = spec.mlp.width, spec.hidden_size
    return DenseMlp(
        load_column(weights, "mlp_up", (width, hidden), make_format, bias=spec.linear_bias),
        load_row(weights, "mlp_down", (hidden, width), make_format, bias=spec.linear_bias),
        ACTIVATIONS[spec.mlp.activation],
    )
