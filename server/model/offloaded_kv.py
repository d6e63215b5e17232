"""KV blocks of running sequences that are not on the device until a layer attends to them.

The router knows nothing of this: it hands out ids as ever. The first ids are on the device in every layer, the rest are
in stores, and visit the device for one layer's attention of their sequences (`server/offload/kv_blocks.py`). One tensor
holds both, all layers' resident blocks and behind them the areas for visitors, so that attention reads blocks of both
kinds at once, through block tables that say for each layer where in this tensor a block is. The anchor is FlexGen
(Sheng et al. 2023, arXiv 2303.06865), which streams the cache of a block of sequences layer by layer, too.

An area has room for the longest sequence at least. A step is divided into parts whose blocks fit into one area, and
which take turns within each layer; a part's tables are built once in a step and serve every layer, since only where the
layer's resident blocks begin and which area is visited differ. Blocks in front of a sliding window stay where they are.
What an encoder's own attention needs is scratch, and never leaves the areas.

Left out: recording steps as graphs, which would have to wait for blocks; and blocks that are brought before their step
is known.

Shapes: S sequences, W blocks of the longest of them, T tokens in the step, L layers, R resident blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from server.backends.device import Device
from server.backends.protocol import Attention, Backend, Rotation, StepMeta
from server.blocks import BLOCK_SIZE, num_blocks
from server.offload.kv_blocks import AREAS, NOTHING, KvBlocks, Moved, Staging, Visit
from server.offload.places import Place
from server.offload.share import Share
from server.offload.stores import Memory
from server.stepping import cache
from server.stepping.batch import Forward
from server.stepping.cache import KVShape

STAGE_BYTES = 64 << 20  # of an area, where one sequence does not need more: some milliseconds of a fast disk
MOST_BLOCKS = 1 << 26  # more are never asked for


class OffloadedKv:
    """See `KvPlacement`. share: of the blocks on the device; places: where the others go, the last all that is left.

    Windowed layers keep all blocks, of which those in front of the window stay in their places.

    windows: of each layer of the decoder, 0 for none; encoder_layers: 0 where there is no encoder; stage_bytes: of an
    area, where one sequence does not need more.
    """

    has_rings = False

    def __init__(
        self,
        share: Share,
        places: Sequence[Place],
        windows: Sequence[int],
        encoder_layers: int,
        stage_bytes: int = STAGE_BYTES,
    ):
        self.where = "free memory with " + " and ".join(place.name for place in places)
        self._stage_bytes = stage_bytes
        self._share, self._places = share, places
        self._windows, self._encoder_layers = windows, encoder_layers
        self._division = Division(0, (), 0)
        self._shape: KVShape | None = None
        self._device: Device | None = None
        self._store: KvBlocks | None = None
        self._staging: Staging | None = None
        self._calls: Iterator[Call] = iter(())

    @property
    def staging(self) -> Staging | None:
        """Where blocks visit; None: all are on the device."""
        return self._staging

    @property
    def device_bytes(self) -> int:
        return 0 if self._shape is None else _device_bytes(self._division, self._shape)

    @property
    def offloaded(self) -> str:
        division, shape = self._division, self._shape
        if shape is None or not sum(division.stored):
            return ""
        kept = [
            f"{count} in {place.name} ({count * shape.bytes_per_block / 1e9:.2f} GB)"
            for count, place in zip(division.stored, self._places, strict=True)
            if count
        ]
        areas = AREAS * division.area * shape.layer_block_bytes / 1e9
        return f"{division.resident} on the device, {', '.join(kept)}, through {areas:.2f} GB"

    @property
    def moved_bytes(self) -> int:
        """See `KvPlacement`. Another thread may ask."""
        store = self._store
        return 0 if store is None else store.moved_bytes

    def room(self, shape: KVShape, free_bytes: int, longest: int) -> int:
        rooms = [place.room() for place in self._places]

        def fits(blocks: int) -> bool:
            division = self._divide(shape, blocks, longest)
            slot_bytes = [place.slot_bytes(shape.layer_block_bytes) * shape.num_layers for place in self._places]
            stored = zip(division.stored, slot_bytes, rooms, strict=True)
            return _device_bytes(division, shape) <= free_bytes and all(n * size <= room for n, size, room in stored)

        low, high = 0, MOST_BLOCKS  # `low` fits
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low * shape.bytes_per_block

    @torch.inference_mode()  # as steps are computed
    def allocate(self, shape: KVShape, blocks: int, longest: int, backend: Backend) -> list[Tensor]:
        self.release()
        device = backend.device
        division = self._divide(shape, blocks, longest)
        if not sum(division.stored):
            self._division, self._shape = division, shape
            return cache.allocate(shape, blocks, device)
        first = shape.num_layers * division.resident
        size = shape.size_of(first + AREAS * division.area)
        pool = device.empty_kv(size, shape.format.stored(shape.dtype))
        parts = backend.block_parts(pool, shape.format, shape.head_dim)
        planes = Memory([part.view(torch.uint8) for part in parts])
        used = [(count, place) for count, place in zip(division.stored, self._places, strict=True) if count]
        self._store = KvBlocks.open(device, planes, shape.num_layers, used)
        self._staging = Staging(device, self._store, first, division.area)
        self._division, self._shape, self._device = division, shape, device
        return [pool] * shape.num_layers

    def release(self) -> None:
        store, self._store, self._staging, self._device = self._store, None, None, None
        self._division, self._shape = Division(0, (), 0), None
        if store is not None:
            store.close()

    def attention(self, attention: Attention) -> Attention:
        return OffloadedAttention(attention, self)

    @contextmanager
    def step(self, forward: Forward) -> Iterator[None]:
        staging = self._staging
        if staging is None:
            yield
            return
        calls = self._calls_of(forward)
        self._calls = iter(calls)
        staging.begin([self._visit(call.layer, part) for call in calls for part in call.parts])
        try:
            yield
        finally:
            staging.end()

    def visits(self, meta: StepMeta) -> Iterator[tuple[slice, StepMeta]]:
        """The next call of attention, part by part: the tokens of each, and where they stand while it is computed."""
        staging = self._staging
        if staging is None:
            yield slice(None), meta
            return
        layer, parts = next(self._calls)
        for part in parts:
            base = staging.enter()
            yield part.tokens, part.placed(base, layer * self._division.resident)
            staging.leave()

    def _calls_of(self, forward: Forward) -> list[Call]:
        """All calls of attention in a step, in their order: an encoder's, what is kept of it, and the decoder's."""
        area, device = self._division.area, self._device
        assert device is not None
        runs, layers = forward.runs, range(len(self._windows))
        resident = self._division.resident

        def parts(meta: StepMeta, reaches: Sequence[Reach]) -> list[Part]:
            return parts_of(meta, reaches, resident, area, device)

        calls = []
        if forward.encoding is not None:
            read = forward.encoding.sequences
            encoded = parts(forward.encoding.meta, [Reach(s.encoder_blocks, 0, len(s.encoder_tokens)) for s in read])
            scratch = [part.without_moves() for part in encoded]
            calls += [Call(0, scratch) for _ in range(self._encoder_layers)]
            calls += [Call(layer, encoded) for layer in layers]
        own = parts(forward.meta, [Reach(run.sequence.blocks, run.start, run.length) for run in runs])
        if forward.cross is None:
            return calls + [Call(layer, own) for layer in layers]
        reaches = [Reach(run.sequence.encoder_blocks, len(run.sequence.encoder_tokens), 0) for run in runs]
        cross = parts(forward.cross, reaches)
        return calls + [Call(layer, which) for layer in layers for which in (own, cross)]

    def _visit(self, layer: int, part: Part) -> Visit:
        return Visit(layer, part.reads(self._windows[layer]), part.writes)

    def _divide(self, shape: KVShape, blocks: int, longest: int) -> Division:
        left = blocks - self._share.of(blocks, shape.bytes_per_block)
        resident, stored = blocks - left, []
        for place in self._places[:-1]:
            taken = min(left, place.share.of(blocks, shape.bytes_per_block))
            stored.append(taken)
            left -= taken
        stored.append(left)
        area = max(longest, self._stage_bytes // shape.layer_block_bytes)
        return Division(resident, tuple(stored), min(area, sum(stored)))


@dataclass(frozen=True)
class OffloadedAttention:
    """See `Attention`: that of `inner`, over the parts of a step for whose blocks there is room."""

    inner: Attention
    kv: OffloadedKv = field(repr=False)

    def write(self, kv: Tensor, k: Tensor, v: Tensor, meta: StepMeta) -> None:
        """See `Attention`. Raises DiskError for blocks that cannot be moved, as the others do."""
        for tokens, placed in self.kv.visits(meta):
            self.inner.write(kv, k[tokens], v[tokens], placed)

    def attend(self, q: Tensor, kv: Tensor, meta: StepMeta, window: int) -> Tensor:
        visits = self.kv.visits(meta)
        return _joined([self.inner.attend(q[tokens], kv, placed, window) for tokens, placed in visits])

    def attend_rotated(self, q: Tensor, kv: Tensor, rotation: Rotation | None, meta: StepMeta, window: int) -> Tensor:
        return _joined(
            [
                self.inner.attend_rotated(q[tokens], kv, _rotation_of(rotation, tokens), placed, window)
                for tokens, placed in self.kv.visits(meta)
            ]
        )

    def self_attend(self, heads: Tensor, kv: Tensor, rotation: Rotation | None, meta: StepMeta, window: int) -> Tensor:
        return _joined(
            [
                self.inner.self_attend(heads[tokens], kv, _rotation_of(rotation, tokens), placed, window)
                for tokens, placed in self.kv.visits(meta)
            ]
        )


class Call(NamedTuple):
    """One call of a layer's attention: its parts' visits follow each other."""

    layer: int
    parts: Sequence[Part]


@dataclass(frozen=True)
class Division:
    """How blocks are divided among the device and the stores."""

    resident: int
    stored: tuple[int, ...]  # by store
    area: int  # blocks of each area


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


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def _rotation_of(rotation: Rotation | None, tokens: slice) -> Rotation | None:
    return rotation and Rotation(rotation.cos[tokens], rotation.sin[tokens], rotation.interleaved)


def _device_bytes(division: Division, shape: KVShape) -> int:
    return division.resident * shape.bytes_per_block + AREAS * division.area * shape.layer_block_bytes
