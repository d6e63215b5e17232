"""One rank's tiers behind the device: slots in the host's memory, places on disk, and what moves blocks between them.

Blocks move between device and host within steps, in the order of the stream (`server/stepping/cache.py`), and
between host and disk here, in threads beside the steps, which never wait for a disk. Each thread has a buffer of one
block: a slot is written only when its content has come and its checksum is right, and is read before the disk is asked
to take it, so that a disk that hangs holds a thread and a buffer and nothing else. What waits has timers.

The router decides what moves where, and which slots are free at the moment. It may give a move up that is still
under way, and have a step save another block to its slots: from then on the move leaves them alone, or it would store
that block under the key of the one before. A router that starts anew opens a session; what one before it still has
under way then touches no slot any more.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import mmap
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from server.prefix.prefix_file import KEY_BYTES, MOST_PLACES, Damaged, DiskTrouble, Entry, PrefixFile

log = logging.getLogger(__name__)

STAGED_BYTES = 10**9  # of the host for blocks on their way from and to the disk, where the host has no tier of its own
READERS = 2  # one checks a block while the other one's is read
STEP_SECONDS = 60.0  # for a step that a move comes behind; those that take longer are rare, and the move is given up


class Slots(Protocol):
    """The host's tier as this module knows it."""

    @property
    def num_slots(self) -> int: ...

    @property
    def slot_bytes(self) -> int: ...

    @property
    def address(self) -> int:
        """Where slot 0 begins in this process's memory."""


@dataclass(frozen=True)
class TierConfig:
    """What this rank may take. identity: of whose blocks these are, known when the first router asks for them."""

    host_bytes: int  # 0: as many as the longest sequence has, on their way from and to the disk
    disk_bytes: int  # 0: there is no tier on disk
    folder: Path | None
    name: str  # of this rank's file, behind the identity
    identity: bytes


@dataclass(frozen=True)
class Contents:
    """What a router is told of the tiers."""

    num_slots: int
    num_places: int
    block_bytes: int
    entries: dict[int, Entry] = field(default_factory=dict)
    trouble: str = ""


@dataclass(frozen=True)
class Move:
    """Blocks that go from places of the disk to slots of the host, or the other way."""

    session: int
    after_step: int
    is_fetch: bool
    slots: Sequence[int]
    places: Sequence[int]
    keys: bytes  # one behind the other
    stamps: Sequence[int]  # none for a fetch

    def key(self, number: int) -> bytes:
        """That of the block of this number."""
        return self.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]


@dataclass
class Moved:
    """What became of a move."""

    is_moved: list[bool]
    damaged: int = 0
    trouble: str = ""
    is_full: bool = False
    is_lost: bool = False


class Session:
    """Whose tiers these are: the router that asked last. Slots are written only under its lock and in its name."""

    def __init__(self) -> None:
        self.number = 0
        self._lock = threading.Lock()
        self._step = 0  # the last one that is finished
        self._saved: dict[int, int] = {}  # slot -> the last step that saved a block to it
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def begin(self, number: int) -> None:
        """From here on."""
        with self._lock:
            self.number, self._step = number, 0
            self._saved.clear()

    @contextmanager
    def holds(self, number: int) -> Iterator[bool]:
        """Whether it is this one, and for as long as the block lasts."""
        with self._lock:
            yield number == self.number

    def saved(self, slots: Sequence[int], step: int) -> None:
        """A step of this session saves blocks to these slots. While it is held, as the next."""
        for slot in slots:
            self._saved[slot] = step

    def is_given_up(self, slot: int, after_step: int) -> bool:
        """Whether a later step has saved another block to the slot of a move behind that step."""
        return self._saved.get(slot, 0) > after_step

    def finished(self, number: int, step: int) -> None:
        """A step of session `number` is done, failed or not. On the event loop, as the next."""
        if number == self.number:
            self._step = max(self._step, step)
            for after, waiting in self._waiting:
                if after <= self._step and not waiting.done():
                    waiting.set_result(None)

    async def after(self, number: int, step: int) -> bool:
        """Wait until the step is done. False where the session has ended, or the step takes too long."""
        if step > self._step and number == self.number:
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append((step, waiting))
            try:
                async with asyncio.timeout(STEP_SECONDS):
                    await waiting
            except TimeoutError:
                return False
            finally:
                self._waiting.remove((step, waiting))
        return number == self.number


