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


def _anywhere(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x), the same wherever in x a number stands."""
    return function(x.double()).to(x.dtype) if x.is_cpu else function(x)


def gelu(x: Tensor) -> Tensor:
    """x times the normal distribution's function of x."""
    if not x.is_cpu:
        return F.gelu(x)
    exact = x.double()
    return (exact * 0.5 * torch.special.erfc(exact * -math.sqrt(0.5))).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """The same with a hyperbolic tangent in place of that function: 1 + tanh(u) is 2 sigmoid(2u)."""
    if not x.is_cpu:
        return F.gelu(x, approximate="tanh")
    exact = x.double()
    return (exact * torch.sigmoid(math.sqrt(8 / math.pi) * (exact + 0.044715 * exact**3))).to(x.dtype)


sigmoid = partial(_anywhere, torch.sigmoid)
silu = partial(_anywhere, F.silu)
softplus = partial(_anywhere, F.softplus)
