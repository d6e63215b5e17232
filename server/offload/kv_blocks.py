"""KV blocks that are not on the device: which store has which, and areas of the device that they visit.

A step's attention is a row of visits, known before the step begins: layer by layer, and within a layer some sequences
after the other where not all have room at once. While one visit is computed, the next one's blocks come into another
area of the device's pool, and what the last one changed goes out of a third.

What keeps blocks right: an area is filled only when what was written to it is out; blocks are read and written only
when an earlier write of the same ones is done; and a step ends when all its writes are done, so that a write that fails
fails the step that it belongs to, and no block is given to another sequence before it is written.

The caller is one thread, which computes; stores move blocks beside it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from server.backends.device import Device, Event
from server.offload.places import Place
from server.offload.stores import Memory, Run, Store, Wait, wait_for_all

AREAS = 3  # one is computed with, one is filled, one is emptied


class KvBlocks:
    """A `Store` for each layer: its first blocks are in one store, those behind them in the next, and so on.

    pool: the device's blocks, which they come to and go from; stores: each with how many it has of every layer.
    """

    def __init__(self, pool: Memory, stores: Sequence[tuple[int, Store]]):
        self._pool, self._stores = pool, stores

    @classmethod
    def open(cls, device: Device, pool: Memory, layers: int, places: Iterable[tuple[int, Place]]) -> KvBlocks:
        """In stores of places, each with how many blocks of every layer it takes. Raises ValueError without room."""
        blocks = cls(pool, stores := [])
        try:
            for count, place in places:
                stores.append((count, place.open(device, pool.plane_bytes, "KV blocks", layers * count)))
        except ValueError:
            blocks.close()
            raise
        return blocks

    @property
    def moved_bytes(self) -> int:
        return sum(store.moved_bytes for _, store in self._stores)

    def load(self, layer: int, runs: Sequence[Run], after: Event | None) -> Wait:
        """See `Store`. runs: in the numbers of a layer's blocks, as those of `save`."""
        waits = [store.load(self._pool, own, after) for store, own in self._divided(layer, runs)]
        return lambda: wait_for_all(waits)

    def save(self, layer: int, runs: Sequence[Run], after: Event | None) -> Wait:
        waits = [store.save(self._pool, own, after) for store, own in self._divided(layer, runs)]
        return lambda: wait_for_all(waits)

    def close(self) -> None:
        for _, store in self._stores:
            store.close()

    def _divided(self, layer: int, runs: Sequence[Run]) -> list[tuple[Store, list[Run]]]:
        """The runs of each store that has any, in its own numbers."""
        first, found = 0, []
        for blocks, store in self._stores:
            own = [_within(run, first, first + blocks) for run in runs]
            if any(run.length for run in own):
                start = layer * blocks - first
                found.append((store, [run._replace(block=start + run.block) for run in own if run.length]))
            first += blocks
        return found


def _within(run: Run, first: int, end: int) -> Run:
    """The part of a run whose blocks are first … end - 1."""
    skipped = max(0, first - run.block)
    return Run(run.block + skipped, run.place + skipped, max(0, min(run.length, end - run.block) - skipped))


@dataclass(frozen=True)
class Moved:
    """Blocks of a store with their places in an area, counted from its first."""

    blocks: frozenset[int]
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, places: Sequence[tuple[int, int]]) -> Moved:
        """From pairs of a block and its place."""
        runs: list[Run] = []
        for block, place in sorted(places):
            last = runs[-1] if runs else None
            if last and (block, place) == (last.block + last.length, last.place + last.length):
                runs[-1] = last._replace(length=last.length + 1)
            else:
                runs.append(Run(block, place, 1))
        return cls(frozenset(block for block, _ in places), tuple(runs))

    def at(self, base: int) -> list[Run]:
        """The runs in the area that begins at `base`."""
        return [run._replace(place=run.place + base) for run in self.runs]


NOTHING = Moved(frozenset(), ())


@dataclass(frozen=True)
class Visit:
    """What one layer's attention of some sequences needs, and what it changes."""

    layer: int
    reads: Moved = NOTHING
    writes: Moved = NOTHING


