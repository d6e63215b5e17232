"""Where blocks are that are not on the device: in the host's memory, on a disk, or on a disk behind the host.

A block is a layer's keys and values of some tokens, or a page of a layer's weights. On a CPU, blocks come from the disk
to where they are used (`disk_store.py`). A GPU copies them to and from pinned memory by itself, beside what it
computes; what is on a disk passes through a few pieces of such memory.

Left out: which blocks are where (`server/model/`).

Shapes: N blocks in memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from host.direct_io import PAGE, page_aligned
from server.backends.device import Device, Event, Link

STAGE_BYTES = 16 << 20  # of one piece of pinned memory between a disk and a GPU
STAGES = 4

Bytes = NDArray[np.uint8]
Wait = Callable[[], float | None]


class Run(NamedTuple):
    """Blocks that follow each other in a store and in memory."""

    block: int  # the first one in the store
    place: int  # and where it is in memory
    length: int

    def cut(self, most: int) -> Iterator[Run]:
        """The same in runs of at most so many blocks."""
        for start in range(0, self.length, most):
            yield Run(self.block + start, self.place + start, min(most, self.length - start))


class Memory:
    """Blocks in memory. planes: [N, bytes] uint8 each, contiguous: part of what every block holds."""

    def __init__(self, planes: Sequence[Tensor]):
        self.planes = planes
        self.plane_bytes = [plane.shape[1] for plane in planes]

    @property
    def block_bytes(self) -> int:
        """What one block holds."""
        return sum(self.plane_bytes)

    @cached_property
    def arrays(self) -> list[Bytes]:
        """The planes, where they are in the host's memory."""
        return [plane.numpy() for plane in self.planes]

    @cached_property
    def is_paged(self) -> bool:
        """Whether all pieces of blocks there are whole pages, which direct requests to a disk reach."""
        return all(plane.shape[1] % PAGE == 0 and plane.ctypes.data % PAGE == 0 for plane in self.arrays)

    def pieces(self, place: int, length: int) -> list[memoryview]:
        """So many blocks there from a place on, block by block, each plane by plane; what follows each other is one."""
        if len(self._views) == 1:
            ((view, size),) = self._views
            return [view[place * size : (place + length) * size]]
        numbers = range(place, place + length)
        return [view[number * size : (number + 1) * size] for number in numbers for view, size in self._views]

    @cached_property
    def _views(self) -> list[tuple[memoryview, int]]:
        return [(array.data.cast("B"), array.shape[1]) for array in self.arrays]

    def rows(self, place: int, length: int) -> list[Tensor]:
        """So many blocks from a place on, [length, bytes] of each plane."""
        return [plane[place : place + length] for plane in self.planes]


class Store(Protocol):
    """Keeps blocks of one size."""

    @property
    def moved_bytes(self) -> int:
        """What has been read from a disk and written to it so far: while it grows, a disk is slow and not stuck."""

    @property
    def is_direct(self) -> bool:
        """Whether what it reads from a disk passes the page cache by."""

    def add(self, blocks: int) -> int:
        """Have room for so many more. Returns the first one's number; runs do not reach over what was added at once."""

    def load(self, memory: Memory, runs: Sequence[Run], after: Event | None) -> Wait:
        """Begin to bring blocks to memory of the device, once that has reached `after`. Returns what waits for them.

        Waiting raises DiskError for blocks that cannot be read, and orders what the device computes from then on. It
        returns when the last byte had come, by `time.perf_counter`, or None where the host does not know.
        """

    def save(self, memory: Memory, runs: Sequence[Run], after: Event | None) -> Wait:
        """Begin to keep what blocks in memory of the device hold, once that has reached `after`. Returns what waits.

        Waiting raises DiskError for blocks that cannot be written; then their places may be used again.
        """

    def close(self) -> None:
        """Give back what the store holds, after what is being moved."""


class HostStore:
    """A `Store` in the host's pinned memory, for a device with memory of its own. plane_bytes: see `Memory`."""

    moved_bytes = 0  # nothing is on a disk
    is_direct = True

    def __init__(self, link: Link, plane_bytes: Sequence[int]):
        self._link, self._plane_bytes = link, plane_bytes
        self._blocks = 0
        self._firsts: list[int] = []  # of what was added at once
        self._kept: list[tuple[Tensor, Memory]] = []

    def add(self, blocks: int) -> int:
        self._kept.append(_pinned(self._link, blocks, self._plane_bytes))
        self._firsts.append(self._blocks)
        self._blocks += blocks
        return self._firsts[-1]

    def load(self, memory: Memory, runs: Sequence[Run], after: Event | None) -> Wait:
        return self._copy(memory, runs, after, to_device=True)

    def save(self, memory: Memory, runs: Sequence[Run], after: Event | None) -> Wait:
        return self._copy(memory, runs, after, to_device=False)

    def close(self) -> None:
        for pinned, _ in self._kept:
            self._link.unpin(pinned)
        self._kept.clear()

    def _copy(self, memory: Memory, runs: Sequence[Run], after: Event | None, *, to_device: bool) -> Wait:
        end = after
        for run in runs:
            index = bisect_right(self._firsts, run.block) - 1
            kept = run._replace(block=run.block - self._firsts[index])
            end = _copy(self._link, self._kept[index][1], memory, kept, after, to_device=to_device)
        return partial(self._link.order, end)


