"""Answers that wait in this process for their clients: all of them together keep within a bound.

A permit is given back when an answer is computed, so permits do not bound what clients leave unread; and each byte has
`unread_timeout`, in which a hundred clients could each leave megabytes. When more waits than `max_unread_bytes`, the
client that has taken nothing for the longest is given up: one that reads takes something many times a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Reader(Protocol):
    """The sending side of a connection."""

    @property
    def num_unread(self) -> int:
        """Bytes that wait in this process."""

    @property
    def num_taken(self) -> int:
        """Bytes that no longer wait, since the connection began."""

    def reset(self) -> None:
        """Close at once, with all that waits."""


@dataclass(slots=True)
class _Waiting:
    """What was seen of one reader."""

    num_bytes: int
    num_taken: int
    taken_at: float  # when its number of taken bytes was first seen


class Unread:
    """What waits for the clients of all connections of one listener."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0  # as last seen: what clients have taken since makes it less
        self._waiting: dict[Reader, _Waiting] = {}

    def note(self, reader: Reader, now: float) -> None:
        """Bytes were added to what waits for a client. Resets connections if that is too much of all."""
        self._look(reader, now)
        if self._num_bytes > self._max_bytes:
            self._look_at_all(now)
            while self._num_bytes > self._max_bytes and len(self._waiting) > 1:  # one alone is no longer than an answer
                self._reset_slowest()

    def reset_slowest(self, now: float) -> bool:
        """Reset the connection whose client has taken nothing for the longest. Returns whether any waits."""
        self._look_at_all(now)
        return self._reset_slowest()

    def forget(self, reader: Reader) -> None:
        """Nothing waits for this client any more."""
        waiting = self._waiting.pop(reader, None)
        if waiting is not None:
            self._num_bytes -= waiting.num_bytes

    def _look_at_all(self, now: float) -> None:
        for reader in list(self._waiting):
            self._look(reader, now)

    def _look(self, reader: Reader, now: float) -> None:
        num_bytes = reader.num_unread
        if not num_bytes:
            self.forget(reader)
            return
        num_taken = reader.num_taken
        waiting = self._waiting.get(reader)
        if waiting is None:
            waiting = self._waiting[reader] = _Waiting(0, num_taken, now)
        if num_taken > waiting.num_taken:
            waiting.num_taken, waiting.taken_at = num_taken, now
        self._num_bytes += num_bytes - waiting.num_bytes
        waiting.num_bytes = num_bytes

    def _reset_slowest(self) -> bool:
        slowest = min(self._waiting, key=lambda reader: self._waiting[reader].taken_at, default=None)
        if slowest is None:
            return False
        self.forget(slowest)
        slowest.reset()
        return True
