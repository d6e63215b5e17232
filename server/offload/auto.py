"""`--weights-on-device auto`: how much of the layers stays, found when the first layer is there.

Its size is then known to the byte, in whatever format it is stored, and that of the others by what their matrices are
to its own; so is the memory that is still free, limits of control groups included. The cost model tries every number of
layers that could stay beside the KV cache that the limits want, and what decodes most tokens a second is chosen
(`cost.py`). All ranks measure, and all choose by the least of what any of them found: the ranks must agree on whether
anything streams, because steps that do are not captured. Left out: that a step which decodes has no use for the layers
of an encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from server.backends.device import Device
from server.offload.cost import Choice, Rates, Room, Sizes, choose
from server.offload.share import ALL, Share

PICO = 10**12  # seconds are exchanged as whole numbers of its square


class Ranks(Protocol):
    """What the ranks exchange: `server.ranks.distributed.Shard`."""

    @property
    def world_size(self) -> int:
        """How many there are."""

    def minimum(self, value: int, device: torch.device) -> int:
        """The smallest `value` of all ranks."""


@dataclass(frozen=True)
class Wanted:
    """What the limits want of one rank. kv_tokens: a size that the KV cache must have; 0: none."""

    longest: int
    sequences: int
    kv_tokens: int
    kv_bytes_per_token: int
    head_bytes: int
    later_bytes: int  # of weights beside the layers that are loaded after them
    step_bytes: int  # what the largest step takes
    layer_sizes: Sequence[int] = ()  # of all layers beside one another, in the order of loading; none: they are alike
    expert_sizes: Mapping[float, int] = field(default_factory=dict)  # likewise of experts; see `cost.Sizes`
    windows: Mapping[int, float] = field(default_factory=lambda: {0: 1.0})  # see there


@dataclass
class Auto:
    """See `streamed.Chooser`. rates: measures, for layers of so many bytes; why_not: nothing can stream, or None."""

    device: Device
    ranks: Ranks
    wanted: Wanted
    rates: Callable[[int], Rates]
    why_not: str | None = None
    fraction: float = 1.0  # share of a GPU's memory that we may use
    chosen: Choice | None = None
    measured: Rates | None = None
    fitting: str = ""  # why all weights stay, for people, where they do

    def choose(self, layer_bytes: int, total_layers: int) -> Share:
        """See `streamed.Chooser`. Raises ValueError where too little memory is free, or where nothing can stream."""
        wanted = self.wanted
        free = self.device.free_bytes(fraction=self.fraction, world_size=self.ranks.world_size)
        memory = self._least(free + layer_bytes - wanted.later_bytes - wanted.step_bytes)
        unit = self._most(layer_bytes) / (wanted.layer_sizes or (1,))[0]
        layers, largest = unit * sum(wanted.layer_sizes or [1] * total_layers), unit * max(wanted.layer_sizes or (1,))
        experts = {share: unit * size for share, size in wanted.expert_sizes.items()}
        kv_bytes_per_token = max(wanted.kv_bytes_per_token, 1)
        sizes = Sizes(
            layers, total_layers, wanted.head_bytes, kv_bytes_per_token, largest, experts, windows=wanted.windows
        )
        room = Room(memory, wanted.longest, wanted.sequences, wanted.kv_tokens)
        if memory >= layers + room.useful_tokens * sizes.kv_per_token:
            self.fitting = f"{layers / 1e9:.2f} GB of layers fit beside a KV cache of {room.useful_tokens} tokens"
            return ALL  # and there is nothing to be measured
        self.measured = self._agreed(self.rates(layer_bytes) if self.why_not is None else NO_LINK)
        self.chosen = choose(sizes, self.measured, room)
        if self.chosen is None:
            tokens = max(room.longest, room.kv_tokens)
            raise ValueError(
                f"--weights-on-device auto finds {memory / 1e9:.2f} GB for layers, slots and KV cache, and a KV cache "
                f"of {tokens} tokens with two layers takes {(tokens * sizes.kv_per_token + sizes.slots) / 1e9:.2f} GB: "
                "lower --max-batch-total-tokens or --max-total-tokens, or use more shards"
            )
        if not self.chosen.streams:
            self.fitting = (
                f"{layers / 1e9:.2f} GB of layers fit beside a KV cache of {self.chosen.kv_tokens} tokens, and decode "
                "more there than a larger one would"
            )
            return ALL
        if self.why_not is not None:
            raise ValueError(self.why_not)
        return Share(num_bytes=int(self.chosen.resident * (1 + 1e-9)))

    @property
    def description(self) -> str:
        """What was chosen, why, and what it should do, for people."""
        if self.chosen is None or self.measured is None or not self.chosen.streams:
            return self.fitting
        chosen = self.chosen
        return (
            f"chosen for {chosen.sequences} sequences of {self.wanted.longest} tokens in a KV cache of "
            f"{chosen.kv_tokens}, which should decode {chosen.tokens_per_second:.3g} tokens/s at "
            f"{self.measured.link / 1e9:.2f} GB/s"
        )

    def _agreed(self, rates: Rates) -> Rates:
        """The slowest of all ranks in each figure."""
        products, head = (
            [(tokens, self._most(int(seconds * PICO**2)) / PICO**2) for tokens, seconds in points]
            for points in (rates.products, rates.head)
        )
        return Rates(float(self._least(int(rates.link))), products, head)

    def _least(self, value: int) -> int:
        return self.ranks.minimum(value, self.device.torch_device)

    def _most(self, value: int) -> int:
        return -self._least(-value)


# What cannot stream is as slow as anything can be; then all weights stay, or there is a sentence.
NO_LINK = Rates(1.0, [(1, 1e-12)])
