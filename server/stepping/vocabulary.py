"""This rank's part of the vocabulary, and what the ranks tell each other of their logits.

Each rank has the logits of its own tokens. To choose the next one, the ranks exchange candidates (value, id and the log
of the sum of all exponentials), not rows of the vocabulary's size: exactly the same is known then of the best tokens,
of a draw from all of them, and of the k-th best. What top-p keeps is known from candidates as long as they hold enough
of the probability; otherwise, and for typical-p, whole rows are gathered.

Everything a warper needs is a few numbers for each row; tokens are then removed by each rank for itself.

Shapes: R rows, V vocabulary, Vl this rank's part of it (padded, so that all ranks' are equal), n candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from server.backends.protocol import Logits, LogitSummary
from server.backends.reference.logits import exponential_noise
from server.distributed import Shard

# Candidates of each rank for top-p. A language model's nucleus is mostly below a hundred tokens; a nucleus that reaches
# beyond these is found in whole rows.
NUCLEUS_CANDIDATES = 256


@dataclass(frozen=True)
class Draw:
    """One token of each row, drawn from all."""

    token_ids: Tensor  # [R]
    logits: Tensor  # [R]


@dataclass(frozen=True)
class TypicalBounds:
    """What typical-p keeps: tokens whose surprisal is at most `reach` away from the entropy."""

    log_totals: Tensor  # [R, 1]
    entropy: Tensor  # [R, 1]
    reach: Tensor  # [R, 1]


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

    def summarise(self, logits: Tensor, n: int) -> LogitSummary:
        """The n best tokens of all ranks, from this rank's logits [R, Vl] float32, which are not changed."""
        local = self._logits.summarise(logits, min(n, self.width))
        if self.is_whole:
            return local
        values, ids, totals = self._gather(local.top_logits, local.top_ids + self.start, local.log_totals)
        best, order = values.sort(dim=-1, descending=True, stable=True)
        return LogitSummary(ids.gather(1, order)[:, :n], best[:, :n], totals.logsumexp(dim=-1, keepdim=True))

    def draw(self, logits: Tensor, seed_low: Tensor, seed_high: Tensor, positions: Tensor) -> Draw:
        """A token of each row of logits [R, Vl] float32. See `Logits.race`."""
        columns = self._logits.race(logits, seed_low, seed_high, positions, self.start).unsqueeze(1)
        values, ids = logits.gather(1, columns), columns + self.start
        if self.is_whole:
            return Draw(ids.squeeze(1), values.squeeze(1))
        scores = values - exponential_noise(seed_low, seed_high, positions, ids).log_()
        scores, values, ids = self._gather(scores, values, ids)
        winner = scores.argmax(dim=-1, keepdim=True)
        return Draw(ids.gather(1, winner).squeeze(1), values.gather(1, winner).squeeze(1))

    def logprobs(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """The log-probability [R] of one token [R] of each row of logits [R, Vl]."""
        if self.is_whole:
            return logits.log_softmax(dim=-1).gather(1, token_ids.unsqueeze(1)).squeeze(1)
        columns = (token_ids - self.start).unsqueeze(1)
        is_mine = (columns >= 0) & (columns < self.width)
        mine = logits.gather(1, columns.clamp(0, self.width - 1)).masked_fill(~is_mine, float("-inf"))
        totals = logits.logsumexp(dim=-1, keepdim=True)
        values, totals = self._gather(mine, totals)
        return values.amax(dim=-1) - totals.logsumexp(dim=-1)

    def top_k_threshold(self, logits: Tensor, k: Tensor, most: int) -> Tensor:
        """The k-th best logit [R, 1] of each row. k: [R, 1] int64, none above `most`."""
        best = logits.topk(min(most, self.width), dim=-1).values
        if not self.is_whole:
            (best,) = self._gather(best)
            best = best.sort(dim=-1, descending=True).values
        return best.gather(1, k.clamp(max=best.shape[1]) - 1)

    def top_p_threshold(self, logits: Tensor, p: Tensor) -> Tensor:
        """The least likely logit [R, 1] that belongs to the most likely tokens whose probabilities reach p [R, 1]."""
        if not self.is_whole:
            n = min(NUCLEUS_CANDIDATES, self.width)
            # Values alone take one pass; `summarise` would also settle the ids of equals, one after the other.
            totals = logits.logsumexp(dim=-1, keepdim=True)
            values, totals = self._gather(logits.topk(n, dim=-1).values, totals)
            if n < self.width:
                # Tokens that are not among the candidates are at most as likely as the last one of their rank.
                known = values >= values.view(len(values), -1, n)[:, :, -1].amax(dim=-1, keepdim=True)
                values = values.masked_fill(~known, float("-inf"))
            values = values.sort(dim=-1, descending=True).values
            probabilities = (values - totals.logsumexp(dim=-1, keepdim=True)).exp()
            if bool((probabilities.cumsum(dim=-1)[:, -1:] >= p).all()):
                return nucleus_threshold(values, probabilities, p)
        values = self.gather(logits).sort(dim=-1, descending=True).values
        return nucleus_threshold(values, values.softmax(dim=-1), p)

    def typical_bounds(self, logits: Tensor, mass: Tensor) -> TypicalBounds:
        """What typical-p keeps of each row: the tokens nearest the entropy until they reach `mass` [R, 1]."""
        rows = self.gather(logits)
        log_totals = rows.logsumexp(dim=-1, keepdim=True)
        surprisal = log_totals - rows
        probabilities = (-surprisal).exp()
        entropy = (surprisal * probabilities).nansum(dim=-1, keepdim=True)  # 0 * inf where a warper removed a token
        distance, order = (surprisal - entropy).abs().sort(dim=-1)
        before = probabilities.gather(1, order).cumsum(dim=-1) < mass
        last = before.sum(dim=-1, keepdim=True).clamp(max=rows.shape[1] - 1)
        return TypicalBounds(log_totals, entropy, distance.gather(1, last))

    def gather(self, logits: Tensor) -> Tensor:
        """All ranks' logits [R, V]."""
        return logits if self.is_whole else torch.cat(self._shard.all_gather(logits), dim=-1)[:, : self.size]

    def _gather(self, *parts: Tensor) -> list[Tensor]:
        """Each of `parts` [R, n] of all ranks side by side, [R, ranks * n]; float32, or ids. One exchange for all."""
        packed = torch.cat([_as_words(part) for part in parts], dim=-1)
        ranks = self._shard.all_gather(packed)
        split = [rank.split([part.shape[1] for part in parts], dim=-1) for rank in ranks]
        joined = (torch.cat(same, dim=-1) for same in zip(*split, strict=True))
        return [_from_words(words, part.dtype) for words, part in zip(joined, parts, strict=True)]


def nucleus_threshold(values: Tensor, probabilities: Tensor, p: Tensor) -> Tensor:
    """The last of the values [R, n] before which the probabilities do not reach p [R, 1]; most likely first. [R, 1]."""
    before = probabilities.cumsum(dim=-1) - probabilities
    last = (before < p).sum(dim=-1, keepdim=True).clamp(min=1) - 1
    return values.gather(1, last)


def _as_words(part: Tensor) -> Tensor:
    return part.contiguous().view(torch.int32) if part.dtype == torch.float32 else part.to(torch.int32)


def _from_words(words: Tensor, dtype: torch.dtype) -> Tensor:
    return words.view(torch.float32) if dtype == torch.float32 else words.to(dtype)
