"""Where KV blocks are kept, as an engine sees it: all of them on the device, unless a model was loaded otherwise.

Left out: keeping some elsewhere (`server/model/offloaded_kv.py`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from server.backends.protocol import Attention, Backend
from server.stepping import cache
from server.stepping.batch import Forward
from server.stepping.cache import KVShape


class KvPlacement(Protocol):
    """Keeps the KV blocks of one model on one rank."""

    where: str  # what holds the blocks, for sentences

    @property
    def device_bytes(self) -> int:
        """Memory of the device that the blocks take which were allocated, and what it takes to move the others."""

    @property
    def offloaded(self) -> str:
        """Which blocks are not on the device, for people; empty: all are there."""

    @property
    def moved_bytes(self) -> int:
        """What has been read from a disk and written to it since the blocks were allocated."""

    def room(self, shape: KVShape, free_bytes: int, longest: int) -> int:
        """Bytes of blocks that may be allocated. free_bytes: of the device; longest: blocks of the longest sequence."""

    def allocate(self, shape: KVShape, blocks: int, longest: int, backend: Backend) -> list[Tensor]:
        """What each layer writes to and reads from, [2, …, K, P, W]; what was there before is gone by then.

        Raises ValueError where they have no room after all.
        """

    def release(self) -> None:
        """Give back the blocks."""

    def attention(self, attention: Attention) -> Attention:
        """Attention that finds the blocks wherever they are."""

    def step(self, forward: Forward) -> AbstractContextManager[None]:
        """For the time of one pass of the model. Entering or leaving it raises DiskError for blocks that are lost."""


class KvOnDevice:
    """See `KvPlacement`."""

    where = "free memory"
    offloaded = ""
    moved_bytes = 0

    def __init__(self) -> None:
        self.device_bytes = 0

    def room(self, shape: KVShape, free_bytes: int, longest: int) -> int:
        """See `KvPlacement`."""
        return free_bytes

    def allocate(self, shape: KVShape, blocks: int, longest: int, backend: Backend) -> list[Tensor]:
        """See `KvPlacement`."""
        self.device_bytes = blocks * shape.bytes_per_block
        return cache.allocate(shape, blocks, backend.device)

    def release(self) -> None:
        """See `KvPlacement`."""
        self.device_bytes = 0

    def attention(self, attention: Attention) -> Attention:
        """See `KvPlacement`."""
        return attention

    def step(self, forward: Forward) -> AbstractContextManager[None]:
        """See `KvPlacement`."""
        return nullcontext()
