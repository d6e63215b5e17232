"""Where images wait that are not on the device: on a disk, in the host's memory, or on a disk behind that.

On a CPU, the disk's images are read to where they are computed with. A GPU reads the host's pinned memory by itself,
beside what it computes; what comes from a disk passes through a few pieces of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from torch import Tensor

from server.backends.device import Device, Event, Link
from server.offload.disk import ImageFile

STAGE_BYTES = 16 << 20  # of one piece of pinned memory between a disk and a GPU
STAGES = 4


class DiskStore:
    """Images in a file, for a device whose memory is the host's."""

    def __init__(self, file: ImageFile):
        self._file = file

    @property
    def read_bytes(self) -> int:
        """See `ring.Store`."""
        return self._file.read_bytes

    @property
    def is_direct(self) -> bool:
        """See `ring.Store`."""
        return self._file.is_direct

    def keep(self, slot: Tensor, num_bytes: int) -> int:
        """Take an image from a slot. Returns its place. Raises DiskError where there is no room."""
        return self._file.append(slot, num_bytes)

    def fill(self, slot: Tensor, place: int, num_bytes: int) -> Callable[[], float]:
        """See `ring.Store`."""
        return self._file.read(place, slot, num_bytes)

    def close(self) -> None:
        """See `ring.Store`."""
        self._file.close()


class HostStore:
    """Images in the host's memory, for a device with memory of its own."""

    def __init__(self, device: Device, link: Link):
        self._device, self._link = device, link
        self._images: list[Tensor] = []

    @property
    def read_bytes(self) -> int:
        """See `ring.Store`."""
        return 0

    @property
    def is_direct(self) -> bool:
        """See `ring.Store`."""
        return True

    def keep(self, slot: Tensor, num_bytes: int) -> int:
        """Take an image from a slot. Returns its number."""
        image = self._link.pinned(num_bytes)[:num_bytes]
        image.copy_(slot[:num_bytes])
        self._images.append(image)
        return len(self._images) - 1

    def fill(self, slot: Tensor, number: int, num_bytes: int) -> Callable[[], None]:
        """See `ring.Store`."""
        end = self._link.copy(self._images[number], slot[:num_bytes], self._device.event())
        return partial(self._link.order, end)

    def close(self) -> None:
        """See `ring.Store`."""
        self._images.clear()


class StagedStore:
    """Images in a file, for a device with memory of its own."""

    def __init__(self, file: ImageFile, device: Device, link: Link):
        self._file, self._device, self._link = file, device, link
        self._stages = [link.pinned(STAGE_BYTES) for _ in range(STAGES)]
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="stage")

    @property
    def read_bytes(self) -> int:
        """See `ring.Store`."""
        return self._file.read_bytes

    @property
    def is_direct(self) -> bool:
        """See `ring.Store`."""
        return self._file.is_direct

    def keep(self, slot: Tensor, num_bytes: int) -> int:
        """Take an image from a slot. Returns its place. Raises DiskError where there is no room."""
        places = []
        for start in range(0, num_bytes, STAGE_BYTES):
            size = min(STAGE_BYTES, num_bytes - start)
            self._stages[0][:size].copy_(slot[start : start + size])
            places.append(self._file.append(self._stages[0], size))
        return places[0]

    def fill(self, slot: Tensor, place: int, num_bytes: int) -> Callable[[], None]:
        """See `ring.Store`."""
        copied = self._worker.submit(self._pass_on, slot, place, num_bytes, self._device.event())

        def finish() -> None:
            self._link.order(copied.result())

        return finish

    def close(self) -> None:
        """See `ring.Store`."""
        self._worker.shutdown()
        self._file.close()

    def _pass_on(self, slot: Tensor, place: int, num_bytes: int, after: Event | None) -> Event:
        """Read pieces and copy each, some being read meanwhile. Returns the end of the last copy, which is reached."""
        self._device.activate()
        reads: deque[tuple[Tensor, Tensor, Callable[[], float]]] = deque()
        for number, start in enumerate(range(0, num_bytes, STAGE_BYTES)):
            if len(reads) == STAGES:
                self._copy(reads, after).synchronize()  # its stage is free again
            size = min(STAGE_BYTES, num_bytes - start)
            stage = self._stages[number % STAGES]
            reads.append((stage[:size], slot[start : start + size], self._file.read(place + start, stage, size)))
        while reads:
            end = self._copy(reads, after)
        end.synchronize()
        return end

    def _copy(self, reads: deque[tuple[Tensor, Tensor, Callable[[], float]]], after: Event | None) -> Event:
        """Pass the oldest piece on, once it has been read."""
        stage, target, finish = reads.popleft()
        finish()
        return self._link.copy(stage, target, after)
