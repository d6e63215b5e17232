"""What sampling asks of the logits, in stock torch operators, and the noise that it draws with.

Randomness is a counter, not a generator: the noise of a candidate is a pure function of (seed, position, token id). So
a request can be replayed, moved or resumed with the same tokens, and no rank has to tell another what it drew.

Shapes: R rows, V vocabulary, n best tokens of each row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from server.backends.protocol import LogitSummary

MASK32 = 0xFFFFFFFF


class StockLogits:
    """`protocol.Logits` in torch operators: what defines correct."""

    def summarise(self, logits: Tensor, n: int) -> LogitSummary:
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


def exponential_noise(seed_low: Tensor, seed_high: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Exp(1) noise [R, n], a pure function of (seed, position, token id).

    seed_low, seed_high: [R, 1] halves of the 64-bit seed; positions: [R]; token_ids: [n] or [R, n] int64.
    """
    key = mix(seed_low ^ mix(seed_high ^ mix(positions.unsqueeze(1))))
    bits = mix(mix((token_ids * 0x9E3779B9) & MASK32 ^ key) ^ mix(key + 1))
    # Small values decide the race, and float32 is fine-grained near 0: hence -log(1 - u), not -log(u).
    uniform = (bits.to(torch.float32) + 0.5) * 2.0**-32
    return torch.log1p(-uniform).neg_()


def mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits with full avalanche (Ellis's lowbias32 constants), on int64 tensors."""
    x = x & MASK32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK32
    return x ^ (x >> 16)
