"""Functions of single numbers that torch computes in two ways on a CPU, given one value for each number.

Its vectorised loops leave the last few numbers of a tensor, or of a thread's part of it, to other code that rounds
otherwise, so that a token's numbers would depend on what else is in the step. In double precision the difference is
beyond what float32 holds. A GPU has one way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor


def _anywhere(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x), the same wherever in x a number stands."""
    return function(x.double()).to(x.dtype) if x.is_cpu else function(x)


gelu = partial(_anywhere, F.gelu)
gelu_tanh = partial(_anywhere, partial(F.gelu, approximate="tanh"))
sigmoid = partial(_anywhere, torch.sigmoid)
silu = partial(_anywhere, F.silu)
softplus = partial(_anywhere, F.softplus)
