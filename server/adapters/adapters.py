"""The adapters of one rank: those whose files have been read, and which of them is in which row.

Files are read by a thread of its own, beside the steps; rows change between two steps, on the compute thread. What was
read stays on the host until it is forgotten, and where the device is the host, a row has the very same tensors.

Left out: which adapters are read, and which are in rows; the router says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


class Change(Protocol):
    """What an adapter makes of one layer, which knows how to put itself there."""

    @property
    def nbytes(self) -> int:
        """Memory that it takes in a row."""

    @property
    def is_capturable(self) -> bool:
        """Whether captured steps compute it."""

    def put(self, row: int) -> None:
        """Into a row of its layer."""

    def take_out(self, row: int) -> None:
        """The row is empty from now on."""


# Reads an adapter's files: what it makes of each layer of this rank. Raises AdapterError.
ReadChanges = Callable[[bytes, Path], list[Change]]


@dataclass
class Adapters:
    """See the module.

    read: what reads files; budget: bytes of all rows together, on the device; nothing: changes that change nothing, and
    yet are computed as others.
    """

    num_rows: int
    budget: int
    read: ReadChanges
    nothing: Callable[[], list[Change]] = list
    _prepared: dict[bytes, list[Change]] = field(default_factory=dict)
    _placed: dict[int, list[Change]] = field(default_factory=dict)

    def prepare(self, key: bytes, folder: Path) -> int:
        """Read an adapter, unless it is there; returns the bytes that it takes in a row. Raises AdapterError."""
        if (changes := self._prepared.get(key)) is None:
            changes = self._prepared[key] = self.read(key, folder)
        return sum(change.nbytes for change in changes)  # which another thread may have let go of by now

    def forget(self, key: bytes) -> None:
        """Let go of what was read. A row that has it keeps it."""
        self._prepared.pop(key, None)

    def forget_all_but(self, kept: Collection[bytes]) -> None:
        """The same, of all others."""
        for key in self._prepared.keys() - kept:
            self.forget(key)

    def place(self, places: Iterable[tuple[int, bytes]]) -> None:
        """Have rows hold prepared adapters, or with an empty key nothing. If that fails, all of these rows are empty.

        Raises ValueError for what breaks the wire's contract.
        """
        places = [*places]
        for row, _ in places:
            if not 0 < row <= self.num_rows:
                raise ValueError(f"an adapter goes to row {row}, but there are rows 1 to {self.num_rows}")
            self._empty(row)  # all of them first: what they held makes room
        try:
            for row, key in places:
                if key:
                    self._fill(row, key)
        except BaseException:
            for row, _ in places:
                self._empty(row)
            raise

    def _fill(self, row: int, key: bytes) -> None:
        if (changes := self._prepared.get(key)) is None:
            raise ValueError(f"adapter {key.hex()} goes to row {row}, but it is not prepared")
        self._put(row, changes)

    def _put(self, row: int, changes: list[Change]) -> None:
        self._placed[row] = changes
        for change in changes:
            change.put(row)

    def _empty(self, row: int) -> None:
        for change in self._placed.pop(row, ()):
            change.take_out(row)

    def clear(self) -> None:
        """Empty all rows."""
        for row in [*self._placed]:
            self._empty(row)

    @contextmanager
    def rehearsing(self) -> Iterator[int]:
        """A row whose adapter changes nothing, and yet is computed as others; all rows are empty before and after."""
        assert not self._placed
        self._put(1, self.nothing())
        try:
            yield 1
        finally:
            self._empty(1)

    def are_capturable(self, rows: Iterable[int]) -> bool:
        """Whether captured steps compute what is in these rows."""
        return all(change.is_capturable for row in rows for change in self._placed.get(row, ()))

    @property
    def rows(self) -> Mapping[int, list[Change]]:
        """What each row has that is not empty."""
        return self._placed
