"""One rank's blocks on disk: a file of places of one size, and beside it what each place holds.

A place is written and read whole, past the page cache, which would otherwise push out the weights and all else. What it
holds is a key, a number that the router gave with it, and a checksum over key and content (CRC-32, which finds every
flip of up to three bits and all but one in four thousand million of whatever else can happen to a block). Nothing is
synced and nothing has an order: whatever a crash, a full disk or another program leaves behind is a checksum that is
wrong, and then a block that is not there.

Left out: which blocks are worth their place (the router's), threads (`mover.py`), and protection from writers of the
file: it is its owner's alone, and it holds what was asked and answered in a form that can be read back.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from host.direct_io import ALIGNMENT, Call, open_direct, transfer
from host.folders import make_private, refuse_memory

KEY_BYTES = 16
MOST_PLACES = 2**20  # what a place holds is told to the router at its start, in 28 bytes
HEADER = struct.Struct("<8s16sQ32x")  # what it is, whose blocks these are, bytes of a block
MAGIC = b"lockKV-1"
ENTRY = struct.Struct("<16sQII")  # key, stamp, checksum of key and content, checksum of all that
LOCK_SECONDS = 3.0  # for a server before this one to let go of the file
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskTrouble(Exception):
    """The disk does not do what it should, in one sentence. is_full: it has no room; else it is of no use any more."""

    def __init__(self, sentence: str, *, is_full: bool = False) -> None:
        super().__init__(sentence)
        self.is_full = is_full


class Damaged(Exception):
    """A place does not hold what was written there."""


@dataclass(frozen=True)
class Entry:
    """What a place holds."""

    key: bytes
    stamp: int
    checksum: int


class PrefixFile:
    """Places 0 … num_places - 1 for blocks of `block_bytes`. Raises DiskTrouble where the file cannot be used.

    name: of the file in the folder, which are made where they are not there; identity: of whose blocks these are, 16
    bytes; max_bytes: of the file. Not for several threads at one place.
    """

    def __init__(self, folder: Path, name: str, identity: bytes, block_bytes: int, max_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.place_bytes = -(-block_bytes // ALIGNMENT) * ALIGNMENT
        self.num_places = min(max_bytes // self.place_bytes, MOST_PLACES)
        self.entries: dict[int, Entry] = {}
        self._path = folder / f"{name}.blocks"
        self._descriptors: list[int] = []
        try:
            make_private(folder)
            refuse_memory(folder, "--prefix-cache-dir")
            self._index = self._open(folder / f"{name}.index", 0)
            self._lock()
            self._file, self._is_direct = open_direct(lambda flags: self._open(self._path, flags))
            self._read_index(HEADER.pack(MAGIC, identity, block_bytes))
        except OSError as error:
            self.close()
            raise DiskTrouble(f"{error.filename or self._path}: {error.strerror}") from None
        except ValueError as error:  # before anything was opened
            raise DiskTrouble(str(error)) from None
        except DiskTrouble:
            self.close()
            raise

    def _open(self, path: Path, flags: int) -> int:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
        self._descriptors.append(descriptor)
        os.fchmod(descriptor, 0o600)  # one that was there may have had another mode
        return descriptor

    def _lock(self) -> None:
        until = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                return fcntl.flock(self._index, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise DiskTrouble(f"{self._path} is in use by another server of the same model") from None
            time.sleep(0.05)

    def _read_index(self, header: bytes) -> None:
        """What places hold, of those that there are; nothing where the file is another's or was cut."""
        if os.pread(self._index, HEADER.size, 0) != header:
            os.ftruncate(self._index, 0)
            os.pwrite(self._index, header, 0)
        if os.fstat(self._file).st_size > self.num_places * self.place_bytes:
            os.ftruncate(self._file, self.num_places * self.place_bytes)
        written = min(os.fstat(self._file).st_size // self.place_bytes, self.num_places)
        rows = os.pread(self._index, self.num_places * ENTRY.size, HEADER.size)
        for place in range(min(written, len(rows) // ENTRY.size)):
            row = rows[place * ENTRY.size : (place + 1) * ENTRY.size]
            key, stamp, checksum, own = ENTRY.unpack(row)
            if own == zlib.crc32(row[:-4]) and any(key):
                self.entries[place] = Entry(key, stamp, checksum)

    def read(self, place: int, key: bytes, buffer: memoryview) -> None:
        """Fill the first `block_bytes` of the buffer, which is aligned and as long as a place.

        Raises Damaged where they are not what was written under this key, and DiskTrouble.
        """
        entry = self.entries.get(place)
        if entry is None or entry.key != key:
            raise Damaged
        try:
            count = self._transfer(os.preadv, place, buffer)
        except OSError as error:
            self.forget(place)
            raise DiskTrouble(f"{self._path} cannot be read: {error.strerror}") from None
        # What is missing, where the file has been cut, shows in the checksum.
        buffer[count : self.place_bytes] = bytes(self.place_bytes - count)
        if _checksum(key, buffer[: self.block_bytes]) != entry.checksum:
            self.forget(place)
            raise Damaged

    def write(self, place: int, key: bytes, stamp: int, buffer: memoryview) -> None:
        """Write what `read` will find. Raises DiskTrouble; then the place holds nothing."""
        self.forget(place)
        try:
            if not os.fstat(self._file).st_nlink:
                raise DiskTrouble(f"{self._path} was removed")
            if self._transfer(os.pwritev, place, buffer) < self.place_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # part of a block is what fits
            if not self._is_direct:
                os.fdatasync(self._file)  # the kernel keeps what is not on disk yet
                os.posix_fadvise(self._file, place * self.place_bytes, self.place_bytes, os.POSIX_FADV_DONTNEED)
            entry = Entry(key, stamp, _checksum(key, buffer[: self.block_bytes]))
            row = ENTRY.pack(key, stamp, entry.checksum, 0)[:-4]
            os.pwrite(self._index, row + zlib.crc32(row).to_bytes(4, "little"), HEADER.size + place * ENTRY.size)
        except OSError as error:
            sentence = f"{self._path} cannot be written: {error.strerror}"
            raise DiskTrouble(sentence, is_full=error.errno in NO_ROOM) from None
        self.entries[place] = entry

    def _transfer(self, call: Call, place: int, buffer: memoryview) -> int:
        """Move a place from or to the buffer. Returns how many bytes were."""
        pieces = [buffer[: self.place_bytes]]
        return transfer(call, self._file, pieces, place * self.place_bytes, is_direct=self._is_direct)

    def forget(self, place: int) -> None:
        """The place holds nothing any more, for later servers too where the disk takes that."""
        if self.entries.pop(place, None) is not None:
            with suppress(OSError):  # the checksum tells as well
                os.pwrite(self._index, bytes(ENTRY.size), HEADER.size + place * ENTRY.size)

    def close(self) -> None:
        """Let go of the file, and of its lock."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def _checksum(key: bytes, content: memoryview) -> int:
    return zlib.crc32(content, zlib.crc32(key))
