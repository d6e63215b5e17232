"""KV blocks that are not on the device: what may take them, how many, and which store has which.

Each layer has the same number of blocks, of which some are in the host's memory and the rest on a disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from server.backends.device import Device, Event, Link
from server.disk.direct import page_aligned
from server.disk.folders import free_bytes
from server.offload.disk_store import DiskStore
from server.offload.share import ALL, Share
from server.offload.stores import HostStore, Memory, Run, StagedStore, Store, Wait, wait_for_all

DISK_HEADROOM = 0.05  # of a disk's free space stays free: others write there too


class KvPlace(Protocol):
    """Something that may take blocks."""

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

    def open(self, device: Device, pool: Memory, blocks: int) -> Store:
        """A store of so many blocks, of all layers. pool: of the device's blocks. Raises ValueError without room."""


@dataclass(frozen=True)
class KvOnDisk:
    """A file. link: of a device with memory of its own; flag: the setting that names the folder."""

    folder: Path
    flag: str
    world_size: int
    link: Link | None
    share: Share = ALL

    @property
    def name(self) -> str:
        """See `KvPlace`."""
        return self.flag

    def room(self) -> int:
        """See `KvPlace`. Raises ValueError for a folder that is none."""
        try:
            return int(free_bytes(self.folder) * (1 - DISK_HEADROOM)) // self.world_size
        except OSError as error:
            raise ValueError(f"{self.flag} {self.folder}: {error.strerror}: name a folder on a disk") from None

    def slot_bytes(self, block_bytes: int) -> int:
        """See `KvPlace`."""
        return page_aligned(block_bytes)

    def open(self, device: Device, pool: Memory, blocks: int) -> Store:
        """See `KvPlace`. The disk's space is taken at once: where it has too little, no request is served first."""
        file = DiskStore(self.folder, self.flag, "KV blocks", pool.block_bytes)
        file.reserve(blocks)
        store = file if self.link is None else StagedStore(file, device, self.link, pool.plane_bytes)
        store.add(blocks)
        return store


@dataclass(frozen=True)
class KvOnHost:
    """The host's pinned memory. free_bytes: what of it this rank may take, when it is asked."""

    link: Link
    share: Share
    free_bytes: Callable[[], int]
    name: str = "the host's memory"

    def room(self) -> int:
        """See `KvPlace`."""
        return self.free_bytes()

    def slot_bytes(self, block_bytes: int) -> int:
        """See `KvPlace`."""
        return block_bytes

    def open(self, device: Device, pool: Memory, blocks: int) -> Store:
        """See `KvPlace`."""
        store = HostStore(self.link, pool.plane_bytes)
        store.add(blocks)
        return store


class KvBlocks:
    """A layer's first blocks in one store, those behind them in the next, and so on; layer behind layer in each.

    pool: the device's blocks, which they come to and go from; stores: each with how many it has of every layer.
    """

    def __init__(self, pool: Memory, stores: Sequence[tuple[int, Store]]):
        self._pool, self._stores = pool, stores

    @property
    def moved_bytes(self) -> int:
        """See `Store`."""
        return sum(store.moved_bytes for _, store in self._stores)

    def load(self, layer: int, runs: Sequence[Run], after: Event | None) -> Wait:
        """See `Store`. runs: in the numbers of a layer's blocks, as those of `save`."""
        waits = [store.load(self._pool, own, after) for store, own in self._divided(layer, runs)]
        return lambda: wait_for_all(waits)

    def save(self, layer: int, runs: Sequence[Run], after: Event | None) -> Wait:
        """See `Store`."""
        waits = [store.save(self._pool, own, after) for store, own in self._divided(layer, runs)]
        return lambda: wait_for_all(waits)

    def close(self) -> None:
        """See `Store`."""
        for _, store in self._stores:
            store.close()

    def _divided(self, layer: int, runs: Sequence[Run]) -> list[tuple[Store, list[Run]]]:
        """The runs of each store that has any, in its own numbers."""
        first, found = 0, []
        for blocks, store in self._stores:
            own = [_within(run, first, first + blocks) for run in runs]
            if any(run.length for run in own):
                start = layer * blocks - first
                found.append((store, [run._replace(block=start + run.block) for run in own if run.length]))
            first += blocks
        return found


def _within(run: Run, first: int, end: int) -> Run:
    """The part of a run whose blocks are first … end - 1."""
    skipped = max(0, first - run.block)
    return Run(run.block + skipped, run.place + skipped, max(0, min(run.length, end - run.block) - skipped))
