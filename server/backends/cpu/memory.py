"""Memory of the host: for weights in pages of 2 MiB, and given back at once when it is freed; and for what steps make.

A weight that streams from memory once per step touches a new page of 4 KiB every 100 nanoseconds; with large pages the
same reads were up to 1.5 times as fast. Linux gives them to anonymous memory that asks (`madvise`), where transparent
huge pages are not switched off; elsewhere the memory is ordinary.

The C library keeps freed memory for later, in pieces of up to 32 MiB. While weights are loaded, the original of every
matrix that is packed or uploaded is freed, and what the library kept of them came to more than half of a model's
weights. It may keep small pieces, such as a layer's scales and zeros, until the end.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch
from torch import Tensor

from server.backends.device import PAGE_BYTES, alone, map_pages

SLAB_BYTES = 32 * PAGE_BYTES  # what is left over of a slab costs nothing but addresses
ALIGNMENT = 64  # of every piece: a line of the cache


class Arena:
    """Hands out pieces of large slabs. A slab is freed when its last piece is."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Zeroed bytes [num_bytes]."""
        rounded = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if rounded >= SLAB_BYTES:
            return alone(map_pages(rounded)[:num_bytes])  # and gone with it, whatever becomes of other pieces
        if rounded > len(self._slab):
            self._slab = map_pages(SLAB_BYTES)
        piece, self._slab = self._slab[:num_bytes], self._slab[rounded:]
        return alone(piece)


class Pool:
    """Memory for tensors, of graphs say: first fit; given back when the last view of one is gone, on any thread."""

    def __init__(self) -> None:
        self._slabs: list[Tensor] = []
        self._free: list[tuple[int, int]] = []  # addresses and lengths, in order
        self._returned: deque[tuple[int, int]] = deque()  # what is not among these yet
        self._lock = Lock()

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A contiguous tensor, not initialised."""
        num_bytes = shape.numel() * dtype.itemsize
        if not num_bytes:
            return torch.empty(shape, dtype=dtype)
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        address = self._take(size)
        piece = (ctypes.c_char * num_bytes).from_address(address)
        weakref.finalize(piece, self._give_back, address, size).atexit = False
        return torch.frombuffer(piece, dtype=dtype).view(shape)

    def has(self, tensor: Tensor) -> bool:
        """Whether its memory is the pool's."""
        return any(0 <= tensor.data_ptr() - slab.data_ptr() < len(slab) for slab in self._slabs)

    def _take(self, size: int) -> int:
        with self._lock:
            self._join_returned()
            index = next((i for i, (_, length) in enumerate(self._free) if length >= size), None)
            if index is None:
                self._slabs.append(map_pages(max(size, SLAB_BYTES)))
                self._join(self._slabs[-1].data_ptr(), len(self._slabs[-1]))
                index = next(i for i, (_, length) in enumerate(self._free) if length >= size)
            address, length = self._free[index]
            self._free[index : index + 1] = [(address + size, length - size)] if length > size else []
            return address

    def _give_back(self, address: int, size: int) -> None:
        """Wherever the last view is dropped, be it within `_take`."""
        self._returned.append((address, size))
        if self._lock.acquire(blocking=False):
            self._join_returned()
            self._lock.release()

    def _join_returned(self) -> None:
        while self._returned:
            self._join(*self._returned.popleft())

    def _join(self, address: int, size: int) -> None:
        joined: list[tuple[int, int]] = []
        for piece in sorted([*self._free, (address, size)]):
            if joined and sum(joined[-1]) == piece[0]:
                joined[-1] = joined[-1][0], joined[-1][1] + piece[1]
            else:
                joined.append(piece)
        self._free = joined


TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of mallopt(3)
SMALL_BYTES = 4 << 20  # what is larger comes from the system and returns to it, page by page
USUAL_BYTES = 32 << 20  # where glibc's own threshold ends up in a program that frees large pieces


@contextmanager
def freed_at_once() -> Iterator[None]:
    """While it lasts, freed memory returns to the system; afterwards it is kept, and steps do not pay for new pages.

    With a C library other than glibc nothing happens: they keep less.
    """
    library = ctypes.CDLL(None)
    mallopt = getattr(library, "mallopt", None)
    if mallopt is None or not hasattr(library, "malloc_trim"):
        yield
        return
    mallopt(MMAP_THRESHOLD, SMALL_BYTES)
    try:
        yield
    finally:
        mallopt(MMAP_THRESHOLD, USUAL_BYTES)
        mallopt(TRIM_THRESHOLD, 2 * USUAL_BYTES)
        library.malloc_trim(0)
