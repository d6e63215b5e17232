"""What a request needs beside the blocks of a prefix to go on from there, and the keys that this is kept under.

A layer whose blocks hold all tokens needs no more. A recurrent layer needs its state after the last of these tokens,
which is kept at places that all sequences have in common (`States`). A windowed layer that has a ring needs the tokens
that the next one sees, which are kept a block at a time, for whichever sequences have them in common (`Windows`). Both
are in blocks among all others, under keys of their own. Plain arithmetic over keys: `prefix_cache.py` has the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, Protocol

from router.scheduling.prefix_moves import KEY_BYTES
from router.scheduling.queue import blocks_for


class Checkpoints(Protocol):
    """How a model goes on from a prefix. keys: of the prefix's full blocks; a depth counts them from the first."""

    def needed(self, keys: Sequence[bytes], depth: int) -> list[bytes]:
        """What it takes beside the first `depth` blocks."""

    def places(self, depth: int) -> range:
        """The blocks of tokens that this is of, as many blocks for each; empty: it is of all of them together."""

    def deepest(self, keys: Sequence[bytes], most: int, holds: Callable[[bytes], bool]) -> int:
        """The largest depth up to `most` at which all is there that it takes; 0: there is none."""


class States(NamedTuple):
    """See `Checkpoints`."""

    distance: int  # blocks of tokens from one place to the next
    size: int  # blocks that the states of one sequence take

    def needed(self, keys: Sequence[bytes], depth: int) -> list[bytes]:
        return list(self._names(keys[depth - 1]))

    def places(self, depth: int) -> range:
        return range(0)

    def deepest(self, keys: Sequence[bytes], most: int, holds: Callable[[bytes], bool]) -> int:
        places = range(most - most % self.distance, 0, -self.distance)
        return next((depth for depth in places if all(map(holds, self._names(keys[depth - 1])))), 0)

    def _names(self, key: bytes) -> Iterator[bytes]:
        return named(key, self.size, b"state")


MOST_NAMED = 1 << 16  # blocks of tokens whose names are at hand


@dataclass(frozen=True)
class Windows:
    """See `Checkpoints`."""

    distance: int  # blocks of tokens from one place to the next at which prompts are kept, beside their ends
    size: int  # blocks that one block of tokens takes
    reach: int  # blocks of tokens that the next token sees
    most_at_once: int  # tokens of one sequence in a step at most
    _names: dict[bytes, list[bytes]] = field(default_factory=dict)

    def names(self, key: bytes) -> list[bytes]:
        """Of what is kept of the block of tokens with this key."""
        if key not in self._names:
            if len(self._names) == MOST_NAMED:
                self._names.clear()
            self._names[key] = list(named(key, self.size, b"window"))
        return self._names[key]

    def needed(self, keys: Sequence[bytes], depth: int) -> list[bytes]:
        return [name for place in self.places(depth) for name in self.names(keys[place])]

    def places(self, depth: int) -> range:
        return range(max(0, depth - self.reach), depth)

    def deepest(self, keys: Sequence[bytes], most: int, holds: Callable[[bytes], bool]) -> int:
        end = most  # of a run of blocks that are there, of which `place` is the first
        for place in range(most - 1, -1, -1):
            if not all(map(holds, self.names(keys[place]))):
                end = place
            elif end - place == self.reach or not place:
                return end
        return 0

    def passed(self, first: int, last: int, known: int, block_size: int) -> list[int]:
        """The depths at which a sequence is kept that a step brings from `first` to `last` of its `known` tokens."""
        step = self.distance * block_size
        depths = [place // block_size for place in range(first - first % step + step, last + 1, step)]
        end = (known - 1) // block_size  # the last token is computed again by whoever has the same
        return [*depths, end] if last == known and end not in (0, *depths) else depths

    def is_whole(self, depth: int, computed: int, block_size: int) -> bool:
        """Whether rings still have what is needed at a depth, once so many tokens are computed."""
        return blocks_for(computed, block_size) - depth <= blocks_for(self.most_at_once, block_size) + 1


def named(key: bytes, count: int, kind: bytes) -> Iterator[bytes]:
    """Keys of as many blocks, for what is kept under one key of a prefix. The first one is mostly all that is asked."""
    for place in range(count):
        yield blake2b(key + place.to_bytes(4, "little"), digest_size=KEY_BYTES, person=kind).digest()