class StagedStore:
    """A `Store` behind a store of the host's memory, such as a disk's, for a device with memory of its own.

    One thread moves all, in the order in which it was asked to; the disk is ahead of what is copied, or behind it.
    """

    def __init__(self, store: Store, device: Device, link: Link, plane_bytes: Sequence[int]):
        self._store, self._link = store, link
        self._most = max(1, STAGE_BYTES // sum(plane_bytes))
        self._pinned, self._stages = _pinned(link, STAGES * self._most, plane_bytes)  # one stage behind the other
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="stage", initializer=device.activate)

    @property
    def moved_bytes(self) -> int:
        return self._store.moved_bytes

    @property
    def is_direct(self) -> bool:
        return self._store.is_direct

    def add(self, blocks: int) -> int:
        return self._store.add(blocks)

    def load(self, memory: Memory, runs: Sequence[Run], after: Event | None) -> Wait:
        moved = self._worker.submit(self._load, memory, runs, after)
        return lambda: self._link.order(moved.result())

    def save(self, memory: Memory, runs: Sequence[Run], after: Event | None) -> Wait:
        return self._worker.submit(self._save, memory, runs, after).result

    def close(self) -> None:
        self._worker.shutdown()
        self._store.close()
        self._link.unpin(self._pinned)

    @torch.inference_mode()  # as whatever has the memory was made, and each thread has to say so
    def _load(self, memory: Memory, runs: Sequence[Run], after: Event | None) -> Event | None:
        """Returns the end of the last copy, which is reached."""
        reading: deque[tuple[Run, Wait]] = deque()
        end = after

        def pass_on() -> None:
            nonlocal end
            run, finish = reading.popleft()
            finish()
            end = _copy(self._link, self._stages, memory, run, after, to_device=True)

        try:
            for staged, run in self._staged(runs):
                if len(reading) == STAGES:
                    pass_on()
                    _reached(end)  # its stage is free again
                reading.append((run, self._store.load(self._stages, [staged], None)))
            while reading:
                pass_on()
        finally:
            for _, finish in reading:
                with suppress(RuntimeError):  # one before it has failed
                    finish()
            _reached(end)
        return end

    @torch.inference_mode()
    def _save(self, memory: Memory, runs: Sequence[Run], after: Event | None) -> None:
        writing: deque[Wait] = deque()
        try:
            for staged, run in self._staged(runs):
                if len(writing) == STAGES:
                    writing.popleft()()  # its stage is free again
                _reached(_copy(self._link, self._stages, memory, run, after, to_device=False))
                writing.append(self._store.save(self._stages, [staged], None))
        finally:
            wait_for_all(writing)

    def _staged(self, runs: Sequence[Run]) -> Iterator[tuple[Run, Run]]:
        """The runs in pieces of a stage, which take stages by turns: between store and stage, then stage and memory."""
        for number, piece in enumerate(piece for run in runs for piece in run.cut(self._most)):
            stage = number % STAGES * self._most
            yield piece._replace(place=stage), piece._replace(block=stage)


def wait_for_all(waits: Iterable[Wait]) -> None:
    """Wait for each, whatever fails. Raises the first error."""
    errors = []
    for wait in waits:
        try:
            wait()
        except RuntimeError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _copy(link: Link, host: Memory, device: Memory, run: Run, after: Event | None, *, to_device: bool) -> Event | None:
    """Begin to copy between blocks of the host and places of the device. Returns the end."""
    end = after
    for kept, there in zip(host.rows(run.block, run.length), device.rows(run.place, run.length), strict=True):
        end = link.copy(*((kept, there) if to_device else (there, kept)), after)
    return end


def _pinned(link: Link, blocks: int, plane_bytes: Sequence[int]) -> tuple[Tensor, Memory]:
    """Pinned memory for so many blocks, and planes in it, each of which begins a page."""
    sizes = [page_aligned(blocks * size) for size in plane_bytes]
    pinned = link.pinned(sum(sizes))
    pieces = zip(pinned[: sum(sizes)].split(sizes), plane_bytes, strict=True)
    return pinned, Memory([piece[: blocks * size].view(blocks, size) for piece, size in pieces])


def _reached(event: Event | None) -> None:
    if event is not None:
        event.synchronize()
