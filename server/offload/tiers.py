"""Kinds of places for KV blocks that are not on the device: what each may take, its room, and how it is opened."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from server.backends.device import Device, Link
from server.offload.block_stores import BlockStore, DiskBlocks, HostBlocks, StagedBlocks
from server.offload.disk import page_aligned
from server.offload.policy import Share

ALL = Share(fraction=1.0)
DISK_HEADROOM = 0.05  # of a disk's free space stays free: others write there too


class BlockTier(Protocol):
    """One such place."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def share(self) -> Share:
        """How many of all blocks it takes at most."""

    def room(self) -> int:
        """Bytes that this rank may take of it."""

    def slot_bytes(self, block_bytes: int) -> int:
        """Bytes that a layer's part of a block takes, which holds block_bytes."""

    def open(self, device: Device, pool: Sequence[Tensor], layers: int, blocks: int) -> BlockStore:
        """A store of so many blocks for each layer. pool: planes of the device's pool of blocks,
        [N, bytes] uint8 each.

        Raises ValueError where there is no room for them.
        """


@dataclass(frozen=True)
class DiskTier:
    """A file. link: of a device with memory of its own; flag: the setting that names the folder."""

    folder: Path
    flag: str
    world_size: int
    link: Link | None
    share: Share = ALL

    @property
    def name(self) -> str:
        """See `BlockTier`."""
        return self.flag

    def room(self) -> int:
        """See `BlockTier`. Raises ValueError for a folder that is none."""
        try:
            found = os.statvfs(self.folder)
        except OSError as error:
            raise ValueError(f"{self.flag} {self.folder}: {error.strerror}: name a folder on a disk") from None
        return int(found.f_bavail * found.f_frsize * (1 - DISK_HEADROOM)) // self.world_size

    def slot_bytes(self, block_bytes: int) -> int:
        """See `BlockTier`."""
        return page_aligned(block_bytes)

    def open(self, device: Device, pool: Sequence[Tensor], layers: int, blocks: int) -> BlockStore:
        """See `BlockTier`."""
        if self.link is None:
            return DiskBlocks(self.folder, self.flag, pool, layers, blocks)
        return StagedBlocks(self.folder, self.flag, device, self.link, pool, layers, blocks)


@dataclass(frozen=True)
class HostTier:
    """The host's pinned memory. free_bytes: what of it this rank may take, when it is asked."""

    link: Link
    share: Share
    free_bytes: Callable[[], int]
    name: str = "the host's memory"

    def room(self) -> int:
        """See `BlockTier`."""
        return self.free_bytes()

    def slot_bytes(self, block_bytes: int) -> int:
        """See `BlockTier`."""
        return block_bytes

    def open(self, device: Device, pool: Sequence[Tensor], layers: int, blocks: int) -> BlockStore:
        """See `BlockTier`."""
        return HostBlocks(device, self.link, pool, layers, blocks)
