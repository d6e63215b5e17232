"""When a stream is too much for its client: what waits counts, beside what was written at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.http.responses import MAX_UNREAD_BYTES, EventStream


class Connection:
    """Of a client that reads all but the last write, or nothing."""

    def __init__(self, is_read: bool) -> None:
        self.is_cut = False
        self._is_read = is_read
        self._num_unread = 0

    def write_chunk(self, data: bytes) -> int:
        self._num_unread = len(data) + (0 if self._is_read else self._num_unread)
        return self._num_unread

    def cut(self) -> None:
        self.is_cut = True


class Opened:
    """One event after the other, each for one write; after the last it is over."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.error: Exception | None = None

    @property
    def is_over(self) -> bool:
        return not self.sizes

    async def next_events(self) -> list[tuple[int, list[int]]]:
        return [(0, [self.sizes.pop(0)])]

    def fail(self, error: Exception) -> None:
        self.error = error


class Frames:
    def write(self, index: int, events: list[int]) -> bytes:
        return b"x" * events[0]


@pytest.mark.parametrize(
    ("sizes", "is_read", "is_cut"),
    [
        ([100, 100], True, False),
        ([100, 3 * MAX_UNREAD_BYTES, 100, 100], True, False),  # the whole text of an item, told again
        ([100, 3 * MAX_UNREAD_BYTES, 100, 100], False, False),
        ([3 * MAX_UNREAD_BYTES] * 3, False, True),
        ([100] * MAX_UNREAD_BYTES, False, True),
    ],
)
def test_one_large_write_is_no_sign_of_a_slow_client(sizes: list[int], is_read: bool, is_cut: bool) -> None:
    connection, opened = Connection(is_read), Opened([*sizes])
    stream: Any = EventStream(opened, Frames(), [(0, [100])], {})  # type: ignore[arg-type]
    asyncio.run(stream._write_events(connection))
    assert (is_cut, is_cut) == (connection.is_cut, opened.error is not None)
