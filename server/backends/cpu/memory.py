"""Memory of the host for weights: in pages of 2 MiB, and given back at once when it is freed.

A weight that streams from memory once per step touches a new page of 4 KiB every 100 nanoseconds; with large pages the
same reads were up to 1.5 times as fast. Linux gives them to anonymous memory that asks (`madvise`), where transparent
huge pages are not switched off; elsewhere the memory is ordinary.

The C library keeps freed memory for later, in pieces of up to 32 MiB. While weights are loaded, the original of every
matrix that is packed or uploaded is freed, and what the library kept of them came to more than half of a model's
weights. It may keep small pieces, such as a layer's scales and zeros, until the end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

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
