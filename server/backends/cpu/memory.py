"""Memory for weights in pages of 2 MiB.

A weight that streams from memory once per step touches a new page of 4 KiB every 100 nanoseconds; with large pages the
same reads were up to 1.5 times as fast. Linux gives them to anonymous memory that asks (`madvise`), where transparent
huge pages are not switched off; elsewhere the memory is ordinary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from server.backends.pages import PAGE_BYTES, alone, map_pages

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
