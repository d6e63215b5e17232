"""Finds the watermark that `watermark` leaves in a text (Kirchenbauer et al. 2023, arXiv 2301.10226).

Behind each token, a share gamma of the vocabulary is green, and generation favoured it. Without the watermark a token
is green with probability gamma; in a text that has it so many more are that chance is ruled out: that is what z says.
A token that comes again behind the same token is scored once, because a text that repeats itself would otherwise
prove itself. Whoever looks needs the tokenizer and gamma, and no model.

`server/stepping/sampling.py` has the same green list for a whole vocabulary at once, in tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

MASK32 = 0xFFFFFFFF
# How often chance may be taken for the watermark: once in 31,574 texts. It is that of z 4, the paper's choice.
MOST_LIKELY_BY_CHANCE = math.erfc(4 / math.sqrt(2)) / 2


class TextTooShort(ValueError):
    """Nothing can be told of the text: too few different pairs of tokens."""


@dataclass(frozen=True)
class Detection:
    """What the tokens of a text say of the watermark."""

    num_tokens: int
    num_scored: int  # different pairs of a token and the one before it
    num_green: int  # of those
    gamma: float

    @property
    def z(self) -> float:
        """By how many standard deviations more tokens are green than chance would have it."""
        expected = self.gamma * self.num_scored
        return (self.num_green - expected) / math.sqrt(expected * (1 - self.gamma))

    @property
    def p(self) -> float:
        """The probability of so many green tokens in a text without the watermark: exact, for short texts too."""
        return _at_least(self.num_green, self.num_scored, self.gamma)

    @property
    def is_watermarked(self) -> bool:
        """Whether chance is ruled out."""
        return self.p < MOST_LIKELY_BY_CHANCE


def detect(token_ids: Sequence[int], gamma: float) -> Detection:
    """Score the tokens of a text. Raises TextTooShort where chance could not be ruled out if all of them were green."""
    pairs = set(pairwise(token_ids))
    least = needed(gamma)
    if len(pairs) < least:
        raise TextTooShort(
            f"the text has {len(pairs)} different pairs of neighbouring tokens, and with gamma {gamma:g} it takes at "
            f"least {least} to tell a watermark from chance: give a longer text"
        )
    green = sum(is_green(token, previous, gamma) for previous, token in pairs)
    return Detection(len(token_ids), len(pairs), green, gamma)


def needed(gamma: float) -> int:
    """How many pairs rule chance out if all are green."""
    return math.floor(math.log(MOST_LIKELY_BY_CHANCE) / math.log(gamma)) + 1


def _at_least(k: int, n: int, p: float) -> float:
    """The probability of k or more of n, each with probability p."""

    def log_of(i: int) -> float:
        ways = math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1)
        return ways + i * math.log(p) + (n - i) * math.log1p(-p)

    return min(1.0, math.fsum(math.exp(log_of(i)) for i in range(k, n + 1)))


def is_green(token: int, previous: int, gamma: float) -> bool:
    """Whether generation favours `token` behind `previous`."""
    return mix(mix(token) ^ ((previous * 15485863) & MASK32)) < int(gamma * 2**32)


def mix(x: int) -> int:
    """A bijection of 32 bits with full avalanche, by the constants of Ellis's lowbias32."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK32
    return x ^ (x >> 16)
