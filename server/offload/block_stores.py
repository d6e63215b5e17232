"""Where KV blocks are kept that are not on the device: in the host's memory, on a disk, or some in each.

Blocks that a layer attends to come to a staging area of the device's pool of blocks, and those that it changed go back
(`staging.py` says when). On a CPU they are read from the disk to where they are used; a GPU copies them to and from
pinned memory by itself, beside what it computes, and what is on a disk passes through two pieces of such memory.

Left out: which blocks are kept where (`server/model/tiered.py`).

Shapes: L layers, N blocks in the pool, C blocks in a store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from server.backends.device import Device, Event, Link
from server.offload.block_file import BlockFile, Memory, Run
from server.offload.disk import page_aligned

STAGE_BYTES = 16 << 20  # of one of the two pieces of pinned memory between a disk and a GPU


class BlockStore(Protocol):
    """Keeps the same number of blocks for each layer. A run's place is where the blocks are in the device's pool."""

    @property
    def moved_bytes(self) -> int:
        """What has been read from a disk and written to it so far."""

    def load(self, layer: int, runs: Sequence[Run], after: Event | None) -> Callable[[], None]:
        """Begin to bring blocks to the pool, once the device has reached `after`. Returns what waits for them.

        Waiting raises DiskError for blocks that cannot be read, and orders what the device computes from then on.
        """

    def save(self, layer: int, runs: Sequence[Run], after: Event | None) -> Callable[[], None]:
        """Begin to keep what blocks of the pool hold, once the device has reached `after`. Returns what waits.

        Waiting raises DiskError for blocks that cannot be written; then their places may be used again.
        """

    def close(self) -> None:
        """Give back what the store holds, after what is being moved."""


class DiskBlocks:
    """Blocks in a file, for a device whose memory is the host's. pool: planes of the
    device's pool of blocks, [N, bytes] uint8 each; blocks: C."""

    def __init__(self, folder: Path, flag: str, pool: Sequence[Tensor], layers: int, blocks: int):
        self._blocks = blocks
        self._file = BlockFile(folder, flag, layers * blocks, Memory([plane.numpy() for plane in pool]))

    @property
    def moved_bytes(self) -> int:
        """See `BlockStore`."""
        return self._file.moved_bytes

    def load(self, layer: int, runs: Sequence[Run], after: Event | None) -> Callable[[], None]:
        """See `BlockStore`."""
        return self._file.read(_of_layer(runs, layer, self._blocks))

    def save(self, layer: int, runs: Sequence[Run], after: Event | None) -> Callable[[], None]:
        """See `BlockStore`."""
        return self._file.write(_of_layer(runs, layer, self._blocks))

    def close(self) -> None:
        """See `BlockStore`."""
        self._file.close()


class HostBlocks:
    """Blocks in the host's pinned memory, for a device with memory of its own. pool: as in `DiskBlocks`."""

    def __init__(self, device: Device, link: Link, pool: Sequence[Tensor], layers: int, blocks: int):
        self._device, self._link, self._pool, self._blocks = device, link, pool, blocks
        self._pinned, self._kept = _pinned_planes(link, layers * blocks, pool)
        self.moved_bytes = 0  # nothing is on a disk

    def load(self, layer: int, runs: Sequence[Run], after: Event | None) -> Callable[[], None]:
        """See `BlockStore`."""
        return self._copy(runs, layer, after, to_device=True)

    def save(self, layer: int, runs: Sequence[Run], after: Event | None) -> Callable[[], None]:
        """See `BlockStore`."""
        return self._copy(runs, layer, after, to_device=False)

    def close(self) -> None:
        """See `BlockStore`."""
        self._link.unpin(self._pinned)

    def _copy(self, runs: Sequence[Run], layer: int, after: Event | None, *, to_device: bool) -> Callable[[], None]:
        end = after
        for block, place, size in _of_layer(runs, layer, self._blocks):
            for kept, there in zip(self._kept, self._pool, strict=True):
                host, device = kept[block : block + size], there[place : place + size]
                end = self._link.copy(*((host, device) if to_device else (device, host)), after)
        return partial(self._link.order, end)


