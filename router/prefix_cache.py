"""The beginnings of sequences that need not be computed: on the device, and behind it on the host and on disk.

Joins the pool of the device's blocks (`blocks.py`) and the tiers behind it (`tiers/index.py`), of which neither knows
the other: what the host holds comes to blocks that were just allocated, in the step that admits the request, and is
then found on the device like what was computed there; what the device forgets is saved before it is overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.blocks import BlockPool
from router.entry import Scheduled
from router.plan import FilledBlock
from router.tiers.index import TierIndex
from router.tiers.moving import Restored, Saved

SAVED_BESIDE = 8  # blocks that a step saves beside as many as it computes: a copy takes a hundredth of computing one
SAVED_AT_ONCE = 16  # blocks that are waited for while there is other work: a copy of a few costs what one does
SAVED_IDLE = 64  # blocks that a step saves which does nothing else: a request that comes then waits for them


class Found(NamedTuple):
    """The full blocks at the beginning of a sequence that are computed already."""

    blocks: list[int]  # the device holds these …
    keys: list[bytes]  # … and the host those behind them

    @property
    def num_blocks(self) -> int:
        """Blocks that are not computed again."""
        return len(self.blocks) + len(self.keys)


class PrefixCache:
    """Blocks by what they hold. `pool` is the device's, `tiers` is what is behind it."""

    def __init__(self, num_blocks: int, tiers: TierIndex | None = None) -> None:
        self.tiers = tiers or TierIndex()
        self.pool = BlockPool(num_blocks, self.tiers.forgotten)
        self._restores: list[Restored] = []

    def find(self, entry: Scheduled, most: int) -> Found:
        """What is computed already of the first `most` blocks of a request that waits."""
        if entry.keys is None:
            return Found([], [])
        keys = entry.keys.keys[:most]
        blocks = self.pool.find(keys)
        return Found(blocks, self.tiers.find(keys[len(blocks) :]))

    def awaits_disk(self, entry: Scheduled, block_size: int) -> bool:
        """Whether it should wait for what is on its way from the disk, which this asks for."""
        if entry.keys is None or not self.tiers.has_disk:
            return False
        keys = entry.keys.keys[: (entry.num_prompt_left - len(entry.forced) - 1) // block_size]
        behind = keys[len(self.pool.find(keys)) :]
        entry.disk_wait = self.tiers.coming(behind, entry.id, block_size, entry.disk_wait)
        return entry.disk_wait is not None and not entry.disk_wait.is_over

    def reserve(self, entry: Scheduled, found: Found, num_blocks: int) -> list[int]:
        """The blocks of a request that is admitted: those found, which are held already, and new ones to write to."""
        fresh = self.pool.allocate(num_blocks - len(found.blocks))
        self._restores += self.tiers.restore(found.keys, fresh[: len(found.keys)], entry.id)
        return found.blocks + fresh

    def take_restores(self, step: int) -> list[Restored]:
        """What the next step brings back for those that were just admitted."""
        if not self._restores:
            return []
        restores, self._restores = self._restores, []
        for restored in restores:
            self.pool.announce(restored.key, restored.block)
        self.tiers.restoring(restores, step)
        return restores

    def take_saves(self, step: int, prefill_tokens: int, block_size: int, *, is_idle: bool) -> list[Saved]:
        """What the next step saves, before it computes anything."""
        if is_idle:
            return self.tiers.save(step, SAVED_IDLE)
        is_urgent = self.tiers.has_urgent
        if not is_urgent and self.tiers.num_unsaved < SAVED_AT_ONCE:
            return []
        return self.tiers.save(step, SAVED_BESIDE + prefill_tokens // block_size)

    def announced(self, entry: Scheduled, first: int, last: int) -> list[FilledBlock]:
        """The blocks from `first` to before `last` of a sequence, which a step fills: what they will hold is known."""
        if entry.keys is None:
            return []
        keys = entry.keys.keys
        filled = [FilledBlock(entry, entry.id, keys[i], entry.blocks[i], i) for i in range(first, min(last, len(keys)))]
        for block in filled:
            self.pool.announce(block.key, block.block)
        return filled

    def computed(self, filled: Sequence[FilledBlock], saves: Sequence[Saved], restores: Sequence[Restored]) -> None:
        """A step is computed: what it filled and brought back can be found."""
        self.tiers.saved(saves, is_done=True)
        self.tiers.restored(restores)
        for restored in restores:
            self.pool.confirm(restored.key, restored.block)
        for block in filled:
            if block.entry.id != block.id:
                self.pool.retract(block.key, block.block)
            else:
                self.confirm(block.key, block.block, block.id, block.depth)

    def confirm(self, key: bytes, block: int, sequence: int, depth: int) -> None:
        """Block `depth` of a sequence is computed, as was announced."""
        if self.pool.confirm(key, block):
            self.tiers.computed(key, block, sequence, depth)

    def failed(self, filled: Sequence[FilledBlock], saves: Sequence[Saved], restores: Sequence[Restored]) -> None:
        """A step failed, and nobody knows what it did."""
        self.tiers.saved(saves, is_done=False)
        self.tiers.restored(restores)
        for filling in filled:
            self.pool.retract(filling.key, filling.block)
        for restored in restores:
            self.pool.retract(restored.key, restored.block)
