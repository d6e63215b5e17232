"""This rank's part of the vocabulary, and what the ranks tell each other of their logits.

Each rank has the logits of its own tokens. To choose the next one, the ranks exchange candidates (value, id and the log
of the sum of all exponentials), not rows of the vocabulary's size: exactly the same is known then of the best tokens
and of a draw from all of them. What a warper keeps is a threshold or two for each row, found by the backend
(`protocol.Logits`); tokens are then removed by each rank for itself.

All ranks choose the same token, whatever rounding does: each of them decides by what all have gathered, which is the
same to the last bit, with operators that give the same for the same input.

Shapes: R rows, V vocabulary, Vl this rank's part of it (padded, so that all ranks' are equal), n candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from server.backends.protocol import Gather, Logits, LogitSummary, TypicalBounds
from server.ranks.collectives import Shard


@dataclass(frozen=True)
class Draw:
    """One token of each row, drawn from all."""

    token_ids: Tensor  # [R]
    logits: Tensor  # [R]


class Vocabulary:
    """Tokens [start, start + width) of `size`, and the ranks that have the others.

    Columns behind the vocabulary's end are padding: their logits are minus infinity.
    """

    def __init__(self, logits: Logits, shard: Shard, size: int, start: int = 0, width: int = 0):
        self.size = size
        self.start = start
        self.width = width or size
        self._logits = logits
        self._shard = shard

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all tokens."""
        return self._shard.world_size == 1

    def has(self, token_id: int) -> bool:
        """Whether this rank has the token."""
        return self.start <= token_id < self.start + self.width

    def summarise(self, logits: Tensor, n: int) -> LogitSummary:
        """The n best tokens of all ranks, from this rank's logits [R, Vl], which are not changed."""
        local = self._logits.summarise(logits, min(n, self.width))
        if self.is_whole:
            return local
        values, ids, totals = self._gather(local.top_logits, local.top_ids + self.start, local.log_totals)
        best, order = values.sort(dim=-1, descending=True, stable=True)
        return LogitSummary(ids.gather(1, order)[:, :n], best[:, :n], totals.logsumexp(dim=-1, keepdim=True))

    def draw(self, logits: Tensor, seed_low: Tensor, seed_high: Tensor, positions: Tensor) -> Draw:
        """A token of each row of logits [R, Vl]. See `Logits.race`."""
        columns = self._logits.race(logits, seed_low, seed_high, positions, self.start).unsqueeze(1)
        values, ids = logits.gather(1, columns).float(), columns + self.start
        if self.is_whole:
            return Draw(ids.squeeze(1), values.squeeze(1))
        scores = values - self._logits.log_noise(seed_low, seed_high, positions, ids)
        scores, values, ids = self._gather(scores, values, ids)
        winner = scores.argmax(dim=-1, keepdim=True)
        return Draw(ids.gather(1, winner).squeeze(1), values.gather(1, winner).squeeze(1))

    def logprobs(self, logits: Tensor, token_ids: Tensor, log_totals: Tensor | None = None) -> Tensor:
        """The log-probability [R] of one token [R] of each row of logits [R, Vl].

        log_totals: [R, 1] of all ranks' logits, where `summarise` has found them: then a token among its candidates has
        the very same number.
        """
        if log_totals is not None:
            return self._values(logits, token_ids) - log_totals.squeeze(1)
        totals = self._logits.summarise(logits, 1).log_totals
        if self.is_whole:
            return self._values(logits, token_ids) - totals.squeeze(1)
        values, totals = self._gather(self._own_values(logits, token_ids), totals)
        return values.amax(dim=-1) - totals.logsumexp(dim=-1)

    def _values(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """The logit [R] of one token [R] of each row, float32."""
        if self.is_whole:
            return logits.gather(1, token_ids.unsqueeze(1)).squeeze(1).float()
        return self._gather(self._own_values(logits, token_ids))[0].amax(dim=-1)

    def _own_values(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """The same [R, 1] where this rank has the token, else minus infinity."""
        columns = (token_ids - self.start).unsqueeze(1)
        is_mine = (columns >= 0) & (columns < self.width)
        return logits.gather(1, columns.clamp(0, self.width - 1)).float().masked_fill(~is_mine, float("-inf"))

    def best(self, logits: Tensor) -> Tensor:
        """The largest logit [R, 1] of each row of all ranks' float32 logits [R, Vl]."""
        mine = logits.amax(dim=-1, keepdim=True)
        return mine if self.is_whole else self._gather(mine)[0].amax(dim=-1, keepdim=True)

    def top_k_threshold(self, logits: Tensor, k: Tensor, most: int) -> Tensor:
        """See `Logits.top_k_threshold`."""
        return self._logits.top_k_threshold(logits, k, most, self._exchange)

    def top_p_threshold(self, logits: Tensor, p: Tensor) -> Tensor:
        """See `Logits.top_p_threshold`."""
        return self._logits.top_p_threshold(logits, p, self._exchange)

    def typical_bounds(self, logits: Tensor, mass: Tensor) -> TypicalBounds:
        """See `Logits.typical_bounds`."""
        return self._logits.typical_bounds(logits, mass, self._exchange)

    @property
    def _exchange(self) -> Gather | None:
        return None if self.is_whole else self._shard.all_gather

    def _gather(self, *parts: Tensor) -> list[Tensor]:
        """Each of `parts` [R, n] of all ranks side by side, [R, ranks * n]; float32, or ids. One exchange for all."""
        packed = torch.cat([_as_words(part) for part in parts], dim=-1)
        ranks = self._shard.all_gather(packed)
        split = [rank.split([part.shape[1] for part in parts], dim=-1) for rank in ranks]
        joined = (torch.cat(same, dim=-1) for same in zip(*split, strict=True))
        return [_from_words(words, part.dtype) for words, part in zip(joined, parts, strict=True)]


def _as_words(part: Tensor) -> Tensor:
    return part.contiguous().view(torch.int32) if part.dtype == torch.float32 else part.to(torch.int32)


def _from_words(words: Tensor, dtype: torch.dtype) -> Tensor:
    return words.view(torch.float32) if dtype == torch.float32 else words.to(dtype)
