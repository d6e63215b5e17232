"""Recurrent layers, as data: in attention's place or beside it, with a state of a fixed size for each sequence.

What the model, its memory and its cost need to know of a kind is one protocol, `Recurrence`; who computes it is found
by its type, in `server/model/recurrent.py`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

Sizes = tuple[int, int]  # outputs and inputs of a linear layer


class Recurrence(Protocol):
    """One kind of recurrent layer, of the whole model or of a rank."""

    @property
    def state_size(self) -> int:
        """Numbers of float32 that a sequence's state has, however long it is."""

    @property
    def inner(self) -> int:
        """Numbers of a token that its last matrix is given."""

    @property
    def step_width(self) -> int:
        """Numbers of a token that its first matrices give."""

    @property
    def divided(self) -> Mapping[str, int]:
        """What ranks divide among them, and how many there are, by what they are called."""

    def part(self, world_size: int) -> Recurrence:
        """What one of so many ranks has of it."""

    def linears(self, hidden: int, roles: Container[str] = ()) -> Mapping[str, Sizes]:
        """Its linear layers by their roles (`names.py`). hidden: width of the model; roles: that a family has."""

    def parameters_beside(self, hidden: int) -> int:
        """Parameters that are in none of these."""


@dataclass(frozen=True)
class GatedDelta:
    """A recurrent layer in attention's place: the gated delta rule (Yang et al. 2024, arXiv 2412.06464).

    Each head has a memory of key_dim x value_dim numbers in float32. A token fades it, corrects what it holds under the
    token's key, and reads it by the query. Before that, queries, keys and values pass a causal convolution over few
    tokens; behind it, what was read is normalised and gated.
    """

    num_heads: int  # of values, each with a memory
    num_key_heads: int  # of queries and keys, each shared by as many neighbouring heads
    key_dim: int
    value_dim: int
    conv: int  # tokens that the convolution sees, itself included

    @property
    def channels(self) -> int:
        """Numbers of a token that pass the convolution: [queries | keys | values]."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def inner(self) -> int:
        """Numbers that all heads read for a token."""
        return self.num_heads * self.value_dim

    @property
    def memory_size(self) -> int:
        """Numbers of all heads' memories: [heads, key_dim, value_dim]."""
        return self.num_heads * self.key_dim * self.value_dim

    @property
    def state_size(self) -> int:
        """Numbers that a sequence's state has, however long it is: its memories, then the tokens of the convolution."""
        return self.memory_size + (self.conv - 1) * self.channels

    @property
    def step_width(self) -> int:
        """See `Recurrence`."""
        return self.channels + self.inner

    @property
    def divided(self) -> Mapping[str, int]:
        """See `Recurrence`."""
        return {"key heads of recurrent layers": self.num_key_heads}

    def part(self, world_size: int) -> GatedDelta:
        """See `Recurrence`."""
        return replace(self, num_heads=self.num_heads // world_size, num_key_heads=self.num_key_heads // world_size)

    def linears(self, hidden: int, roles: Container[str] = ()) -> Mapping[str, Sizes]:
        """See `Recurrence`."""
        split = {"delta_qkv": (self.channels, hidden), "delta_z": (self.inner, hidden)}
        first = {"delta_qkvz": (self.channels + self.inner, hidden)} if "delta_qkvz" in roles else split
        return {**first, "delta_out": (hidden, self.inner)}

    def parameters_beside(self, hidden: int) -> int:
        """See `Recurrence`."""
        return self.channels * self.conv + 2 * self.num_heads * (hidden + 1) + self.value_dim


@dataclass(frozen=True)
class ShortConv:
    """A gated convolution over few tokens in attention's place (LFM2, Liquid AI 2025, arXiv 2511.23404).

    Of each channel a token has three numbers [b, c, x]: b x is convolved with that of the tokens before, and c
    multiplies what comes out. The state is the last tokens' b x.
    """

    channels: int
    conv: int  # tokens that the convolution sees, itself included
    bias: bool = False  # whether the convolution and both matrices have one

    @property
    def inner(self) -> int:
        """See `Recurrence`."""
        return self.channels

    @property
    def state_size(self) -> int:
        """See `Recurrence`."""
        return (self.conv - 1) * self.channels

    @property
    def step_width(self) -> int:
        """See `Recurrence`."""
        return 3 * self.channels

    @property
    def divided(self) -> Mapping[str, int]:
        """See `Recurrence`."""
        return {"channels of short convolutions": self.channels}

    def part(self, world_size: int) -> ShortConv:
        """See `Recurrence`."""
        return replace(self, channels=self.channels // world_size)

    def linears(self, hidden: int, roles: Container[str] = ()) -> Mapping[str, Sizes]:
        """See `Recurrence`."""
        return {"conv_in": (3 * self.channels, hidden), "conv_out": (hidden, self.channels)}

    def parameters_beside(self, hidden: int) -> int:
        """See `Recurrence`."""
        return self.channels * self.conv + self.bias * (4 * self.channels + hidden)


class GateNorm(Enum):
    """How what a head has read, y, meets its gate z, with g the function of gates.

    NONE:    y g(z)
    BEHIND:  norm(y g(z))
    BEFORE:  norm(y) g(z)
    """

    NONE = "none"
    BEHIND = "behind"
    BEFORE = "before"


@dataclass(frozen=True)
class Mamba2:
    """Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): heads with memories of head_dim x key_dim numbers in float32.

    One matrix gives a token's gates z, values x, keys B and queries C, and for each head the step by which its memory
    fades and takes in the token. x, B and C pass a causal convolution over few tokens. A memory is read by C, and x is
    added in a head's own measure; gate and norm are behind. The norm is of all channels of a group.
    """

    num_heads: int
    num_groups: int  # of keys and queries, each shared by as many neighbouring heads
    head_dim: int
    key_dim: int
    conv: int  # tokens that the convolution sees, itself included
    eps: float  # of its norm
    norm: GateNorm = GateNorm.BEHIND
    conv_bias: bool = True
    bias: bool = False  # whether both matrices have one
    least_step: float = 0.0
    most_step: float = math.inf
    scales: tuple[float, float, float, float, float] = (1.0,) * 5  # what z, x, B, C and steps are multiplied by first
    out_scale: float = 1.0  # what all that it gives is multiplied by

    @property
    def inner(self) -> int:
        """Numbers that all heads read for a token."""
        return self.num_heads * self.head_dim

    @property
    def keys(self) -> int:
        """Numbers of a token's keys, of all groups."""
        return self.num_groups * self.key_dim

    @property
    def channels(self) -> int:
        """Numbers of a token that pass the convolution: [x | B | C]."""
        return self.inner + 2 * self.keys

    @property
    def memory_size(self) -> int:
        """Numbers of all heads' memories: [heads, head_dim, key_dim]."""
        return self.inner * self.key_dim

    @property
    def state_size(self) -> int:
        """See `Recurrence`: memories, then the tokens of the convolution."""
        return self.memory_size + (self.conv - 1) * self.channels

    @property
    def step_width(self) -> int:
        """See `Recurrence`: [z | x | B | C | steps]."""
        return self.inner + self.channels + self.num_heads

    @property
    def divided(self) -> Mapping[str, int]:
        """See `Recurrence`. A power of two of groups goes with any number of ranks, which may share one."""
        shared = not self.num_groups & (self.num_groups - 1)
        return {"heads of Mamba layers": self.num_heads, **({} if shared else {"Mamba groups": self.num_groups})}

    def part(self, world_size: int) -> Mamba2:
        """See `Recurrence`. Where there are fewer groups than ranks, several have the same one."""
        groups = max(1, self.num_groups // world_size)
        return replace(self, num_heads=self.num_heads // world_size, num_groups=groups)

    def linears(self, hidden: int, roles: Container[str] = ()) -> Mapping[str, Sizes]:
        """See `Recurrence`."""
        return {"mamba_in": (self.step_width, hidden), "mamba_out": (hidden, self.inner)}

    def parameters_beside(self, hidden: int) -> int:
        """See `Recurrence`."""
        norm = self.inner * (self.norm is not GateNorm.NONE)
        biases = self.conv_bias * self.channels + self.bias * (self.step_width + hidden)
        return self.channels * self.conv + 3 * self.num_heads + norm + biases
