"""Has the system read what comes next in a file of weights, while what has been read is converted.

A reader that waits for each page of a mapped file, and then computes while the disk rests, takes the sum of both times.
Of a file that is in memory already nothing is read. Where the system cannot be asked so (other than Linux), nothing is.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

AHEAD_BYTES = 256 << 20  # what may come in advance; memory that the system gives back when it is wanted
LENGTH_BYTES = 8  # of the number in front of a safetensors file's header


class ReadAhead:
    """Where the tensors of safetensors files end, and what of each file has been asked for."""

    def __init__(self) -> None:
        self._ends: dict[Path, dict[str, int]] = {}
        self._asked: dict[Path, tuple[int, int]] = {}  # the stretch that was asked for last

    def passed(self, path: Path, name: str) -> None:
        """A tensor of a file that is known to be whole is about to be read: what is behind it will be next."""
        if not hasattr(os, "posix_fadvise"):
            return
        if path not in self._ends:
            self._ends[path] = _ends_of(path)
        end = self._ends[path][name]
        first, last = self._asked.get(path, (0, 0))
        if first <= end and end + AHEAD_BYTES // 2 < last:
            return
        begin = last if first <= end < last else end
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, begin, end + AHEAD_BYTES - begin, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)
        self._asked[path] = begin, end + AHEAD_BYTES


def _ends_of(path: Path) -> dict[str, int]:
    """The end of each tensor in the file, in bytes from its beginning."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = json.loads(file.read(size))
    first = LENGTH_BYTES + size
    return {name: first + entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
