"""Functions of single numbers that torch computes in two ways on a CPU, given one value for each number.

Its vectorised loops leave the last few numbers of a tensor, or of a thread's part of it, to other code that rounds
otherwise, so that a token's numbers would depend on what else is in the step. In double precision the difference is
beyond what float32 holds, but for the GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415) of numbers far below 0, where
1 and the error function, or the tangent, nearly cancel: it is computed without that sum. A GPU has one way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[[Tensor], Tensor]


def _anywhere(function: Function, exact: Function, x: Tensor) -> Tensor:
    """function(x), the same wherever in x a number stands. exact: what is it in double precision, on a CPU."""
    return exact(x.double()).to(x.dtype) if x.is_cpu else function(x)


def _gelu(x: Tensor) -> Tensor:
    """1 + erf(u) is erfc(-u)."""
    return x * 0.5 * torch.special.erfc(x * -math.sqrt(0.5))


def _gelu_tanh(x: Tensor) -> Tensor:
    """1 + tanh(u) is 2 sigmoid(2u)."""
    return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))


gelu = partial(_anywhere, F.gelu, _gelu)
gelu_tanh = partial(_anywhere, partial(F.gelu, approximate="tanh"), _gelu_tanh)
sigmoid = partial(_anywhere, torch.sigmoid, torch.sigmoid)
silu = partial(_anywhere, F.silu, F.silu)
softplus = partial(_anywhere, F.softplus, F.softplus)
