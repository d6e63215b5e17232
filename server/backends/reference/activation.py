"""What stands between the matrices of an mlp, in stock torch operators.

Shapes: T tokens, F local width of the mlp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from server.arch.spec import Activation

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.RELU: F.relu,
    Activation.SILU: F.silu,
}

# activation, [gate | up] [T, 2 F] → activation(gate) * up, [T, F].
Gate = Callable[[Activation, Tensor], Tensor]


def stock_gate(activation: Activation, gate_up: Tensor) -> Tensor:
    """A `Gate` of three operators."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up
