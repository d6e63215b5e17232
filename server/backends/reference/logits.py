"""What sampling asks of the logits, in stock torch operators, and the noise that it draws with.

Randomness is a counter, not a generator: the noise of a candidate is a pure function of (seed, position, token id). So
a request can be replayed, moved or resumed with the same tokens, and no rank has to tell another what it drew.

Over several ranks, what top-p keeps is known from a few candidates of each as long as these hold enough of the
probability; otherwise, and for typical-p, whole rows are gathered. Which of both, the host reads from the device: on a
CPU it costs nothing.

Shapes: R rows, V vocabulary or this rank's part of it, n best tokens of each row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from server.backends.protocol import Gather, LogitSummary, TypicalBounds

MASK32 = 0xFFFFFFFF
# Candidates of each rank for top-p. A language model's nucleus is mostly below a hundred tokens; a nucleus that reaches
# beyond these is found in whole rows.
NUCLEUS_CANDIDATES = 256


class StockLogits:
    """`protocol.Logits` in torch operators: what defines correct."""

    def summarise(self, logits: Tensor, n: int) -> LogitSummary:
        logits = logits.float()
        # One after the other: of equals `max` gives the first, and `topk` any.
        best, ids = logits.max(dim=-1, keepdim=True)
        values, columns, rest = [best], [ids], logits
        for _ in range(n - 1):
            rest = rest.scatter(1, columns[-1], float("-inf"))
            best, ids = rest.max(dim=-1, keepdim=True)
            values.append(best)
            columns.append(ids)
        totals = logits.logsumexp(dim=-1, keepdim=True)
        return LogitSummary(torch.cat(columns, dim=-1), torch.cat(values, dim=-1), totals)

    def race(self, logits: Tensor, seed_low: Tensor, seed_high: Tensor, positions: Tensor, first_id: int = 0) -> Tensor:
        token_ids = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)
        noise = exponential_noise(seed_low, seed_high, positions, token_ids)
        return (logits - noise.log_()).argmax(dim=-1)

    def log_noise(self, seed_low: Tensor, seed_high: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
        return exponential_noise(seed_low, seed_high, positions, token_ids).log_()

    def top_k_threshold(self, logits: Tensor, k: Tensor, most: int, gather: Gather | None) -> Tensor:
        best = logits.topk(min(most, logits.shape[1]), dim=-1).values
        if gather is not None:
            best = torch.cat(gather(best), dim=-1).sort(dim=-1, descending=True).values
        return best.gather(1, k.clamp(max=best.shape[1]) - 1)

    def top_p_threshold(self, logits: Tensor, p: Tensor, gather: Gather | None) -> Tensor:
        threshold = None if gather is None else _threshold_of_candidates(logits, p, gather)
        if threshold is not None:
            return threshold
        values = _whole(logits, gather).sort(dim=-1, descending=True).values
        return _nucleus_threshold(values, values.softmax(dim=-1), p)

    def typical_bounds(self, logits: Tensor, mass: Tensor, gather: Gather | None) -> TypicalBounds:
        rows = _whole(logits, gather)
        log_totals = rows.logsumexp(dim=-1, keepdim=True)
        surprisal = log_totals - rows
        probabilities = (-surprisal).exp()
        entropy = (surprisal * probabilities).nansum(dim=-1, keepdim=True)  # 0 * inf where a warper removed a token
        distance, order = (surprisal - entropy).abs().sort(dim=-1)
        before = probabilities.gather(1, order).cumsum(dim=-1) < mass
        last = before.sum(dim=-1, keepdim=True).clamp(max=rows.shape[1] - 1)
        return TypicalBounds(log_totals, entropy, distance.gather(1, last))


def _threshold_of_candidates(logits: Tensor, p: Tensor, gather: Gather) -> Tensor | None:
    """`top_p_threshold` from a few candidates of each rank; None where those of a row do not reach p."""
    n = min(NUCLEUS_CANDIDATES, logits.shape[1])
    # Values alone take one pass; `summarise` would also settle the ids of equals, one after the other.
    candidates = logits.topk(n, dim=-1).values
    ranks = gather(torch.cat([candidates, logits.logsumexp(dim=-1, keepdim=True)], dim=-1))
    values, totals = (torch.cat(parts, dim=-1) for parts in zip(*(r.split([n, 1], dim=-1) for r in ranks), strict=True))
    if n < logits.shape[1]:
        # Tokens that are not among the candidates are at most as likely as the last one of their rank.
        known = values >= values.view(len(values), -1, n)[:, :, -1].amax(dim=-1, keepdim=True)
        values = values.masked_fill(~known, float("-inf"))
    values = values.sort(dim=-1, descending=True).values
    probabilities = (values - totals.logsumexp(dim=-1, keepdim=True)).exp()
    is_enough = bool((probabilities.cumsum(dim=-1)[:, -1:] >= p).all())
    return _nucleus_threshold(values, probabilities, p) if is_enough else None


def _whole(logits: Tensor, gather: Gather | None) -> Tensor:
    """All ranks' logits [R, V], with their padding."""
    return logits if gather is None else torch.cat(gather(logits), dim=-1)


def _nucleus_threshold(values: Tensor, probabilities: Tensor, p: Tensor) -> Tensor:
    """The last of the values [R, n] before which the probabilities do not reach p [R, 1]; most likely first. [R, 1]."""
    before = probabilities.cumsum(dim=-1) - probabilities
    last = (before < p).sum(dim=-1, keepdim=True).clamp(min=1) - 1
    return values.gather(1, last)


def exponential_noise(seed_low: Tensor, seed_high: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Exp(1) noise [R, n], a pure function of (seed, position, token id).

    seed_low, seed_high: [R, 1] halves of the 64-bit seed; positions: [R]; token_ids: [n] or [R, n] int64.
    """
    key = mix(seed_low ^ mix(seed_high ^ mix(positions.unsqueeze(1))))
    bits = mix(mix((token_ids * 0x9E3779B9) & MASK32 ^ key) ^ mix(key + 1))
    # Small values decide the race, and float32 is fine-grained near 0: hence -log(1 - u), not -log(u). A u that is
    # rounded to 1 would make the noise infinite, and a token that alone is left could lose to those that are removed.
    uniform = ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    return torch.log1p(-uniform).neg_()


def mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits with full avalanche (Ellis's lowbias32 constants), on int64 tensors."""
    x = x & MASK32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK32
    return x ^ (x >> 16)
