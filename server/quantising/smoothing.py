"""SmoothQuant (Xiao et al. 2022, arXiv 2211.10438): a part of the inputs' range moves into the weights.

Where inputs are rounded to 8 bits too, one channel that is much larger than the others takes the codes of all. The
scale of a channel is max|x|^alpha / max|w|^(1 - alpha), over all matrices that read it. Norms are divided by it;
matrices whose outputs are the inputs are left alone, as in the paper.

Shapes: D input features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from server.quantising.sites import Inputs

LEAST = 1e-5


def scale_of(matrices: Sequence[tuple[Tensor, Inputs]], alpha: float) -> Tensor:
    """[D] what the inputs of all matrices [F, D] are divided by, and these multiplied."""
    largest_input = torch.stack([inputs.largest for _, inputs in matrices]).amax(0)
    largest_weight = torch.stack([weight.abs().amax(0) for weight, _ in matrices]).amax(0)
    scale = largest_input.clamp(min=LEAST) ** alpha / largest_weight.clamp(min=LEAST) ** (1 - alpha)
    return scale.clamp(min=LEAST)
