"""KV blocks and the beginnings of sequences that they hold, which need not be computed again.

`BlockPool` knows which blocks of the device are held, free, or free with content that another request may begin with.
`PrefixCache` joins it with the tiers behind the device (`prefix_index.py`): what the host holds comes to blocks that
were just allocated, in the step that admits the request, and is then found on the device like what was computed there;
what the device forgets is saved before it is overwritten. Plain Python over block ids: tensors are the shards'.
Admission (`queue.py`) counts before it asks, so running out here is a bug of ours and not something a user can cause.

Recurrent and windowed layers need more than these blocks to go on behind a prefix (`checkpoints.py`). A request goes on
from the last place at which all of that is there, and is computed again from there on.

A full block gets a key, a digest of all tokens from the start of the sequence to its end (`request.py`), and can be
found by it once it is confirmed: computed by a step that did not fail. Several sequences can hold it, which only read
it, and it stays findable when none does, until it is the least recently used one and its room is needed. Never shared:
a block that is not full, not yet computed, or of unknown content.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from router.scheduling.checkpoints import Checkpoints, States, Windows
from router.scheduling.plan import FilledBlock, Loaded, WindowCopy
from router.scheduling.prefix_index import TierIndex
from router.scheduling.prefix_moves import Restored, Saved
from router.scheduling.request import Keeping, Scheduled

SAVED_BESIDE = 8  # blocks that a step saves beside as many as it computes: a copy takes a hundredth of computing one
SAVED_AT_ONCE = 16  # blocks that are waited for while there is other work: a copy of a few costs what one does
SAVED_IDLE = 64  # blocks that a step saves which does nothing else: a request that comes then waits for them


class Found(NamedTuple):
    """The full blocks at the beginning of a sequence that are computed already."""

    blocks: list[int]  # the device holds these …
    keys: list[bytes]  # … and the host those behind them
    # What it takes to go on from there: the device's blocks, or the keys of what the host holds.
    needed: Sequence[int | bytes] = ()

    @property
    def num_blocks(self) -> int:
        """Blocks that are not computed again."""
        return len(self.blocks) + len(self.keys)

    @property
    def held(self) -> list[int]:
        """All blocks of the device among these."""
        return [*self.blocks, *(one for one in self.needed if isinstance(one, int))]

    @property
    def needed_keys(self) -> list[bytes]:
        """What comes from the host to blocks that are the request's for one step."""
        return [one for one in self.needed if isinstance(one, bytes)]


