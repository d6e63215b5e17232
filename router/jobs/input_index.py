"""The first pass over a whole input: how many lines there are, which of them share a `custom_id`, and a digest.

It depends on the file alone, so that a job that is started again decides the same. For each `custom_id` a table keeps
10 bytes of a digest and the number of its first line: 16 bytes a slot, and two to four slots for each line that is long
enough to have an id. The table is a file without a name beside the output, mapped into memory: the kernel may write its
pages back and evict them, and its space is allocated before it is used, so that a full disk is an error at once.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from router.jobs.lines import InputChanged, LineFile, custom_id_of, naming_file

PIECE = 1 << 18  # bytes of one read
SLOT = 16  # bytes: 10 of a digest, which no two ids of a file share in practice, and 6 of a line's number
DIGEST = 10
LEAST_SLOTS = 1024
LEAST_LINE = len(b'{"custom_id":"a"}\n')  # no line with an id is shorter

# Called with the share of the work that is done, from 0 to 1, for every piece and line; it may raise to end the work.
OnProgress = Callable[[float], None]


class IdTable:
    """The first line of each id, by open addressing. Raises OSError where there is no space for it."""

    def __init__(self, num_ids: int, folder: Path) -> None:
        self._mask = max(LEAST_SLOTS, 1 << (2 * num_ids - 1).bit_length()) - 1
        self.num_bytes = (self._mask + 1) * SLOT
        with naming_file(folder), tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, self.num_bytes)
            self._slots = mmap.mmap(file.fileno(), self.num_bytes)

    def close(self) -> None:
        """Release its memory and its space."""
        self._slots.close()

    def note(self, custom_id: str, line: int) -> None:
        """Keep the line, unless an earlier one has the id."""
        digest, at = self._find(custom_id)
        if self._slots[at : at + DIGEST] != digest:
            self._slots[at : at + SLOT] = digest + line.to_bytes(SLOT - DIGEST)

    def first_line(self, custom_id: str) -> int:
        """The first line with an id; 0 where there is none."""
        _, at = self._find(custom_id)
        return int.from_bytes(self._slots[at + DIGEST : at + SLOT])

    def _find(self, custom_id: str) -> tuple[bytes, int]:
        """The id's digest, and the offset of its slot or of the free one for it."""
        digest = hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=DIGEST).digest()
        slot = int.from_bytes(digest[:8]) & self._mask
        while True:
            at = slot * SLOT
            found = self._slots[at : at + SLOT]
            if found[:DIGEST] == digest or not any(found[DIGEST:]):
                return digest, at
            slot = (slot + 1) & self._mask


@dataclass(frozen=True)
class InputIndex:
    """What is known of an input. num_lines: without blank ones. changed: its size and mtime when it was read."""

    path: Path
    num_lines: int
    num_bytes: int
    sha256: str
    ids: IdTable
    changed: tuple[int, int]

    def check_unchanged(self) -> None:
        """Raises InputChanged where the file is another one by now."""
        if _changed(self.path) != self.changed:
            raise InputChanged(f"{self.path} changed while it was read: put it back as it was, then start again")


def index_input(path: Path, folder: Path, most_bytes: int, advanced: OnProgress) -> InputIndex:
    """Read the whole file. Raises OSError and JobError.

    folder: for the table. most_bytes: longer lines are not parsed.
    """
    changed = _changed(path)
    size = max(1, changed[0])
    digest, num_ends, done = hashlib.sha256(), 0, 0
    with naming_file(path), path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE):
            digest.update(piece)
            num_ends += piece.count(b"\n")
            done += len(piece)
            advanced(done / size / 2)
    ids = IdTable(1 + min(num_ends, done // LEAST_LINE), folder)
    lines = LineFile(path, most_bytes)
    try:
        number = num_lines = offset = 0
        while (line := lines.read(number + 1, offset)) is not None:
            number, offset = line.number, line.end
            num_lines += not line.is_blank
            if (custom_id := custom_id_of(line)) is not None:
                ids.note(custom_id, number)
            advanced(0.5 + offset / size / 2)
        index = InputIndex(path, num_lines, done, digest.hexdigest(), ids, changed)
        index.check_unchanged()
    except BaseException:
        ids.close()
        raise
    finally:
        lines.close()
    return index


def _changed(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
