"""Logits of another vocabulary in the places of the served model's.

Models of one family may fill up their tables to different sizes, and heads that only propose may know the frequent
tokens alone. Penalties, noise and the choice itself then are as for the model's own logits.

Shapes: R rows, Vp tokens that the speculative model has, Vl the served model's columns of this rank, with padding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from server.ranks.collectives import Shard


class AlignedLogits:
    """Of a head whose columns are divided over the ranks.

    logits: [R, D] → this rank's columns, with padding behind those of all ranks. vocab_range: the served model's first
    column here, and how many. places: [Vp] which of the model's tokens each one is.
    """

    def __init__(
        self,
        logits: Callable[[Tensor], Tensor],
        vocab_range: tuple[int, int],
        shard: Shard,
        places: Tensor,
    ) -> None:
        start, width = vocab_range
        is_mine = (places >= start) & (places < start + width)
        self._logits = logits
        self._width = width
        self._shard = shard
        self._sources, self._places = is_mine.nonzero().squeeze(1), places[is_mine] - start

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [R, D] → [R, Vl]: minus infinity where the head knows no token."""
        own = self._logits(hidden)
        whole = own if self._shard.world_size == 1 else torch.cat(self._shard.all_gather(own), dim=1)
        found = whole.new_full((len(whole), self._width), float("-inf"))
        return found.index_copy_(1, self._places, whole.index_select(1, self._sources))