class Staging:
    """Areas of `size` blocks each, the first of which begins at `first` of the pool."""

    def __init__(self, device: Device, store: KvBlocks, first: int, size: int):
        self._device, self._store = device, store
        self._areas = [_Area(first + number * size) for number in range(AREAS)]
        self._visits: Sequence[Visit] = ()
        self._begun = 0  # visits whose blocks are coming, or have come
        self._entered = 0
        self.times = VisitTimes()

    def begin(self, visits: Sequence[Visit]) -> None:
        """Expect these visits, in this order."""
        self._visits, self._begun, self._entered = visits, 0, 0

    def enter(self) -> int:
        """Wait until what the next visit reads is there. Returns where its area begins. Raises DiskError."""
        number = self._entered
        self._entered += 1
        area = self._area(number)
        began = time.perf_counter()
        try:
            self._load_up_to(number)
            if not self._needs_the_one_before(number + 1):
                self._load_up_to(number + 1)
            area.loaded()
        finally:
            self.times.waited_s += time.perf_counter() - began
        return area.base

    def leave(self) -> None:
        """What the visit changes is computed, or will be when the device gets there. Raises DiskError."""
        visit, area = self._visits[self._entered - 1], self._area(self._entered - 1)
        area.left = self._device.event()
        if visit.writes.runs:
            self._order_behind_writes(visit.layer, visit.writes)
            area.save(self._store, visit, area.left)
            self.times.written_blocks += len(visit.writes.blocks)

    def end(self) -> None:
        """Wait until nothing moves any more, whatever failed. Raises the first DiskError."""
        began = time.perf_counter()
        try:
            wait_for_all([wait for area in self._areas for wait in (area.loaded, area.saved)])
        finally:
            self.times.waited_s += time.perf_counter() - began
            self._visits = ()

    def _load_up_to(self, number: int) -> None:
        while self._begun <= min(number, len(self._visits) - 1):
            visit, area = self._visits[self._begun], self._area(self._begun)
            self._begun += 1
            area.saved()
            self._order_behind_writes(visit.layer, visit.reads)
            area.load(self._store, visit, self._device.event())
            self.times.read_blocks += len(visit.reads.blocks)

    def _needs_the_one_before(self, number: int) -> bool:
        """Whether a visit reads what the one before it will only write."""
        if number >= len(self._visits):
            return False
        before, visit = self._visits[number - 1 : number + 1]
        return before.layer == visit.layer and not before.writes.blocks.isdisjoint(visit.reads.blocks)

    def _order_behind_writes(self, layer: int, moved: Moved) -> None:
        for area in self._areas:
            if area.is_saving(layer, moved.blocks):
                area.saved()

    def _area(self, number: int) -> _Area:
        return self._areas[number % AREAS]


@dataclass
class VisitTimes:
    """What visits have cost so far."""

    read_blocks: int = 0
    written_blocks: int = 0
    waited_s: float = 0.0  # by the thread that computes


class _Area:
    def __init__(self, base: int):
        self.base = base
        self.left: Event | None = None  # the end of what was computed with it
        self._loading: Wait | None = None
        self._saving: Wait | None = None
        self._saved: tuple[int, frozenset[int]] = (0, frozenset())  # the layer and the blocks

    def is_saving(self, layer: int, blocks: frozenset[int]) -> bool:
        return self._saving is not None and self._saved[0] == layer and not blocks.isdisjoint(self._saved[1])

    def load(self, store: KvBlocks, visit: Visit, now: Event | None) -> None:
        if visit.reads.runs:
            self._loading = store.load(visit.layer, visit.reads.at(self.base), self.left or now)

    def save(self, store: KvBlocks, visit: Visit, after: Event | None) -> None:
        self._saved = visit.layer, visit.writes.blocks
        self._saving = store.save(visit.layer, visit.writes.at(self.base), after)

    def loaded(self) -> None:
        """Wait for what comes. Raises DiskError."""
        finish, self._loading = self._loading, None
        if finish is not None:
            finish()

    def saved(self) -> None:
        """Wait for what goes. Raises DiskError."""
        finish, self._saving = self._saving, None
        if finish is not None:
            finish()