class PrefixCache:
    """Blocks by what they hold. `pool` is the device's, `tiers` is what is behind it.

    checkpoints: how the model goes on from a prefix; None: its blocks suffice.
    """

    def __init__(self, num_blocks: int, tiers: TierIndex | None = None, checkpoints: Checkpoints | None = None) -> None:
        self.checkpoints = checkpoints
        self._loaded: dict[int, Loaded] = {}  # what sequences go on from, held for the plan at hand
        self._lent: list[int] = []  # blocks that states and windows are kept in, likewise
        self._passed: list[tuple[int, Sequence[bytes], int]] = []  # sequences with their keys, to be kept at a depth
        self._copying: dict[bytes, int] = {}  # what steps under way copy from rings, of which sequence
        self.tiers = tiers or TierIndex()
        self.pool = BlockPool(num_blocks, self.tiers.forgotten)
        self._restores: list[Restored] = []

    def find(self, entry: Scheduled, most: int) -> Found:
        """What is computed already of the first `most` blocks of a request that waits."""
        if entry.keys is None:
            return Found([], [])
        keys = entry.keys.keys[:most]
        blocks = self.pool.find(keys)
        found = Found(blocks, self.tiers.find(keys[len(blocks) :]))
        return found if self.checkpoints is None else self._going_on(found, keys, self.checkpoints)

    def _going_on(self, found: Found, keys: Sequence[bytes], checkpoints: Checkpoints) -> Found:
        """As much of it as a request can go on from."""
        depth = checkpoints.deepest(
            keys, found.num_blocks, lambda key: self.pool.holder(key) is not None or self.tiers.has_at_hand(key)
        )
        names = checkpoints.needed(keys, depth) if depth else []
        needed = [name if (block := self.pool.holder(name)) is None else block for name in names]
        whole = Found(found.blocks[:depth], found.keys[: max(0, depth - len(found.blocks))], needed)
        missing = whole.needed_keys
        return whole if len(self.tiers.find(missing)) == len(missing) else Found([], [])  # else too many for one step

    def awaits_disk(self, entry: Scheduled, block_size: int) -> bool:
        """Whether it should wait for what is on its way from the disk, which this asks for."""
        if entry.keys is None or not self.tiers.has_disk:
            return False
        keys = entry.keys.keys[: (entry.num_prompt_left - len(entry.forced) - 1) // block_size]
        behind = keys[len(self.pool.find(keys)) :]
        if self.checkpoints is not None:
            behind = self._behind_device(keys, self.checkpoints)
        entry.disk_wait = self.tiers.coming(behind, entry.id, block_size, entry.disk_wait)
        return entry.disk_wait is not None and not entry.disk_wait.is_over

    def _behind_device(self, keys: Sequence[bytes], checkpoints: Checkpoints) -> list[bytes]:
        """What the device lacks of the longest beginning that all of is somewhere, last what all layers need."""
        num_held = len(self.pool.find(keys))
        reach = num_held + len(list(takewhile(self.tiers.holds, keys[num_held:])))
        depth = checkpoints.deepest(keys, reach, self._holds)
        needed = checkpoints.needed(keys, depth) if depth else []
        return [key for key in needed if self.pool.holder(key) is None] + list(keys[num_held:depth])

    def reserve(self, entry: Scheduled, found: Found, num_blocks: int) -> list[int]:
        """The blocks of a request that is admitted: those found, which are held already, and new ones to write to."""
        fresh = self.pool.allocate(num_blocks - len(found.blocks))
        self._restores += self.tiers.restore(found.keys, fresh[: len(found.keys)], entry.id)
        if self.checkpoints is not None and found.num_blocks:
            missing = found.needed_keys
            passing = self.pool.allocate(len(missing))
            self._restores += self.tiers.restore(missing, passing, entry.id)
            coming = iter(passing)
            blocks = [one if isinstance(one, int) else next(coming) for one in found.needed]
            self._loaded[entry.id] = Loaded(blocks, self.checkpoints.places(found.num_blocks))
        return found.blocks + fresh

    def take_loads(self) -> Mapping[int, Loaded]:
        """What those just admitted go on from. It is read before what a later step writes there."""
        loaded, self._loaded = self._loaded, {}
        for blocks in (*(one.blocks for one in loaded.values()), self._lent):
            self.pool.free(blocks)
        self._lent = []
        return loaded

    def keep_states(self, entry: Scheduled, depth: int) -> tuple[list[int], list[FilledBlock]]:
        """Blocks for the states behind block `depth` of a sequence, which the step at hand computes; none: no room.

        And what these hold, if it is known; else they are held until `name_states` or `drop_states`.
        """
        assert entry.keys is not None and isinstance(self.checkpoints, States)
        known = self.checkpoints.needed(entry.keys.keys, depth + 1) if depth < len(entry.keys.keys) else []
        is_there = known and len(self.pool.find(known)) == len(known)
        if is_there or self.pool.num_free < self.checkpoints.size:
            return [], []
        blocks = self.pool.allocate(self.checkpoints.size)
        for key, block in zip(known, blocks, strict=False):
            self.pool.announce(key, block)
        if known:
            self._lent += blocks
        else:
            self.drop_states(entry)
            entry.keeping = Keeping(depth, blocks)
        filled = [FilledBlock(entry, entry.id, *named, depth) for named in zip(known, blocks, strict=False)]
        return blocks, filled

    def name_states(self, entry: Scheduled, depth: int, key: bytes) -> None:
        """A sequence's block `depth` has this key, and what is behind it is computed: so are the states there."""
        if entry.keeping is None or entry.keeping.depth != depth or self.checkpoints is None:
            return
        for name, block in zip(self.checkpoints.needed([key], 1), entry.keeping.blocks, strict=True):
            self.pool.announce(name, block)
            self.confirm(name, block, entry.id, depth)
        self.drop_states(entry)

    def drop_states(self, entry: Scheduled) -> None:
        """Give back what is held for states of a sequence."""
        if entry.keeping is not None:
            self.pool.free(entry.keeping.blocks)
            entry.keeping = None

    def pass_depth(self, entry: Scheduled, depth: int) -> None:
        """Have the next step copy what windowed layers need behind the first `depth` blocks of a sequence."""
        if entry.keys is not None and depth:
            self._passed.append((entry.id, entry.keys.keys, depth))

    @property
    def has_passed(self) -> bool:
        """Whether the next step should copy anything, if there is room."""
        return bool(self._passed)

    def take_copies(self) -> list[WindowCopy]:
        """What the next step copies before it computes anything, as far as blocks are free for it."""
        passed, self._passed = self._passed, []
        copies = list[WindowCopy]()
        for id, keys, depth in passed:
            assert isinstance(self.checkpoints, Windows)
            places = self.checkpoints.places(depth)
            lacking = [(place, self.checkpoints.names(keys[place])) for place in places]
            lacking = [(place, names) for place, names in lacking if not all(map(self._has_or_copies, names))]
            if len(lacking) * self.checkpoints.size <= self.pool.num_free:
                copies += [self._copy(id, place, names) for place, names in lacking]
        return copies

    def _copy(self, sequence: int, place: int, names: list[bytes]) -> WindowCopy:
        blocks = self.pool.allocate(len(names))
        self._lent += blocks
        self._copying |= dict.fromkeys(names, sequence)
        for name, block in zip(names, blocks, strict=True):
            self.pool.announce(name, block)
        return WindowCopy(sequence, place, names, blocks)

    def _holds(self, key: bytes) -> bool:
        """Whether it is anywhere."""
        return self.pool.holder(key) is not None or self.tiers.holds(key)

    def _has_or_copies(self, key: bytes) -> bool:
        return key in self._copying or self._holds(key)

    def copied(self, copies: Iterable[WindowCopy]) -> None:
        """The step with these is computed; of a sequence that was lost before, there was nothing to copy."""
        for sequence, place, names, blocks in copies:
            for name, block in zip(names, blocks, strict=True):
                if self._is_over(name, sequence):
                    self.confirm(name, block, sequence, place)
                else:
                    self.pool.retract(name, block)

    def lose(self, sequences: Collection[int], copies: Iterable[WindowCopy]) -> None:
        """A step with these failed."""
        self._passed = [passed for passed in self._passed if passed[0] not in sequences]
        self._copying = {name: one for name, one in self._copying.items() if one not in sequences}
        for copy in copies:
            for name, block in zip(copy.names, copy.blocks, strict=True):
                self._is_over(name, copy.sequence)
                self.pool.retract(name, block)

    def _is_over(self, name: bytes, sequence: int) -> bool:
        """End a copy; whether it was under way, and of this sequence."""
        is_its = self._copying.get(name) == sequence
        if is_its:
            del self._copying[name]
        return is_its

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
        """A step failed, and it is not known what it did."""
        self.tiers.saved(saves, is_done=False)
        self.tiers.restored(restores)
        for filling in filled:
            self.pool.retract(filling.key, filling.block)
        for restored in restores:
            self.pool.retract(restored.key, restored.block)


class BlockPool:
    """Hands out the ids from 0 to num_blocks - 1.

    Blocks without content go out first, and of these the one that was freed last, whose memory is the warmest. After
    them go blocks with content that no sequence holds, and of these the least recently used first.
    """

    def __init__(self, num_blocks: int, forgotten: Callable[[bytes, int], None] | None = None) -> None:
        """forgotten: told the key of a block that is given away, which nothing has overwritten yet."""
        self._forgotten = forgotten
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._idle: dict[int, None] = {}  # not held, with content; least recently used first
        self._holders = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._found: dict[bytes, int] = {}  # key -> block, confirmed ones only

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds, with or without content."""
        return len(self._blank) + len(self._idle)

    def num_freed_by(self, leaving: Iterable[Sequence[int]]) -> int:
        """How many blocks would be free if the holders of these lists of blocks left."""
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

    def holder(self, key: bytes) -> int | None:
        """The block that holds what has this key."""
        return self._found.get(key)

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
        """Take a holder away from each block. Raises RuntimeError for a block that is not held."""
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
