"""Copies of KV blocks in the host's memory, to and from a device's cache.

A slot holds one block: the keys and values of its tokens in all layers, in the very bytes in which the cache stores
them, one part behind the other. Where in a layer's cache a block's bytes lie the backend says (`Backend.block_parts`):
its kernels may keep an order of their own. Here is the copying alone. Which block goes where the router decides, and
the disk behind the host is `server/prefix/`.

Shapes: B blocks, E elements of a block in all parts, of which part i has E_i.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import Tensor


class HostCopies(ABC):
    """Slots 0 … num_slots - 1 on the host, and the cache whose blocks they hold copies of.

    parts: [B, E_i] each, views of the cache in one dtype; memory: bytes on the host, enough for all slots.
    """

    def __init__(self, parts: Sequence[Tensor], memory: Tensor, num_slots: int):
        ends = accumulate((part.shape[1] for part in parts), initial=0)
        self.parts = [(part, slice(*columns)) for part, columns in zip(parts, pairwise(ends), strict=True)]
        self.num_slots = num_slots
        self.slots = memory.view(parts[0].dtype).view(num_slots, -1)  # [num_slots, E]
        self.slot_bytes = self.slots[0].nbytes

    @property
    def address(self) -> int:
        """Where slot 0 begins in this process's memory; slot n is `n * slot_bytes` behind it."""
        return self.slots.data_ptr()

    @abstractmethod
    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy the content of each block to a slot, behind all that the device has been told to do."""

    @abstractmethod
    def restore(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy the content of each slot to a block, before all that the device will be told to do."""

    @abstractmethod
    def close(self) -> None:
        """Let the device forget the host's memory, where it knows of it. Nothing is copied afterwards."""


def bytes_of_slots(parts: Sequence[Tensor], num_slots: int) -> int:
    """Memory that so many slots take."""
    return num_slots * sum(part[0].nbytes for part in parts)
