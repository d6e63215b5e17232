"""Blocks in a file without a name, read and written past the page cache.

The file is gone when its process is, however that ends. A block is one slot of the file, of whole pages. In memory what
it holds may lie apart, in planes, so that a request to the disk gathers pieces of memory (`preadv`), a few large
requests at a time. Where planes are no whole pages, direct requests cannot reach them, and what is moved is copied once
more, through a buffer of each thread.

Left out: finding the file again at the next start. Reading a checkpoint and packing it takes longer than writing it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np

from host.direct_io import page_aligned, transfer
from host.folders import open_unnamed
from server.backends.device import Event, map_pages
from server.offload.stores import Bytes, Memory, Run, Wait

READ_BYTES = 8 << 20  # of one request to the disk
READS = 4  # requests under way: a disk of today wants more than one
MOST_PIECES = 1024  # of memory, that a system call takes


class DiskError(RuntimeError):
    """The disk does not hold what it must, or no longer: one sentence for people."""


class DiskStore:
    """See `Store`: blocks in a file that no other process can open, for memory of the host.

    folder: on a disk; flag: the setting that names it; holds: what the blocks are of, for sentences. Raises ValueError
    for a folder that cannot have such a file.
    """

    def __init__(self, folder: Path, flag: str, holds: str, block_bytes: int):
        self.name, self._holds = f"{flag} {folder}", holds
        self.descriptor, self.is_direct = open_unnamed(folder, flag)
        self._slot_bytes = page_aligned(block_bytes)
        self._blocks = 0
        self._pool = ThreadPoolExecutor(READS, thread_name_prefix="offload")
        self._buffers = threading.local()
        self._counting = threading.Lock()
        self.moved_bytes = 0

    def reserve(self, blocks: int) -> None:
        """Add the first blocks, and take the disk's space for them. Raises ValueError where there is too little."""
        try:
            os.posix_fallocate(self.descriptor, 0, max(blocks, 1) * self._slot_bytes)
        except OSError as error:
            self.close()
            raise ValueError(
                f"{self.name}: {blocks * self._slot_bytes / 1e9:.2f} GB of {self._holds} do not fit there "
                f"({error.strerror}): free space there, or use a smaller --max-batch-total-tokens"
            ) from None
        self.add(blocks)

    def add(self, blocks: int) -> int:
        first, self._blocks = self._blocks, self._blocks + blocks
        return first

    def load(self, memory: Memory, runs: Sequence[Run], after: Event | None = None) -> Wait:
        return self._begin(memory, runs, is_write=False)

    def save(self, memory: Memory, runs: Sequence[Run], after: Event | None = None) -> Wait:
        return self._begin(memory, runs, is_write=True)

    def close(self) -> None:
        """See `Store`. Twice is as once: the descriptor's number is another's."""
        self._pool.shutdown()
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _begin(self, memory: Memory, runs: Sequence[Run], *, is_write: bool) -> Wait:
        """Share the runs out among the threads: in large requests, but so that each thread has one."""
        move = self._move if memory.is_paged else self._move_through
        most = max(1, READ_BYTES // self._slot_bytes)
        if len(memory.planes) > 1:
            most = min(most, MOST_PIECES // len(memory.planes))
        most = min(most, -(-sum(run.length for run in runs) // READS))

        def work(task: Sequence[Run]) -> float:
            for run in task:
                move(memory, run, is_write=is_write)
            return time.perf_counter()

        futures: list[Future[float]] = [self._pool.submit(work, task) for task in _tasks(runs, most)]

        def finish() -> float:
            wait(futures)
            return max((future.result() for future in futures), default=0.0)

        return finish

    def _move(self, memory: Memory, run: Run, *, is_write: bool) -> None:
        self._transfer(memory.pieces(run.place, run.length), run.block, is_write=is_write)

    def _move_through(self, memory: Memory, run: Run, *, is_write: bool) -> None:
        """Likewise by way of this thread's buffer, which has the blocks as the file has them."""
        if not hasattr(self._buffers, "memory"):
            self._buffers.memory = map_pages(max(READ_BYTES, self._slot_bytes)).numpy()
        buffer: Bytes = self._buffers.memory[: run.length * self._slot_bytes]
        slots, sides, start = buffer.reshape(run.length, self._slot_bytes), [], 0
        for plane in memory.arrays:
            end = start + plane.shape[1]
            sides.append((slots[:, start:end], plane[run.place : run.place + run.length]))
            start = end
        if is_write:
            for there, here in sides:
                np.copyto(there, here)
        self._transfer([buffer.data], run.block, is_write=is_write)
        if not is_write:
            for there, here in sides:
                np.copyto(here, there)

    def _transfer(self, pieces: Sequence[memoryview], block: int, *, is_write: bool) -> None:
        """Move the slots from a block on. Raises DiskError."""
        place, call = block * self._slot_bytes, os.pwritev if is_write else os.preadv
        try:
            count = transfer(call, self.descriptor, pieces, place, is_direct=self.is_direct)
        except OSError as error:
            done = "written" if is_write else "read back"
            raise DiskError(f"{self.name}: {self._holds} cannot be {done} ({error.strerror})") from None
        if count < sum(map(len, pieces)):
            raise DiskError(f"{self.name}: the file of {self._holds} ends at byte {place + count}")
        with self._counting:
            self.moved_bytes += count


def _tasks(runs: Sequence[Run], most: int) -> Iterator[list[Run]]:
    """Runs that a thread moves one behind the other, of about so many blocks together."""
    task: list[Run] = []
    room = most
    for part in (part for run in runs for part in run.cut(most)):
        if part.length > room:
            yield task
            task, room = [], most
        task.append(part)
        room -= part.length
    if task:
        yield task
