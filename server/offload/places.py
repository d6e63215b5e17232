"""Places for what is not on the device: how much each may take, and how a store of blocks is opened there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from host.direct_io import page_aligned
from host.folders import free_bytes
from server.backends.device import Device, Link
from server.offload.disk_store import DiskStore
from server.offload.share import ALL, Share
from server.offload.stores import HostStore, StagedStore, Store

DISK_HEADROOM = 0.05  # of a disk's free space stays free: others write there too


class Place(Protocol):
    """Something that may take blocks."""

    @property
    def name(self) -> str:
        """The name in messages."""

    @property
    def share(self) -> Share:
        """How much of the whole it takes at most."""

    def room(self) -> int:
        """Bytes that this rank may take of it."""

    def slot_bytes(self, block_bytes: int) -> int:
        """Bytes that a block takes, which holds block_bytes."""

    def open(self, device: Device, plane_bytes: Sequence[int], holds: str, reserved: int = 0) -> Store:
        """A store. plane_bytes: of a block, see `Memory`; holds: what blocks are of; reserved: of them, added at once.

        Raises ValueError where those have no room.
        """


@dataclass(frozen=True)
class OnDisk:
    """A `Place`: a file. link: of a device with memory of its own; flag: the setting that names the folder."""

    folder: Path
    flag: str
    world_size: int
    link: Link | None
    share: Share = ALL

    @property
    def name(self) -> str:
        return self.flag

    def room(self) -> int:
        """See `Place`. Raises ValueError for a folder that is none."""
        try:
            return int(free_bytes(self.folder) * (1 - DISK_HEADROOM)) // self.world_size
        except OSError as error:
            raise ValueError(f"{self.flag} {self.folder}: {error.strerror}: name a folder on a disk") from None

    def slot_bytes(self, block_bytes: int) -> int:
        return page_aligned(block_bytes)

    def open(self, device: Device, plane_bytes: Sequence[int], holds: str, reserved: int = 0) -> Store:
        """See `Place`. The disk's space is taken at once: where it has too little, no request is served first."""
        file = DiskStore(self.folder, self.flag, holds, sum(plane_bytes))
        if reserved:
            file.reserve(reserved)
        return file if self.link is None else StagedStore(file, device, self.link, plane_bytes)


@dataclass(frozen=True)
class OnHost:
    """A `Place`: the host's pinned memory. free_bytes: what of it this rank may take, when it is asked."""

    link: Link
    share: Share
    free_bytes: Callable[[], int]
    name: str = "the host's memory"

    def room(self) -> int:
        return self.free_bytes()

    def slot_bytes(self, block_bytes: int) -> int:
        return block_bytes

    def open(self, device: Device, plane_bytes: Sequence[int], holds: str, reserved: int = 0) -> Store:
        store = HostStore(self.link, plane_bytes)
        if reserved:
            store.add(reserved)
        return store
