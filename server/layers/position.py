"""How a model knows the order of its tokens. So far: ALiBi (Press et al. 2021, arXiv 2108.12409)."""

from __future__ import annotations


def alibi_slopes(num_heads: int) -> list[float]:
    """The slope of every head: a geometric sequence that starts at 2^(-8/n) for n heads.

    When `num_heads` is no power of two, the sequence of the next lower power is followed by every other slope of the
    next higher one, as in the paper's code. A rank takes the slopes of its own heads out of the whole list.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = _geometric(power, power)
    return slopes + _geometric(2 * power, 2 * power)[::2][: num_heads - power]


def _geometric(num_heads: int, count: int) -> list[float]:
    ratio = 2.0 ** (-8.0 / num_heads)
    return [ratio ** (i + 1) for i in range(count)]
