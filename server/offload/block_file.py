"""KV blocks in a file without a name, read and written past the page cache.

A block is one slot of the file: a layer's keys of its tokens, then their values, filled up to a whole page. In memory
these lie apart, in planes, so that a request to the disk gathers pieces of memory (`preadv`). Where they are no whole
pages, direct requests cannot reach them, and what is moved is copied once more, through a buffer of each thread.

The whole file is allocated when it is made: a disk without room for it is known before the first request is served.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from server.backends.pages import map_pages
from server.offload.disk import PAGE, READ_BYTES, READS, UnnamedFile, page_aligned

Bytes = NDArray[np.uint8]
MOST_PIECES = 1024  # of memory, that a system call takes


class Run(NamedTuple):
    """Blocks that follow each other in a store and in memory."""

    block: int  # the first one in the store
    place: int  # and where it is in memory
    length: int

    def cut(self, most: int) -> Iterator[Run]:
        """The same in runs of at most so many blocks."""
        for start in range(0, self.length, most):
            yield Run(self.block + start, self.place + start, min(most, self.length - start))


@dataclass(frozen=True)
class Memory:
    """Blocks in memory of the host. planes: [N, bytes] each, contiguous: part of what every block holds."""

    planes: Sequence[Bytes]

    @property
    def block_bytes(self) -> int:
        """What one block holds."""
        return sum(plane.shape[1] for plane in self.planes)

    @property
    def is_paged(self) -> bool:
        """Whether each piece is whole pages, which direct requests reach."""
        return all(plane.shape[1] % PAGE == 0 and plane.ctypes.data % PAGE == 0 for plane in self.planes)


class BlockFile:
    """A file of `count` slots, and the threads that move blocks between them and one memory.

    Raises ValueError where the folder has no room for the file.
    """

    def __init__(self, folder: Path, flag: str, count: int, memory: Memory):
        self._memory = memory
        self._views = [(plane.data.cast("B"), plane.shape[1]) for plane in memory.planes]
        self.slot_bytes = page_aligned(memory.block_bytes)
        self._file = UnnamedFile(folder, flag, "KV blocks")
        try:
            os.posix_fallocate(self._file.descriptor, 0, max(count, 1) * self.slot_bytes)
        except OSError as error:
            self._file.close()
            raise ValueError(
                f"{self._file.name}: {count * self.slot_bytes / 1e9:.2f} GB of KV blocks do not fit there "
                f"({error.strerror}): free space there, or use a smaller --max-batch-total-tokens"
            ) from None
        self._pool = ThreadPoolExecutor(READS, thread_name_prefix="kv-blocks")
        self._most = min(MOST_PIECES // len(memory.planes), max(1, READ_BYTES // self.slot_bytes))
        self._buffers: SimpleQueue[Bytes] = SimpleQueue()
        if not memory.is_paged:
            for _ in range(READS):
                self._buffers.put(map_pages(self._most * self.slot_bytes).numpy())

    @property
    def moved_bytes(self) -> int:
        """What has been read and written so far."""
        return self._file.moved_bytes

    def read(self, runs: Sequence[Run]) -> Callable[[], None]:
        """Begin to read blocks to their places. Returns what waits, which raises DiskError."""
        return self._begin(self._read if self._memory.is_paged else self._read_through, runs)

    def write(self, runs: Sequence[Run]) -> Callable[[], None]:
        """Begin to write blocks from their places. Returns what waits, which raises DiskError."""
        return self._begin(self._write if self._memory.is_paged else self._write_through, runs)

    def close(self) -> None:
        """Give the disk's space back, after what is being moved."""
        self._pool.shutdown()
        self._file.close()

    def _begin(self, move: Callable[[Run], None], runs: Sequence[Run]) -> Callable[[], None]:
        """Share the runs out among the threads: in large requests, but so that each thread has one."""
        each = min(self._most, -(-sum(run.length for run in runs) // READS))
        parts = [part for run in runs for part in run.cut(each)]
        tasks: list[list[Run]] = []
        room = 0
        for part in parts:
            if part.length > room:
                tasks.append([])
                room = each
            tasks[-1].append(part)
            room -= part.length

        def work(task: list[Run]) -> None:
            for part in task:
                move(part)

        futures: list[Future[None]] = [self._pool.submit(work, task) for task in tasks]

        def finish() -> None:
            wait(futures)
            for future in futures:
                future.result()

        return finish

    def _pieces(self, run: Run) -> list[memoryview]:
        """The memory of a run in the file's order, block by block."""
        places = range(run.place, run.place + run.length)
        return [view[place * size : (place + 1) * size] for place in places for view, size in self._views]

    def _read(self, run: Run) -> None:
        self._file.read(self._pieces(run), run.block * self.slot_bytes)

    def _write(self, run: Run) -> None:
        self._file.write(self._pieces(run), run.block * self.slot_bytes)

    def _read_through(self, run: Run) -> None:
        buffer = self._buffers.get()
        try:
            whole = buffer.data[: run.length * self.slot_bytes]
            self._file.read([whole], run.block * self.slot_bytes)
            for slots, memory in self._sides(buffer, run):
                np.copyto(memory, slots)
        finally:
            self._buffers.put(buffer)

    def _write_through(self, run: Run) -> None:
        buffer = self._buffers.get()
        try:
            for slots, memory in self._sides(buffer, run):
                np.copyto(slots, memory)
            whole = buffer.data[: run.length * self.slot_bytes]
            self._file.write([whole], run.block * self.slot_bytes)
        finally:
            self._buffers.put(buffer)

    def _sides(self, buffer: Bytes, run: Run) -> Iterator[tuple[Bytes, Bytes]]:
        """Each plane of a run, [length, bytes], as the buffer has it and as memory does."""
        slots = buffer[: run.length * self.slot_bytes].reshape(run.length, self.slot_bytes)
        start = 0
        for plane in self._memory.planes:
            yield slots[:, start : start + plane.shape[1]], plane[run.place : run.place + run.length]
            start += plane.shape[1]
