"""How a model knows the order of its tokens: ALiBi slopes, bucketed biases, rotations, scales of queries.

The rotation of a token is a pure function of its position and of its sequence's prompt length, so that chunks of a
prompt, cached tokens and resumed requests agree.

Shapes: T tokens, H head dim, r rotated features of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from server.arch.spec import (
    Alibi,
    Bucketed,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    QueryScale,
    Rope,
    YarnScaling,
)
from server.backends.protocol import Rotation


def alibi_slopes(num_heads: int, alibi: Alibi) -> list[float]:
    """The slope of every head: a geometric sequence that starts at 2^(-max_bias/n) for n heads (Press et al. 2021).

    When `num_heads` is no power of two, the sequence of the next lower power is followed by every other slope of the
    next higher one, as in the paper's code. A rank takes the slopes of its own heads out of the whole list.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = _geometric(power, alibi) + _geometric(2 * power, alibi)[::2]
    return slopes[:num_heads]


def _geometric(num_heads: int, alibi: Alibi) -> list[float]:
    return [alibi.scale * 2.0 ** (-alibi.max_bias * (i + 1) / num_heads) for i in range(num_heads)]


def bucket_bias(table: Tensor, buckets: Bucketed) -> Tensor:
    """The bias [heads, 2 D + 1] at distances -D … D of key minus query, D the largest that differs from those beyond.

    table: [buckets, heads], as learned.
    """
    distance = torch.arange(-buckets.max_distance, buckets.max_distance + 1, device=table.device)
    return table.float()[_bucket_of(distance, buckets)].t().contiguous()


def _bucket_of(distance: Tensor, buckets: Bucketed) -> Tensor:
    """The bucket of each distance: exact up to half of them, then logarithmic."""
    count = buckets.num_buckets // 2 if buckets.bidirectional else buckets.num_buckets
    behind = count * (distance > 0) if buckets.bidirectional else torch.zeros_like(distance)
    size = distance.abs() if buckets.bidirectional else distance.clamp(max=0).neg()
    exact = count // 2
    octaves = (size.clamp(min=exact).float() / exact).log() / math.log(buckets.max_distance / exact)
    grown = (exact + (octaves * (count - exact)).long()).clamp(max=count - 1)
    return behind + torch.where(size < exact, size, grown)


def query_scales(scale: QueryScale, positions: Tensor) -> Tensor:
    """What the queries at `positions` [T] are multiplied by, [T, 1, 1] float32."""
    periods = torch.div(positions + scale.offset, scale.period, rounding_mode="floor")
    return (1 + scale.growth * periods.float().log1p()).view(-1, 1, 1)


class Rotary:
    """Makes the rotations of a Rope; its constants are computed once, on `device`."""

    def __init__(self, rope: Rope, device: torch.device):
        self._rope = rope
        self._exponents = torch.arange(0, rope.dim, 2, device=device).float() / rope.dim
        self._frequencies, self._magnitude = _frequencies(rope, self._exponents)

    def __call__(self, positions: Tensor, lengths: Tensor) -> Rotation:
        """The rotations for tokens at `positions` [T] of sequences whose prompts have `lengths` [T] tokens."""
        reach = torch.maximum(lengths, positions + 1)  # tokens that the model has to tell apart
        angles = positions.unsqueeze(1) * self._frequencies_for(reach)  # [T, r / 2]
        cos, sin = angles.cos() * self._magnitude, angles.sin() * self._magnitude
        return Rotation(cos.unsqueeze(1), sin.unsqueeze(1), self._rope.interleaved)

    def _frequencies_for(self, reach: Tensor) -> Tensor:
        """[1 or T, r / 2]."""
        scaling = self._rope.scaling
        if isinstance(scaling, DynamicScaling):
            return _dynamic(self._rope, scaling, self._exponents, reach)
        if isinstance(scaling, LongScaling):
            short, long = self._frequencies
            return torch.where((reach > scaling.trained_positions).unsqueeze(1), long, short)
        return self._frequencies


def _frequencies(rope: Rope, exponents: Tensor) -> tuple[Tensor, float]:
    """Radians per position [1, r / 2], or those for short and for long sequences [2, r / 2]; and what to scale the
    result by."""
    plain = rope.theta**-exponents
    scaling = rope.scaling
    if isinstance(scaling, LinearScaling):
        return (plain / scaling.factor).unsqueeze(0), 1.0
    if isinstance(scaling, ProportionalScaling):
        turns = torch.arange(len(plain), device=plain.device) < scaling.num_pairs
        return (plain / scaling.factor * turns).unsqueeze(0), 1.0
    if isinstance(scaling, Llama3Scaling):
        return _llama3(plain, scaling).unsqueeze(0), 1.0
    if isinstance(scaling, YarnScaling):
        magnitude = scaling.magnitude or 0.1 * math.log(scaling.factor) + 1.0
        return _yarn(rope, scaling, plain).unsqueeze(0), magnitude
    if isinstance(scaling, LongScaling):
        return plain / torch.tensor([scaling.short, scaling.long], device=exponents.device), scaling.magnitude
    return plain.unsqueeze(0), 1.0


def _dynamic(rope: Rope, scaling: DynamicScaling, exponents: Tensor, reach: Tensor) -> Tensor:
    trained = scaling.trained_positions
    excess = scaling.factor * reach.clamp(min=trained) / trained - (scaling.factor - 1)
    base = rope.theta * excess ** (rope.dim / (rope.dim - 2))
    return base.unsqueeze(1) ** -exponents


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.trained_positions * plain / (2 * math.pi)  # within the trained positions
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (kept + (1 - kept) / scaling.factor)


def _yarn(rope: Rope, scaling: YarnScaling, plain: Tensor) -> Tensor:
    def feature_of(turns: float) -> float:
        """The pair of features that turns so often within the trained positions."""
        return rope.dim * math.log(scaling.trained_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = feature_of(scaling.beta_fast), feature_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = (torch.arange(len(plain), device=plain.device) - low) / max(high - low, 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return plain * (kept + (1 - kept) / scaling.factor)
