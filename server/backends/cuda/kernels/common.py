# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""What the attention kernels share: where a key lies, how it is scored, and how a head dim is tiled.

Scores are kept in base 2 (multiplied by log2 e), because the GPU's exponential is exp2.

Shapes: N local heads, K local kv heads, H head dim, P tokens per block, D reach of the learned bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.backends.protocol import Scores

LOG2_E = tl.constexpr(1.4426950408889634)
# Below every score, yet finite: a row that has seen no key yet can be rescaled without making NaN of -inf - -inf.
LOWEST = tl.constexpr(-1.0e30)


@dataclass(frozen=True)
class ScoreTerms:
    """How queries are scored against keys, on the device: what is added to a score, and sinks, already in base 2."""

    scale: float
    cap: float
    slopes: Tensor | None  # [N] float32
    bias: Tensor | None  # [N, 2 D + 1] float32
    sinks: Tensor | None  # [N] float32
    chunk: int  # see `Scores`

    @property
    def constants(self) -> dict[str, float | int]:
        """What a kernel is compiled for."""
        reach = 0 if self.bias is None else self.bias.shape[1] // 2
        return {"SCALE": self.scale, "CAP": self.cap, "REACH": reach, "CHUNK": self.chunk}


def score_terms(scores: Scores, device: torch.device) -> ScoreTerms:
    """The terms of `scores` on `device`."""
    slopes = torch.tensor(scores.slopes, device=device) * LOG2_E.value if scores.slopes else None
    bias = None if scores.bias is None else scores.bias.to(device, torch.float32).contiguous() * LOG2_E.value
    sinks = None if scores.sinks is None else scores.sinks.to(device, torch.float32) * LOG2_E.value
    return ScoreTerms(scores.scale, scores.cap, slopes, bias, sinks, scores.chunk)


def padded(head_dim: int) -> int:
    """A tile's width for a head dim: the next power of two, at least what the matrix units take."""
    return max(triton.next_power_of_2(head_dim), 16)


@triton.jit
def load_blocks(table, keys, seen, BLOCK_SIZE: tl.constexpr):
    """Blocks that hold the `keys` of the sequence whose blocks are in `table`."""
    return tl.load(table + keys // BLOCK_SIZE, mask=seen, other=0)


@triton.jit
def with_sink(total, sinks, heads, kept, best):
    """The sum of a head's weights, of which 1 stands for the score `best`, with that of its sink."""
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + heads, mask=kept, other=0.0) - best)
    return total


@triton.jit
def finish_scores(products, distance, heads, slopes, bias, SCALE: tl.constexpr, CAP: tl.constexpr, REACH: tl.constexpr):
    """Scale, cap and bias products of queries and keys, in base 2.

    distance: key minus query; heads: of the queries. Both broadcast to the products' shape.
    """
    if CAP > 0:
        # tanh, which the language lacks
        scores = (CAP * LOG2_E) * (2 * tl.sigmoid(products * (2 * SCALE / CAP)) - 1)
    else:
        scores = products * (SCALE * LOG2_E)
    if slopes is not None:
        scores += tl.load(slopes + heads) * distance
    if bias is not None:
        clamped = tl.minimum(tl.maximum(distance, -REACH), REACH)
        scores += tl.load(bias + heads * (2 * REACH + 1) + clamped + REACH)
    return scores
