"""Files that are read and written with O_DIRECT, past the page cache, where the file system can do that.

Data that is larger than memory would evict everything else from the page cache, and each byte would be copied once
more. Where a file system has no direct I/O, the pages are dropped right after use. No torch here.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Sequence

PAGE = mmap.PAGESIZE  # what direct requests are multiples of, and memory for them is aligned to, on any file system
ALIGNMENT = 4096  # the same for files that another machine may read, whatever its pages are

Call = Callable[[int, Sequence[memoryview], int], int]  # such as `os.preadv`


def page_aligned(num_bytes: int) -> int:
    """The least multiple of a page that holds so many bytes."""
    return -(-num_bytes // PAGE) * PAGE


def open_direct(open_with: Callable[[int], int]) -> tuple[int, bool]:
    """What `open_with` opens when it is given flags, and whether that passes the page cache by. Raises OSError."""
    try:
        return open_with(os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return open_with(0), False


def transfer(
    call: Call,
    descriptor: int,
    pieces: Sequence[memoryview],
    place: int,
    *,
    is_direct: bool,
) -> int:
    """Move pieces of memory, one behind the other, from or to a place in a file. call: `os.preadv` or `os.pwritev`.

    Returns how many bytes were moved: fewer where the file ends, or takes no more. Raises OSError.
    """
    done = 0
    while pieces:
        count = call(descriptor, pieces, place + done)
        done += count
        if not count or count % ALIGNMENT:
            break
        pieces = _behind(pieces, count)
    if not is_direct:
        os.posix_fadvise(descriptor, place, done, os.POSIX_FADV_DONTNEED)
    return done


def _behind(pieces: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of the pieces after their first `count` bytes."""
    for index, piece in enumerate(pieces):
        if count < len(piece):
            return [piece[count:], *pieces[index + 1 :]]
        count -= len(piece)
    return []