class Tiers:
    """The tiers of one rank."""

    def __init__(self, config: TierConfig) -> None:
        self.config = config
        self.session = Session()
        self._file: PrefixFile | None = None
        self._trouble = ""
        self._slots: Slots | None = None
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="fetch")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._buffers = threading.local()

    def num_slots(self, block_bytes: int, longest: int) -> int:
        """How many blocks the host holds. longest: blocks of the longest sequence."""
        config = self.config
        if config.host_bytes:
            return max(1, min(config.host_bytes // block_bytes, MOST_PLACES))
        return max(1, min(longest, STAGED_BYTES // block_bytes))

    def open(self, slots: Slots, session: int, *, has_rings: bool = False) -> Contents:
        """For a new router; the first one opens the file. What the host holds is forgotten.

        has_rings: whether windowed layers have rings, so that blocks hold nothing of them: such blocks are of no use to
        a server without, and the other way round.
        """
        config = self.config
        if self._slots is None and config.disk_bytes and config.folder is not None:
            name = f"{config.identity.hex()}{'-rings' if has_rings else ''}-{config.name}"
            try:
                if config.disk_bytes < slots.slot_bytes:
                    raise DiskTrouble(
                        f"--prefix-cache-disk-gb leaves {config.disk_bytes} bytes to each shard, and a block has "
                        f"{slots.slot_bytes}: raise it"
                    )
                self._file = PrefixFile(config.folder, name, config.identity, slots.slot_bytes, config.disk_bytes)
                self._say_what_is_left(self._file)
            except DiskTrouble as trouble:
                self._trouble = str(trouble)
        self._slots = slots
        self.session.begin(session)
        if self._file is None:
            return Contents(slots.num_slots, 0, slots.slot_bytes, trouble=self._trouble)
        return Contents(slots.num_slots, self._file.num_places, slots.slot_bytes, dict(self._file.entries))

    def _say_what_is_left(self, file: PrefixFile) -> None:
        """Warn, once for all ranks, where the file can never be as large as the settings allow."""
        asked, most = self.config.disk_bytes, MOST_PLACES * file.place_bytes
        if asked > most and self.config.name.startswith("0-of-"):
            log.warning(
                "--prefix-cache-disk-gb asks for %.2f GB in each shard, of which %.2f GB are used: a file has at most "
                "%d blocks",
                asked / 1e9,
                most / 1e9,
                MOST_PLACES,
            )

    async def move(self, move: Move) -> Moved:
        """Do it, behind the step that it names. One that is cancelled stops behind the block that is under way."""
        if self._file is None or self._slots is None or not await self.session.after(move.session, move.after_step):
            return Moved([False] * len(move.slots))
        stopped = threading.Event()
        threads = self._readers if move.is_fetch else self._writer
        moving = asyncio.get_running_loop().run_in_executor(threads, self._move, move, self._file, self._slots, stopped)
        try:
            return await moving
        finally:
            stopped.set()

    def _move(self, move: Move, file: PrefixFile, slots: Slots, stopped: threading.Event) -> Moved:
        moved = Moved([False] * len(move.slots))
        for number, (slot, place) in enumerate(zip(move.slots, move.places, strict=True)):
            if stopped.is_set():
                break
            if not (0 <= slot < slots.num_slots and 0 <= place < file.num_places):
                raise ValueError(f"slot {slot} of {slots.num_slots} and place {place} of {file.num_places}")
            try:
                move_one = self._fetch if move.is_fetch else self._store
                moved.is_moved[number] = move_one(file, slots, move, number)
            except Damaged:
                moved.damaged += 1
            except DiskTrouble as trouble:
                moved.trouble, moved.is_full, moved.is_lost = str(trouble), trouble.is_full, not trouble.is_full
                break
        return moved

    def _fetch(self, file: PrefixFile, slots: Slots, move: Move, number: int) -> bool:
        """One block to the host; False where the slot is not the move's any more. Raises Damaged and DiskTrouble."""
        buffer = self._buffer(file)
        file.read(move.places[number], move.key(number), memoryview(buffer))
        with self._holds(move, number) as is_ours:
            if is_ours:
                _copy(slots.address + move.slots[number] * slots.slot_bytes, _address(buffer), slots.slot_bytes)
        return is_ours

    def _store(self, file: PrefixFile, slots: Slots, move: Move, number: int) -> bool:
        """One block to the disk; False where the slot is not the move's any more. Raises DiskTrouble."""
        buffer = self._buffer(file)
        with self._holds(move, number) as is_ours:
            if is_ours:
                _copy(_address(buffer), slots.address + move.slots[number] * slots.slot_bytes, slots.slot_bytes)
        if is_ours:
            file.write(move.places[number], move.key(number), move.stamps[number], memoryview(buffer))
        return is_ours

    @contextmanager
    def _holds(self, move: Move, number: int) -> Iterator[bool]:
        """Whether the slot of this block is the move's, and for as long as the block lasts."""
        with self.session.holds(move.session) as is_ours:
            yield is_ours and not self.session.is_given_up(move.slots[number], move.after_step)

    def _buffer(self, file: PrefixFile) -> mmap.mmap:
        """This thread's: of one place, and aligned as pages are."""
        if not hasattr(self._buffers, "memory"):
            self._buffers.memory = mmap.mmap(-1, file.place_bytes)
        memory: mmap.mmap = self._buffers.memory
        return memory

    def close(self) -> None:
        """Do not wait: threads at the disk stop behind the block that is under way."""
        self.session.begin(0)
        for threads in (self._readers, self._writer):
            threads.shutdown(wait=False, cancel_futures=True)


def _address(buffer: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _copy(target: int, source: int, count: int) -> None:
    """Bytes from one address to another; the interpreter goes on with other threads meanwhile."""
    ctypes.memmove(target, source, count)
