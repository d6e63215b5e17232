"""KV blocks: which are free and who may have them.

Plain Python over block ids. The allocator knows nothing of tensors, sequences or tokens' contents; the tensors on the
shards know nothing of the allocator. Admission (`queue.py`) counts before it asks, so running out here is a bug of ours
and not something a user can cause.
"""

from __future__ import annotations

from collections.abc import Iterable


class BlockAllocator:
    """Hands out ids 0 … num_blocks-1. The most recently freed go out first: their memory is the warmest."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_used = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks. Raises RuntimeError when fewer are free, and then takes none."""
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks asked for, {len(self._free)} free: admission miscounted")
        start = len(self._free) - count
        blocks = self._free[start:]
        del self._free[start:]
        for block in blocks:
            self._is_used[block] = True
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back. Raises RuntimeError for a block that is not out."""
        for block in blocks:
            if not self._is_used[block]:  # checked under `python -O` too: a block with two owners would leak text
                raise RuntimeError(f"block {block} freed twice")
            self._is_used[block] = False
            self._free.append(block)