class StagedBlocks:
    """Blocks in a file, for a device with memory of its own. pool: as in `DiskBlocks`.

    One thread moves all, in the order in which it was asked to; the disk reads ahead of what is copied.
    """

    def __init__(
        self, folder: Path, flag: str, device: Device, link: Link, pool: Sequence[Tensor], layers: int, blocks: int
    ) -> None:
        self._device, self._link, self._pool, self._blocks = device, link, pool, blocks
        self._most = max(1, STAGE_BYTES // sum(plane.shape[1] for plane in pool))
        self._pinned, self._stages = _pinned_planes(link, 2 * self._most, pool)  # the second stage behind the first
        self._file = BlockFile(folder, flag, layers * blocks, Memory([plane.numpy() for plane in self._stages]))
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="stage", initializer=device.activate)

    @property
    def moved_bytes(self) -> int:
        """See `BlockStore`."""
        return self._file.moved_bytes

    def load(self, layer: int, runs: Sequence[Run], after: Event | None) -> Callable[[], None]:
        """See `BlockStore`."""
        moved = self._worker.submit(self._load, _of_layer(runs, layer, self._blocks), after)
        return lambda: self._link.order(moved.result())

    def save(self, layer: int, runs: Sequence[Run], after: Event | None) -> Callable[[], None]:
        """See `BlockStore`."""
        moved = self._worker.submit(self._save, _of_layer(runs, layer, self._blocks), after)
        return moved.result

    def close(self) -> None:
        """See `BlockStore`."""
        self._worker.shutdown()
        self._file.close()
        self._link.unpin(self._pinned)

    @torch.inference_mode()  # as whatever has the pool was made, and each thread has to say so
    def _load(self, runs: Sequence[Run], after: Event | None) -> Event | None:
        """Returns the end of the last copy, which is reached."""
        ends: list[Event | None] = [None, None]
        try:
            for number, (run, staged) in enumerate(self._staged(runs)):
                _reached(ends[number % 2])  # its stage is free again
                self._file.read([staged])()
                ends[number % 2] = self._copy(run, staged, after, to_device=True)
        finally:
            for end in ends:
                _reached(end)
        return ends[0]

    @torch.inference_mode()
    def _save(self, runs: Sequence[Run], after: Event | None) -> None:
        writing: list[Callable[[], None]] = []
        try:
            for run, staged in self._staged(runs):
                if len(writing) == 2:
                    writing.pop(0)()  # its stage is free again
                _reached(self._copy(run, staged, after, to_device=False))
                writing.append(self._file.write([staged]))
        finally:
            _all(writing)()

    def _staged(self, runs: Sequence[Run]) -> list[tuple[Run, Run]]:
        """The runs in pieces of a stage, each with the same blocks in the stages by turns."""
        pieces = [piece for run in runs for piece in run.cut(self._most)]
        return [(run, run._replace(place=number % 2 * self._most)) for number, run in enumerate(pieces)]

    def _copy(self, run: Run, staged: Run, after: Event | None, *, to_device: bool) -> Event | None:
        end = after
        for stage, there in zip(self._stages, self._pool, strict=True):
            host, device = stage[staged.place : staged.place + run.length], there[run.place : run.place + run.length]
            end = self._link.copy(*((host, device) if to_device else (device, host)), after)
        return end


class DividedBlocks:
    """The first blocks in one store, those behind them in the next, and so on. stores: each with how many it has."""

    def __init__(self, stores: Sequence[tuple[int, BlockStore]]):
        self._stores = stores

    @property
    def moved_bytes(self) -> int:
        """See `BlockStore`."""
        return sum(store.moved_bytes for _, store in self._stores)

    def load(self, layer: int, runs: Sequence[Run], after: Event | None) -> Callable[[], None]:
        """See `BlockStore`."""
        return _all([store.load(layer, own, after) for store, own in self._divided(runs)])

    def save(self, layer: int, runs: Sequence[Run], after: Event | None) -> Callable[[], None]:
        """See `BlockStore`."""
        return _all([store.save(layer, own, after) for store, own in self._divided(runs)])

    def close(self) -> None:
        """See `BlockStore`."""
        for _, store in self._stores:
            store.close()

    def _divided(self, runs: Sequence[Run]) -> list[tuple[BlockStore, list[Run]]]:
        first, found = 0, []
        for blocks, store in self._stores:
            own = [_within(run, first, first + blocks) for run in runs]
            if any(run.length for run in own):
                found.append((store, [run._replace(block=run.block - first) for run in own if run.length]))
            first += blocks
        return found


def _pinned_planes(link: Link, blocks: int, pool: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Pinned memory for so many blocks, and planes in it as the pool has them, each of which begins a page."""
    sizes = [page_aligned(blocks * plane.shape[1]) for plane in pool]
    pinned = link.pinned(sum(sizes))
    pieces = pinned[: sum(sizes)].split(sizes)
    return pinned, [
        piece[: blocks * plane.shape[1]].view(blocks, plane.shape[1]) for piece, plane in zip(pieces, pool, strict=True)
    ]


def _reached(event: Event | None) -> None:
    if event is not None:
        event.synchronize()


def _within(run: Run, first: int, end: int) -> Run:
    """The part of a run whose blocks are first … end - 1."""
    skipped = max(0, first - run.block)
    return Run(run.block + skipped, run.place + skipped, max(0, min(run.length, end - run.block) - skipped))


def _all(waits: Sequence[Callable[[], None]]) -> Callable[[], None]:
    def finish() -> None:
        errors: list[RuntimeError] = []
        for wait in waits:
            try:
                wait()
            except RuntimeError as error:  # the others are waited for, too
                errors.append(error)
        if errors:
            raise errors[0]

    return finish


def _of_layer(runs: Sequence[Run], layer: int, blocks: int) -> list[Run]:
    """The runs in a store that keeps `blocks` for each layer, one layer behind the other."""
    return [run._replace(block=layer * blocks + run.block) for run in runs]
