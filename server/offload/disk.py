"""Files without a name that are read past the page cache, and images of weights in one.

The file is written while a model is loaded and gone when its process is, however that ends. Reads go straight from the
disk to where the weights are wanted (O_DIRECT), a few large ones at a time: through the page cache, weights that are
larger than memory would evict each other, and each byte would be copied once more. Where a file system knows no direct
reads, what has been read is at least forgotten at once.

Left out: finding the file again at the next start. Whoever reads a checkpoint and packs it takes longer than
writing it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from torch import Tensor

from server.folders import open_unnamed

PAGE = mmap.PAGESIZE  # what direct reads and writes are multiples of, and aligned to
READ_BYTES = 8 << 20  # of one request to the disk
READS = 4  # requests under way: a disk of today wants more than one


class DiskError(RuntimeError):
    """The disk does not hold what it must, or no longer: one sentence for people."""


def page_aligned(num_bytes: int) -> int:
    """The least multiple of a page that holds so many bytes."""
    return -(-num_bytes // PAGE) * PAGE


class UnnamedFile:
    """A file that no other process can open, and what moves bytes between it and memory.

    folder: on a disk; flag: the setting that names it; holds: what the file is for, for sentences. Raises ValueError
    for a folder that cannot have such a file. Several threads may move bytes at once.
    """

    def __init__(self, folder: Path, flag: str, holds: str):
        self.name, self._holds = f"{flag} {folder}", holds
        self.descriptor, self.is_direct = open_unnamed(folder, flag)
        self._counting = threading.Lock()
        self.moved_bytes = 0  # so far: while it grows, a disk is slow and not stuck

    def read(self, pieces: Sequence[memoryview], place: int) -> None:
        """Fill the pieces, one behind the other, from a place in the file on. Raises DiskError."""
        self._transfer(os.preadv, pieces, place, "read back")

    def write(self, pieces: Sequence[memoryview], place: int) -> None:
        """Write the pieces, one behind the other, from a place in the file on. Raises DiskError."""
        self._transfer(os.pwritev, pieces, place, "written")

    def close(self) -> None:
        """Give the disk's space back. Nothing is being moved. Twice is as once: the number is another's."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _transfer(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        pieces: Sequence[memoryview],
        place: int,
        done: str,
    ) -> None:
        while pieces:
            try:
                count = call(self.descriptor, pieces, place)
            except OSError as error:
                raise DiskError(f"{self.name}: {self._holds} cannot be {done} ({error.strerror})") from None
            if not count:
                raise DiskError(f"{self.name}: the file of {self._holds} ends at byte {place}")
            if not self.is_direct:
                os.posix_fadvise(self.descriptor, place, count, os.POSIX_FADV_DONTNEED)
            with self._counting:
                self.moved_bytes += count
            place += count
            pieces = _behind(pieces, count)


class ImageFile:
    """Images one behind the other. Raises ValueError for a folder that cannot have such a file."""

    def __init__(self, folder: Path, flag: str):
        self._file = UnnamedFile(folder, flag, "weights")
        self._written = 0
        self._end = 0
        self._pool = ThreadPoolExecutor(READS, thread_name_prefix="offload")

    @property
    def is_direct(self) -> bool:
        """Whether what is read passes the page cache by."""
        return self._file.is_direct

    @property
    def read_bytes(self) -> int:
        """What has been read so far."""
        return self._file.moved_bytes - self._written

    def append(self, memory: Tensor, num_bytes: int) -> int:
        """Write the first bytes of page-aligned memory [N] uint8, up to a whole page. Returns where the image begins.

        Raises DiskError when the disk is full.
        """
        place, size = self._end, page_aligned(num_bytes)
        try:
            for start in range(0, size, READ_BYTES):
                self._file.write([_bytes_of(memory, start, min(READ_BYTES, size - start))], place + start)
        except DiskError as error:
            raise DiskError(
                f"{error} behind the first {place / 1e9:.2f} GB: free space there, or leave more on the device with "
                "--weights-on-device"
            ) from None
        self._written += size
        self._end += size
        return place

    def read(self, place: int, memory: Tensor, num_bytes: int) -> Callable[[], float]:
        """Begin to read an image to page-aligned memory [N] uint8.

        Returns what waits, which says when the last byte had come, by `time.perf_counter`, or raises DiskError.
        """
        size = page_aligned(num_bytes)
        parts: list[Future[float]] = [
            self._pool.submit(self._read, place + start, _bytes_of(memory, start, min(READ_BYTES, size - start)))
            for start in range(0, size, READ_BYTES)
        ]

        def finish() -> float:
            wait(parts)
            return max(part.result() for part in parts)

        return finish

    def _read(self, place: int, view: memoryview) -> float:
        """Fill the view. Returns when that was done."""
        self._file.read([view], place)
        return time.perf_counter()

    def close(self) -> None:
        """Give the disk's space back, after what is being read."""
        self._pool.shutdown()
        self._file.close()


def _behind(pieces: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of the pieces after their first `count` bytes."""
    for index, piece in enumerate(pieces):
        if count < len(piece):
            return [piece[count:], *pieces[index + 1 :]]
        count -= len(piece)
    return []


def _bytes_of(memory: Tensor, start: int, size: int) -> memoryview:
    """A part of a tensor [N] uint8 as bytes that a system call writes to."""
    assert start + size <= memory.numel() and memory.data_ptr() % PAGE == 0, "slots are whole pages"
    return memoryview((ctypes.c_char * size).from_address(memory.data_ptr() + start)).cast("B")
