"""KV blocks of all layers that are not on the device, and which store has which."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from server.backends.device import Device, Event
from server.offload.places import Place
from server.offload.stores import Memory, Run, Store, Wait, wait_for_all


class KvBlocks:
    """A layer's first blocks in one store, those behind them in the next, and so on; layer behind layer in each.

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
        """See `Store`."""
        return sum(store.moved_bytes for _, store in self._stores)

    def load(self, layer: int, runs: Sequence[Run], after: Event | None) -> Wait:
        """See `Store`. runs: in the numbers of a layer's blocks, as those of `save`."""
        waits = [store.load(self._pool, own, after) for store, own in self._divided(layer, runs)]
        return lambda: wait_for_all(waits)

    def save(self, layer: int, runs: Sequence[Run], after: Event | None) -> Wait:
        """See `Store`."""
        waits = [store.save(self._pool, own, after) for store, own in self._divided(layer, runs)]
        return lambda: wait_for_all(waits)

    def close(self) -> None:
        """See `Store`."""
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
