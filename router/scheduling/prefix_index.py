"""Which blocks the host and the disk hold, which of them move, and which go to make room.

The router owns the slots of the host and the places of the disk as it owns the blocks of the device
(`prefix_cache.py`): all ranks do what it says, so that they hold the same. A block is saved to the host soon after it
was computed, not when the device needs its room: then it is there when it is wanted, whatever ends the server, and
eviction costs nothing. From the host it goes on to the disk. It comes back to the host when a request that begins with
it waits, and from there to the device in the step that admits the request.

A key is found in a tier only once its content is confirmed to be there on every rank. What has no room is dropped: no
request waits for a spill. A tier gives up the group of blocks that was used least recently, a group being the blocks of
one sequence, and of a group its end first: the end of a prefix is of use to fewer requests than its beginning, and
without its beginning to none. Plain Python without clock, asyncio and wire; `router/batching/prefix_mover.py` asks the
shards.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from router.scheduling.prefix_moves import DiskWait, Move, Restored, Saved, Stored, TierCounts, TierSizes

DEPTH_BITS = 24  # of a stamp: a block's place in its sequence; above them is the number of its group
MOST_LOOKED_AT = 256  # blocks of the host that are asked whether they may go before one is said to be full
LEAST_TOKENS = 64  # of a step that says what a token of a prompt takes
NEWEST = 0.3  # how much of an average the newest time is
FORGIVING = 0.9  # what a disk that was found too slow is thought to take, each time that it is not asked


class TierIndex:
    """The host's and the disk's blocks by their keys. One of the default size has room for nothing and does nothing."""

    def __init__(
        self, sizes: TierSizes | None = None, stored: Iterable[Stored] = (), counts: TierCounts | None = None
    ) -> None:
        self.sizes = sizes or TierSizes()
        self.counts = counts or TierCounts()
        self.has_disk = bool(self.sizes.num_places)
        self.new_waits: deque[DiskWait] = deque()  # which the mover has to end
        self.seconds_per_block: float | None = None  # that comes from the disk; None: not known yet
        self.seconds_per_token: float | None = None  # of a prompt that is computed
        self._free_slots = list(range(self.sizes.num_slots - 1, -1, -1))
        self._host: dict[bytes, int] = {}
        self._host_use = _Recency()
        self._stamps: dict[bytes, int] = {}  # of what the host holds
        self._pins: Counter[bytes] = Counter()  # steps and moves under way that read a block of the host
        self._from_disk: set[bytes] = set()  # what the host holds because it was fetched, and no request has used yet
        self._touched: dict[int, int] = {}  # slot -> the last step that copies to it or from it
        self._unsaved: dict[bytes, _Unsaved] = {}  # on the device, and not yet on its way to the host
        self._urgent: list[tuple[bytes, _Unsaved]] = []  # the same, whose blocks the next step may overwrite
        self._saving: set[bytes] = set()
        self._disk: dict[bytes, int] = {}
        self._disk_use = _Recency()
        self._unstored: dict[bytes, None] = {}  # on the host, and not yet on its way to the disk
        self._storing: set[bytes] = set()
        self._wanted: dict[bytes, int] = {}  # on the disk, and requests wait for them: key -> group
        self._fetching: dict[bytes, int] = {}  # on their way to the host -> group
        self._is_storing = self.has_disk
        taken = {place for _, place, _ in stored}
        self._free_places = [place for place in range(self.sizes.num_places - 1, -1, -1) if place not in taken]
        self._first_group = 1  # groups of sequences begin behind those that the disk holds
        for key, place, stamp in sorted(stored, key=lambda one: one.stamp):
            self._disk[key] = place
            self._disk_use.use([key], stamp >> DEPTH_BITS)
            self._first_group = max(self._first_group, (stamp >> DEPTH_BITS) + 1)

    @property
    def num_blocks(self) -> dict[str, int]:
        """How many blocks each tier holds."""
        return {"host": len(self._host), "disk": len(self._disk)}

    @property
    def room(self) -> dict[str, int]:
        """How many blocks each tier has room for."""
        return {"host": self.sizes.num_slots, "disk": self.sizes.num_places if self.has_disk else 0}

    @property
    def is_idle(self) -> bool:
        """Whether nothing moves between host and disk, or waits to."""
        return not (self._unstored or self._storing or self._wanted or self._fetching)

    def holds(self, key: bytes) -> bool:
        """Whether the host or the disk has this block, or it is on its way between them."""
        return key in self._host or key in self._disk or key in self._fetching

    def has_at_hand(self, key: bytes) -> bool:
        """Whether the host has this block."""
        return key in self._host

    # ------------------------------------------------------------------------------------- from device to host

    def computed(self, key: bytes, block: int, sequence: int, depth: int) -> None:
        """A block of the device is found under this key from now on: block `depth` of a sequence."""
        if self.sizes.num_slots and not (key in self._host or key in self._saving or key in self._fetching):
            stamp = (self._first_group + sequence << DEPTH_BITS) + min(depth, 2**DEPTH_BITS - 1)
            self._unsaved[key] = _Unsaved(block, stamp)
            self._host_use.touch(stamp >> DEPTH_BITS)

    def forgotten(self, key: bytes, block: int) -> None:
        """The device gives this block away: what it holds is saved with the next step or not at all."""
        found = self._unsaved.get(key)
        if found is not None and found.block == block:
            self._urgent.append((key, self._unsaved.pop(key)))

    @property
    def num_unsaved(self) -> int:
        """Blocks that wait to be saved."""
        return len(self._unsaved)

    @property
    def has_urgent(self) -> bool:
        """Whether there are some that the next step may overwrite."""
        return bool(self._urgent)

    def save(self, step: int, most: int) -> list[Saved]:
        """What this step copies to the host, before it computes anything: at most so many blocks."""
        saves: list[Saved] = []
        urgent, self._urgent = self._urgent, []
        for key, unsaved in urgent:
            slot = self._take_slot(unsaved.stamp >> DEPTH_BITS) if len(saves) < most else None
            if slot is None:
                self.counts.dropped += 1
            else:
                saves.append(Saved(key, unsaved.block, slot, unsaved.stamp))
        for key, unsaved in list(islice(self._unsaved.items(), most - len(saves))):
            slot = self._take_slot(unsaved.stamp >> DEPTH_BITS)
            if slot is None and (saves or self._makes_room):
                break
            del self._unsaved[key]
            if slot is None:
                self.counts.dropped += 1
            else:
                saves.append(Saved(key, unsaved.block, slot, unsaved.stamp))
        for saved in saves:
            self._saving.add(saved.key)
            self._touched[saved.slot] = step
        return saves

    def saved(self, saves: Sequence[Saved], *, is_done: bool) -> None:
        """The step with these is computed, or failed."""
        for key, _, slot, stamp in saves:
            self._saving.discard(key)
            if not is_done or key in self._host:
                self._free_slots.append(slot)
                continue
            self._put(key, slot, stamp)
            self.counts.written["host"] += self.sizes.block_bytes
            if self._is_storing and key not in self._disk:
                self._unstored[key] = None

    def _put(self, key: bytes, slot: int, stamp: int) -> None:
        self._host[key] = slot
        self._stamps[key] = stamp
        self._host_use.use([key], stamp >> DEPTH_BITS)

    @property
    def _makes_room(self) -> bool:
        """Whether blocks of the host, which cannot go now, soon can."""
        return bool(self._saving or self._pins or self._unstored or self._storing)

    def _take_slot(self, group: int) -> int | None:
        """A slot for a block of this group, at the cost of another group's, or of one that is on the disk too.

        None: there is none. Of its own group only what comes behind the others would go, for what comes behind that.
        """
        if self._free_slots:
            return self._free_slots.pop()
        for key, owner in islice(self._host_use.victims(), MOST_LOOKED_AT):
            if owner == group and key not in self._disk:
                return None
            if not (key in self._pins or key in self._unstored or key in self._storing):
                self._host_use.remove(key)
                self._from_disk.discard(key)
                del self._stamps[key]
                return self._host.pop(key)
        return None

    # ------------------------------------------------------------------------------------- from host to device

    def find(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of these keys, from the first on, that the host holds, as far as one step brings back."""
        found: list[bytes] = []
        for key in islice(keys, self.sizes.most_restored):
            if key not in self._host:
                break
            found.append(key)
        return found

    def restore(self, keys: Sequence[bytes], blocks: Sequence[int], sequence: int) -> list[Restored]:
        """Have the next step bring back what `find` named, to these blocks. The slots stay as they are until then."""
        for key in keys:
            self._pins[key] += 1
            tier = "disk" if key in self._from_disk else "host"
            self._from_disk.discard(key)
            self.counts.hits[tier] += 1
            self.counts.read["host"] += self.sizes.block_bytes
        self._host_use.use(keys, self._first_group + sequence)
        return [Restored(key, self._host[key], block) for key, block in zip(keys, blocks, strict=True)]

    def restoring(self, restores: Sequence[Restored], step: int) -> None:
        """The step that brings these back has this number."""
        for restored in restores:
            self._touched[restored.slot] = step

    def restored(self, restores: Sequence[Restored]) -> None:
        """The step with these is computed, or failed."""
        for restored in restores:
            self._unpin(restored.key)

    def _unpin(self, key: bytes) -> None:
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]

    # --------------------------------------------------------------------------------------- from disk to host

    def coming(self, keys: Sequence[bytes], sequence: int, block_size: int, wait: DiskWait | None) -> DiskWait | None:
        """What a request waits for that begins with these keys, of which the device does not hold the first.

        wait: what it waits for already. None: nothing, or it is not worth it.
        """
        if not self.has_disk or (wait is not None and wait.is_over):
            return wait
        missing = self._missing(keys)
        if wait is not None:
            wait.is_over = not self._is_coming(missing)
            return wait
        if not missing:
            return None
        if not self._is_worth(len(missing), block_size):
            return DiskWait(0, is_over=True)
        group = self._first_group + sequence
        self._host_use.use([key for key in keys if key in self._host], group)
        room = self.sizes.num_slots - len(self._pins) - len(self._wanted) - len(self._fetching)
        for key in missing[: max(0, room)]:
            if key not in self._fetching:
                self._wanted.setdefault(key, group)
        if not self._is_coming(missing):
            return DiskWait(0, is_over=True)
        self.new_waits.append(DiskWait(len(missing)))
        return self.new_waits[-1]

    def _missing(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those on disk alone, up to the first that is nowhere; no more than a step brings back."""
        missing = []
        for key in islice(keys, self.sizes.most_restored):
            if key in self._host:
                continue
            if key not in self._disk and key not in self._fetching:
                break
            missing.append(key)
        return missing

    def _is_coming(self, missing: Iterable[bytes]) -> bool:
        return any(key in self._wanted or key in self._fetching for key in missing)

    def seconds_to_compute(self, num_blocks: int, block_size: int) -> float | None:
        """What computing so many blocks would take, by the steps before; None if that is not known."""
        return None if self.seconds_per_token is None else num_blocks * block_size * self.seconds_per_token

    def _is_worth(self, num_blocks: int, block_size: int) -> bool:
        """Whether so many blocks come sooner from the disk than they are computed, as far as that is known."""
        computing = self.seconds_to_compute(num_blocks, block_size)
        if self.seconds_per_block is None or computing is None:
            return True
        queued = num_blocks + len(self._wanted) + len(self._fetching)
        if queued * self.seconds_per_block < computing:
            return True
        self.seconds_per_block *= FORGIVING  # it may be faster by now: it is asked again after a while
        return False

    def took(self, num_tokens: int, seconds: float) -> None:
        """A step that did nothing else has computed so many tokens of prompts."""
        if num_tokens >= LEAST_TOKENS:
            self.seconds_per_token = smoothed(self.seconds_per_token, seconds / num_tokens)

    @property
    def is_wanted(self) -> bool:
        """Whether requests wait for blocks that nobody has been asked for yet."""
        return bool(self._wanted)

    def next_fetch(self, most: int) -> Move | None:
        """Blocks that requests wait for, to be asked for now."""
        move = Move(True, [], [], [], [], 0)
        while self._wanted and len(move.keys) < most:
            key = next(iter(self._wanted))
            group = self._wanted.pop(key)
            place = self._disk.get(key)
            if place is None or key in self._host or key in self._saving:
                continue
            if (slot := self._take_slot(group)) is None:
                continue
            self._fetching[key] = group
            move.keys.append(key)
            move.slots.append(slot)
            move.places.append(place)
        return self._behind_steps(move)

    def _behind_steps(self, move: Move) -> Move | None:
        if not move.keys:
            return None
        after = max(self._touched.get(slot, 0) for slot in move.slots)
        return Move(move.is_fetch, move.keys, move.slots, move.places, move.stamps, after)

    def fetched(self, move: Move, is_moved: Sequence[bool]) -> None:
        """This move is over, and every rank holds those of the blocks for which that is said."""
        if not self.has_disk:  # it was lost meanwhile
            self._free_slots += move.slots
            return
        for key, slot, has_come in zip(move.keys, move.slots, is_moved, strict=True):
            group = self._fetching.pop(key)
            if has_come and key not in self._host:
                self._put(key, slot, group << DEPTH_BITS)
                self._from_disk.add(key)
                self.counts.read["disk"] += self.sizes.block_bytes
                continue
            self._free_slots.append(slot)
            if not has_come:
                self._forget_place(key)

    def _forget_place(self, key: bytes) -> None:
        if (place := self._disk.pop(key, None)) is not None:
            self._disk_use.remove(key)
            self._free_places.append(place)

    # --------------------------------------------------------------------------------------- from host to disk

    def next_store(self, most: int) -> Move | None:
        """Blocks that the disk is asked to take now."""
        move = Move(False, [], [], [], [], 0)
        while self._is_storing and self._unstored and len(move.keys) < most:
            key = next(iter(self._unstored))
            if key in self._disk or (place := self._take_place(self._stamps[key] >> DEPTH_BITS)) is None:
                del self._unstored[key]
                self.counts.dropped += key not in self._disk
                continue
            del self._unstored[key]
            self._storing.add(key)
            self._pins[key] += 1
            move.keys.append(key)
            move.slots.append(self._host[key])
            move.places.append(place)
            move.stamps.append(self._stamps[key])
        return self._behind_steps(move)

    def _take_place(self, group: int) -> int | None:
        if self._free_places:
            return self._free_places.pop()
        for key, owner in islice(self._disk_use.victims(), MOST_LOOKED_AT):
            if owner == group:
                return None
            if key not in self._fetching:
                self._disk_use.remove(key)
                return self._disk.pop(key)
        return None

    def stored(self, move: Move, is_moved: Sequence[bool]) -> None:
        """This move is over, and every disk holds those of the blocks for which that is said."""
        for key, place, stamp, is_there in zip(move.keys, move.places, move.stamps, is_moved, strict=True):
            self._storing.discard(key)
            self._unpin(key)
            if not self.has_disk:
                continue  # it was lost meanwhile
            if is_there and key not in self._disk:
                self._disk[key] = place
                self._disk_use.use([key], stamp >> DEPTH_BITS)
                self.counts.written["disk"] += self.sizes.block_bytes
            else:
                self._free_places.append(place)

    def disk_is_full(self) -> None:
        """A place could not be written. Those that hold a block go on; without any, nothing more is stored."""
        self._free_places = []
        self._is_storing = self._is_storing and bool(self._disk)
        if not self._is_storing:
            self._unstored.clear()

    def close_disk(self) -> None:
        """The disk is of no use any more. What is under way there is dropped; its slots come back as its moves end."""
        self.has_disk = self._is_storing = False
        self._disk.clear()
        self._disk_use = _Recency()
        self._wanted.clear()
        self._fetching.clear()
        self._unstored.clear()
        self._storing.clear()
        self._free_places = []


def smoothed(average: float | None, newest: float) -> float:
    """The average of times of which the newest count most."""
    return newest if average is None else average + NEWEST * (newest - average)


class _Unsaved(NamedTuple):
    block: int
    stamp: int


class _Recency:
    """Keys in groups, the group that was used last at the end. Within a group they are in the order of their use."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[bytes, None]] = {}
        self._group_of: dict[bytes, int] = {}

    def use(self, keys: Iterable[bytes], group: int) -> None:
        """These belong to `group` now, in this order, which is the one used last."""
        members = self._groups.pop(group, {})
        self._groups[group] = members
        for key in keys:
            if self._group_of.get(key) != group:
                self.remove(key)
                self._group_of[key] = group
                members[key] = None

    def touch(self, group: int) -> None:
        """What is known of this group was used last."""
        if (members := self._groups.pop(group, None)) is not None:
            self._groups[group] = members

    def remove(self, key: bytes) -> None:
        """Forget a key, if it is known."""
        if (group := self._group_of.pop(key, None)) is not None:
            members = self._groups[group]
            del members[key]
            if not members:
                del self._groups[group]

    def victims(self) -> Iterator[tuple[bytes, int]]:
        """Keys with their groups, those first that should go first. Nothing may change meanwhile."""
        for group, members in self._groups.items():
            for key in reversed(members):
                yield key, group
