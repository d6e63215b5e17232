"""The host's tier of the prefix cache as steps know it: blocks are saved to slots and restored from them, in order.

Steps alone move blocks between device and host, so that a copy has its place among the computations that write and read
the same blocks. Saves come first, of what the steps before have computed, then restores, then the step's computation.
Left out: the disk (`server/prefix/`), and which slot holds what (the router knows).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from server.backends.device import HostCopies
from server.stepping.sequences import StepError


class Session(Protocol):
    """Whose slots these are."""

    def holds(self, number: int) -> AbstractContextManager[bool]:
        """Whether it is session `number`, and for as long as the block lasts."""

    def saved(self, slots: Sequence[int], step: int) -> None:
        """Step `step` saves blocks to these slots, while it is held."""


class HostSlots:
    """The slots of one rank. session: what a router before the one that serves has under way is not of it."""

    def __init__(self, copies: HostCopies, num_blocks: int, session: Session):
        self._copies = copies
        self._num_blocks = num_blocks
        self._session = session

    @property
    def num_slots(self) -> int:
        """How many blocks the host holds."""
        return self._copies.num_slots

    @property
    def slot_bytes(self) -> int:
        """Memory of one."""
        return self._copies.slot_bytes

    @property
    def address(self) -> int:
        """Where slot 0 begins in this process's memory."""
        return self._copies.address

    def move(
        self,
        session: int,
        step: int,
        saved: tuple[Sequence[int], Sequence[int]],
        restored: tuple[Sequence[int], Sequence[int]],
    ) -> None:
        """Save (blocks, slots) and restore (slots, blocks). Raises StepError for one that there is not."""
        self._check(*saved)
        self._check(*restored[::-1])
        with self._session.holds(session) as is_ours:
            if is_ours:
                self._session.saved(saved[1], step)
                self._copies.save(*saved)
                self._copies.restore(*restored)

    def close(self) -> None:
        """Give back the host's memory."""
        self._copies.close()

    def _check(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        if len(blocks) != len(slots):
            raise StepError(f"{len(blocks)} blocks and {len(slots)} slots of the host do not make pairs")
        if max(blocks, default=0) >= self._num_blocks or max(slots, default=0) >= self.num_slots:
            raise StepError(f"blocks are below {self._num_blocks} and slots of the host below {self.num_slots}")
