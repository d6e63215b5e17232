"""What stands between the matrices of an mlp, in stock torch operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from server.model.spec import Activation

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.RELU: F.relu,
    Activation.SILU: F.silu,
}
