"""The sequences of a step in parts whose blocks fit into one area of staging, and where the blocks are there.

A part's tables are built once in a step and serve every layer: what differs from one layer to the next is where the
layer's resident blocks begin, and which area is visited.

Shapes: S sequences, W blocks of the longest of them, T tokens in the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from server.backends.device import Device
from server.backends.protocol import StepMeta
from server.blocks import BLOCK_SIZE, num_blocks
from server.offload.staging import NOTHING, Moved


class Reach(NamedTuple):
    """The blocks that one sequence attends to, of which tokens start … start + length - 1 are written in this step."""

    blocks: Sequence[int]
    start: int
    length: int

    @property
    def attended(self) -> Sequence[int]:
        """Blocks that hold something after the step."""
        return self.blocks[: num_blocks(self.start + self.length)]

    def read(self, window: int) -> Sequence[int]:
        """Blocks whose content from before the step is needed. window: tokens that a token sees, 0 for all."""
        first = max(0, self.start - window + 1) // BLOCK_SIZE if window else 0
        return self.blocks[first : num_blocks(self.start)]

    @property
    def written(self) -> Sequence[int]:
        """Blocks that change."""
        return self.attended[self.start // BLOCK_SIZE :] if self.length else ()


@dataclass
class Part:
    """Some sequences of a step that follow each other."""

    meta: StepMeta  # of these sequences alone, with the router's ids in its tables
    tokens: slice  # of the step
    is_resident: Tensor  # [S, W]
    table: Tensor  # [S, W] a resident block's id, another one's place in its area
    places: dict[int, int]  # block in the stores -> place in the area
    reaches: Sequence[Reach]
    resident: int  # ids below it are resident
    moves: bool = True  # otherwise what is written is scratch, and nothing is read
    writes: Moved = NOTHING
    _reads: dict[int, Moved] = field(default_factory=dict)  # by window

    def __post_init__(self) -> None:
        if self.moves:
            self.writes = self._moved(reach.written for reach in self.reaches)

    def reads(self, window: int) -> Moved:
        """What must come before a layer with this window is computed."""
        if not self.moves:
            return NOTHING
        if window not in self._reads:
            self._reads[window] = self._moved(reach.read(window) for reach in self.reaches)
        return self._reads[window]

    def without_moves(self) -> Part:
        """The same for an attention that leaves nothing behind."""
        return replace(self, moves=False, writes=NOTHING, _reads={})

    def placed(self, base: int, first: int) -> StepMeta:
        """Where the tokens stand. base: of the area; first: where the layer's resident blocks begin."""
        return replace(self.meta, block_tables=self.table + torch.where(self.is_resident, first, base))

    def _moved(self, blocks: Iterable[Sequence[int]]) -> Moved:
        wanted = {block for row in blocks for block in row if block >= self.resident}
        return Moved.of([(block - self.resident, self.places[block]) for block in wanted])


def parts_of(meta: StepMeta, reaches: Sequence[Reach], resident: int, area: int, device: Device) -> list[Part]:
    """The step's sequences in as few parts as fit.

    meta: of all; reaches: of each sequence; resident: blocks with ids below it are on the device; area: blocks of an
    area, no fewer than any sequence has.
    """
    parts, first = [], 0
    stored: set[int] = set()
    for index, reach in enumerate(reaches):
        own = {block for block in reach.attended if block >= resident}
        if len(stored | own) > area and index > first:
            parts.append(_part(meta, reaches, slice(first, index), resident, device))
            first, stored = index, set()
        stored |= own
    parts.append(_part(meta, reaches, slice(first, len(reaches)), resident, device))
    return parts


def _part(meta: StepMeta, reaches: Sequence[Reach], which: slice, resident: int, device: Device) -> Part:
    own = reaches[which]
    stored = sorted({block for reach in own for block in reach.attended if block >= resident})
    places = {block: place for place, block in enumerate(stored)}
    width = max(len(reach.attended) for reach in own)
    rows = [[places.get(block, block) for block in reach.attended] for reach in own]
    kinds = [[int(block < resident) for block in reach.attended] for reach in own]
    # Behind a sequence's end stands place 0 of the area, as in any table a block that is never looked at.
    numbers = device.upload([[row + [0] * (width - len(row)) for row in table] for table in (rows, kinds)])
    tokens = slice(meta.query_starts[which.start], meta.query_starts[which.stop])
    return Part(_of_sequences(meta, which, tokens), tokens, numbers[1] > 0, numbers[0], places, own, resident)


def _of_sequences(meta: StepMeta, which: slice, tokens: slice) -> StepMeta:
    """The same for some of the sequences."""
    starts = meta.query_starts[which.start : which.stop + 1]
    decodes = min(max(meta.num_decodes - which.start, 0), which.stop - which.start)
    lengths = [stop - start for start, stop in pairwise(starts)]
    return StepMeta(
        num_decodes=decodes,
        query_starts=[start - starts[0] for start in starts],
        context_lengths=meta.context_lengths[which],
        longest=max(lengths[decodes:], default=0),
        starts=meta.starts[which.start : which.stop + 1] - starts[0],
        positions=meta.positions[tokens],
        visible=meta.visible[tokens],
        prompt_lengths=meta.prompt_lengths[tokens],
        owners=None if meta.owners is None else meta.owners[tokens] - which.start,
        block_tables=meta.block_tables[which],
    )
