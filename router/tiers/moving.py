"""What moves between device, host and disk, as plain data that the planning of steps, the index and the wire share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class TierSizes:
    """What all ranks have room for."""

    num_slots: int = 0
    num_places: int = 0
    block_bytes: int = 0  # of one block, on all ranks together
    most_restored: int = 0  # blocks that one request's first step brings back to the device


class Stored(NamedTuple):
    """A block that the disk of every rank holds at the start."""

    key: bytes
    place: int
    stamp: int


class Saved(NamedTuple):
    """A block whose content a step copies to a slot of the host."""

    key: bytes
    block: int
    slot: int
    stamp: int


class Restored(NamedTuple):
    """A slot of the host whose content a step copies to a block."""

    key: bytes
    slot: int
    block: int


@dataclass(frozen=True, slots=True)
class Move:
    """Blocks on their way between host and disk."""

    is_fetch: bool
    keys: list[bytes]
    slots: list[int]
    places: list[int]
    stamps: list[int]  # none for a fetch
    after_step: int  # the last that has touched one of the slots


@dataclass(slots=True, eq=False)
class DiskWait:
    """A request that waits for blocks from the disk, until they have come or this is over."""

    num_blocks: int
    is_over: bool = False


@dataclass(slots=True)
class TierCounts:
    """What happened since the start of the router."""

    hits: dict[str, int] = field(default_factory=lambda: {"host": 0, "disk": 0})  # blocks brought back to the device
    written: dict[str, int] = field(default_factory=lambda: {"host": 0, "disk": 0})  # bytes, of all ranks
    read: dict[str, int] = field(default_factory=lambda: {"host": 0, "disk": 0})
    damaged: int = 0  # blocks whose checksums were wrong
    dropped: int = 0  # blocks that were not saved, for want of room
    given_up: int = 0  # requests that waited for the disk longer than it was worth
