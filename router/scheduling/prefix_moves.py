"""What of the prefix cache moves between device, host and disk, as plain data that plans, index and wire share.

`contents_of` and `moved_of` take the answers of all ranks together: only what every rank holds is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

KEY_BYTES = 16  # of the digest that names a block's content
RESTORED_BYTES = 2**30  # of a rank, that one step copies from the host to the device: a fraction of a second


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


@dataclass(frozen=True, slots=True)
class TierContents:
    """The tiers of one group of shards at its start."""

    sizes: TierSizes
    stored: list[Stored]
    rank_bytes: int  # of one block on the rank where it takes most
    trouble: str = ""  # why the disk is not used although it was asked for


@dataclass(frozen=True, slots=True)
class Moved:
    """What became of a move on all ranks."""

    is_moved: list[bool]
    num_damaged: int = 0
    trouble: str = ""
    is_full: bool = False
    is_lost: bool = False


def contents_of(replies: Sequence[Any]) -> TierContents:
    """One for each rank: `OpenTiersReply`."""
    held = [set(_rows(reply)) for reply in replies]
    trouble = next((reply.trouble for reply in replies if reply.trouble), "")
    most = max(reply.block_bytes for reply in replies)
    sizes = TierSizes(
        num_slots=min(reply.num_slots for reply in replies),
        num_places=0 if trouble else min(reply.num_places for reply in replies),
        block_bytes=sum(reply.block_bytes for reply in replies),
        most_restored=max(1, RESTORED_BYTES // max(most, 1)),
    )
    everywhere = set.intersection(*held)
    return TierContents(sizes, _distinct(everywhere, sizes.num_places), most, trouble)


def _rows(reply: Any) -> Iterator[Stored]:
    for number, (place, stamp) in enumerate(zip(reply.places, reply.stamps, strict=True)):
        yield Stored(reply.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES], place, stamp)


def _distinct(stored: set[Stored], num_places: int) -> list[Stored]:
    """Each key once: what a crash leaves behind may have a block twice."""
    by_key = {one.key: one for one in sorted(stored, key=lambda one: (one.stamp, one.place)) if one.place < num_places}
    return list(by_key.values())


def moved_of(replies: Sequence[Any], count: int) -> Moved:
    """One for each rank: `MoveBlocksReply`, about `count` blocks."""
    columns = [list(reply.is_moved) if len(reply.is_moved) == count else [False] * count for reply in replies]
    return Moved(
        is_moved=[all(column) for column in zip(*columns, strict=True)],
        num_damaged=sum(reply.damaged for reply in replies),
        trouble=next((reply.trouble for reply in replies if reply.trouble), ""),
        is_full=any(reply.is_full for reply in replies),
        is_lost=any(reply.is_lost for reply in replies),
    )
