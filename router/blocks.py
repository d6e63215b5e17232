"""KV blocks: who holds them, which are free, and which still hold a prefix that another request may begin with.

Plain Python over block ids. The pool knows nothing of tensors, sequences or tokens' contents; the tensors on the shards
know nothing of the pool. Admission (`queue.py`) counts before it asks, so running out here is a bug of ours and not
something a user can cause.

A block that is full gets a key, a digest of all tokens from the start of the sequence to its end (`prefix.py`), and can
be found by it once it is confirmed: computed by a step that did not fail. It can be held by several sequences, which
only read it, and stays findable when nobody holds it, until it is the least recently used one and somebody needs a
block. Never shared: a block that is not full, not yet computed, or of unknown content.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """Hands out the ids from 0 to num_blocks - 1.

    Blocks without content go out first, and of these the one that was freed last, whose memory is the warmest. After
    them go blocks with content that nobody holds, and of these the least recently used first.
    """

    def __init__(self, num_blocks: int, forgotten: Callable[[bytes, int], None] | None = None) -> None:
        """forgotten: told the key of a block that is given away, which nothing has overwritten yet."""
        self._forgotten = forgotten
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._idle: dict[int, None] = {}  # held by nobody, with content; least recently used first
        self._holders = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._found: dict[bytes, int] = {}  # key -> block, confirmed ones only

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, with or without content."""
        return len(self._blank) + len(self._idle)

    def num_freed_by(self, leaving: Iterable[Sequence[int]]) -> int:
        """How many blocks nobody would hold any more if the holders of these lists of blocks left."""
        given_up = Counter(block for blocks in leaving for block in blocks)
        return sum(self._holders[block] == count for block, count in given_up.items())

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks that hold the longest beginning of a sequence whose full blocks have these keys."""
        blocks = []
        for key in keys:
            block = self._found.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def hold(self, blocks: Sequence[int]) -> None:
        """Add a holder to each of these blocks, which `find` has just named."""
        for block in blocks:
            self._idle.pop(block, None)
            self._holders[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks to write to. Raises RuntimeError when fewer are free, and then takes none."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} free: admission miscounted")
        start = max(0, len(self._blank) - count)
        blocks = self._blank[start:]
        del self._blank[start:]
        while len(blocks) < count:
            block = next(iter(self._idle))
            self._forget(block)
            del self._idle[block]
            blocks.append(block)
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Take a holder away from each block. Raises RuntimeError for a block that nobody holds."""
        for block in reversed(blocks):  # the end of a prefix is of use to fewer than its beginning, and goes first
            if self._holders[block] == 0:  # checked under `python -O` too: a block with two owners would leak text
                raise RuntimeError(f"block {block} freed twice")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if self._keys[block] is None:
                    self._blank.append(block)
                else:
                    self._idle[block] = None

    def announce(self, key: bytes, block: int) -> None:
        """Note what a held block will contain once a step under way has computed it."""
        self._keys[block] = key

    def confirm(self, key: bytes, block: int) -> bool:
        """What was announced is computed: it can be found, unless the block is another's by now; returns whether."""
        if self._keys[block] != key:
            return False
        if self._found.setdefault(key, block) != block:
            self._clear(block)  # two sequences computed the same: one copy is enough to be found
            return False
        return True

    def retract(self, key: bytes, block: int) -> None:
        """What was announced was not computed after all."""
        if self._keys[block] == key and self._found.get(key) != block:
            self._clear(block)

    def _clear(self, block: int) -> None:
        """Its content is of no use."""
        self._keys[block] = None
        if block in self._idle:
            del self._idle[block]
            self._blank.append(block)

    def _forget(self, block: int) -> None:
        key, self._keys[block] = self._keys[block], None
        if key is not None and self._found.get(key) == block:
            del self._found[key]
            if self._forgotten is not None:
                self._forgotten(key, block)
