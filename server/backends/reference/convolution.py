"""Causal convolutions over few tokens in stock torch operators, whose last inputs a sequence's state remembers.

Shapes: T tokens in the step, n sequences that have L tokens each, C channels, `taps` tokens that the convolution sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from server.backends.protocol import ShortConvWeights, StepMeta


def groups(meta: StepMeta) -> Iterator[tuple[slice, slice, int]]:
    """Sequences of as many tokens each, their tokens, and how many each has: all that decode, then each chunk alone."""
    counts = [stop - start for start, stop in pairwise(meta.query_starts)]
    decodes = [(0, meta.num_decodes, 1)] if meta.num_decodes else []
    for first, last, count in decodes + [(s, s + 1, counts[s]) for s in range(meta.num_decodes, len(counts))]:
        start = meta.query_starts[first]
        if count:
            yield slice(first, last), slice(start, start + (last - first) * count), count


def rows_of(state: Tensor, meta: StepMeta, sequences: slice, tokens: slice, count: int) -> tuple[Tensor, Tensor]:
    """The rows [n] of some sequences, as `groups` gives them, and what `state` [rows, W] has in them [n, W].

    A sequence at position 0 has zeros.
    """
    assert meta.rows is not None, "steps of models with recurrent layers name their rows"
    rows = meta.rows[sequences]
    before = state.index_select(0, rows)
    is_fresh = meta.positions[tokens.start : tokens.stop : count] == 0
    return rows, torch.where(is_fresh.unsqueeze(1), torch.zeros_like(before), before)


def convolve(x: Tensor, filters: Tensor, bias: Tensor | None, past: Tensor, meta: StepMeta) -> Tensor:
    """x [T, C] convolved, in float32. filters: [C, taps], the latest token last.

    past: [rows, (taps - 1) * C] float32, the last inputs of all sequences, the oldest first: read and written.
    """
    channels, taps = filters.shape
    out = torch.empty(x.shape, device=x.device)
    for sequences, tokens, count in groups(meta):
        rows, before = rows_of(past, meta, sequences, tokens, count)
        own = x[tokens].float().view(-1, count, channels)
        seen = torch.cat([before.view(-1, taps - 1, channels), own], dim=1)
        mixed = (seen.unfold(1, taps, 1) * filters).sum(dim=3)
        out[tokens] = (mixed if bias is None else mixed + bias).flatten(0, 1)
        past.index_copy_(0, rows, seen[:, count:].flatten(1))
    return out


class StockShortConv:
    """See `protocol.ConvRule`."""

    def __init__(self, weights: ShortConvWeights):
        self._weights = weights

    def __call__(self, bcx: Tensor, state: Tensor, meta: StepMeta) -> Tensor:
        b, c, x = bcx.float().chunk(3, dim=1)
        return (c * convolve(b * x, self._weights.conv, self._weights.bias, state, meta)).to(bcx.dtype)
