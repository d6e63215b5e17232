"""Paged KV cache (Kwon et al. 2023, arXiv 2309.06180): its tensors, the sums that size them, and where blocks are.

A recurrent layer keeps no tokens but one state of a fixed size for each sequence, in the row that the sequence has in
the device's tables. Steps find states by those rows, as they find blocks. So it is with a windowed layer's ring of
blocks (`server/arch/windows.py`), where there is one.

The router hands out blocks and knows nothing of tensors; the tensors know nothing of sequences. All blocks are on the
device unless a model was loaded otherwise (`server/model/offloaded_kv.py`).

Behind the device is the host's tier of the prefix cache (`HostSlots`): blocks are saved to slots and restored from
them. Steps alone move them, so that a copy has its place among the computations that write and read the same blocks:
saves come first, of what the steps before have computed, then restores, then the step's computation. Left out: the disk
(`server/prefix/`), and which slot holds what (the router knows).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from server.arch.footprint import kept_state_bytes, num_spares
from server.arch.windows import Ring
from server.backends.device import Device, HostCopies
from server.backends.protocol import Attention, Backend
from server.blocks import BLOCK_SIZE, num_blocks
from server.quantisation.kv import AS_COMPUTED, KvFormat
from server.stepping.batch import Forward
from server.stepping.sequences import StepError

STATE_DTYPE = torch.float32  # sums of thousands of tokens


@dataclass(frozen=True)
class KVShape:
    """What one token takes on this rank, and what a sequence takes beside its tokens."""

    num_layers: int  # that keep keys and values
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # that the model computes in
    is_paged: bool = True  # False: the model keeps a cache of its own, of about this size
    format: KvFormat = AS_COMPUTED
    sizes: tuple[tuple[int, int], ...] = ()  # kv heads and head size of each layer, where they differ
    rows: int = 2  # of a token for each kv head: key and value, or one that is both
    states: tuple[int, ...] = ()  # numbers of a sequence's state in every layer; empty: all attend, and none has one
    sources: tuple[int, ...] = ()  # whose keys and values, or state, every layer uses; empty: each has its own
    attending: tuple[bool, ...] = ()  # which layers have blocks; empty: all
    window: int = 0  # the largest of the whole model, where its layers may have rings; 0: they may not
    windows: tuple[int, ...] = ()  # of each layer that keeps keys and values, 0 where it sees all; empty: all see all
    ring: Ring | None = None  # of each windowed layer and sequence; None: such layers have blocks as the others do
    beside: KVShape | None = None  # what a speculative model keeps of each token, in blocks; None: nothing

    @property
    def layers(self) -> Sequence[KVShape]:
        """The same of each layer alone."""
        sizes = self.sizes or ((self.num_kv_heads, self.head_dim),) * self.num_layers
        alone: dict[str, Any] = dict.fromkeys(("sizes", "states", "sources", "attending", "windows"), ())
        one = replace(self, num_layers=1, ring=None, beside=None, **alone)
        return [replace(one, num_kv_heads=kv_heads, head_dim=head_dim) for kv_heads, head_dim in sizes]

    @property
    def holds_states_alone(self) -> bool:
        """Whether no layer attends: blocks hold states then, or nothing where layers have none."""
        return self.is_paged and not self.num_layers and self.beside is None

    @property
    def paged(self) -> Sequence[KVShape]:
        """Those of the layers without rings. Where all have one, blocks hold copies from rings alone, of one's size.

        Behind them those of a speculative model.
        """
        beside = [] if self.beside is None else self.beside.layers
        if self.ring is None:
            return [*self.layers, *beside]
        layers = [layer for layer, window in zip(self.layers, self.windows, strict=True) if not window]
        return [*(layers or self.layers[:1]), *beside]

    @property
    def ringed(self) -> Sequence[KVShape]:
        """Those of the layers with rings."""
        windows = self.windows if self.ring is not None else ()
        return [layer for layer, window in zip(self.layers, windows, strict=False) if window]

    @property
    def bytes_per_token(self) -> int:
        """Key and value, all layers without rings. Where no layer attends, a token's share of what a block has for
        kept states, and never nothing."""
        if self.holds_states_alone:
            return max(STATE_DTYPE.itemsize, kept_state_bytes(STATE_DTYPE.itemsize * sum(self.states)))
        if self.sizes or self.ring is not None or self.beside is not None:
            return sum(layer.bytes_per_token for layer in self.paged)
        row_bytes = self.format.width(self.head_dim) * self.format.stored(self.dtype).itemsize
        return self.rows * self.num_layers * self.num_kv_heads * row_bytes

    @property
    def bytes_per_sequence(self) -> int:
        """The states of recurrent layers, the rings of windowed ones."""
        blocks = 0 if self.ring is None else self.ring.num_blocks
        return STATE_DTYPE.itemsize * sum(self.states) + blocks * sum(layer.bytes_per_block for layer in self.ringed)

    def bytes_of_sequences(self, count: int) -> int:
        """The same of so many sequences at once; one state more is nobody's, and some are kept beside."""
        return (count + any(self.states) * (1 + num_spares(count))) * self.bytes_per_sequence

    @property
    def bytes_per_block(self) -> int:
        """Keys and values of a block's tokens, all layers."""
        return BLOCK_SIZE * self.bytes_per_token

    @property
    def layer_block_bytes(self) -> int:
        """Keys and values of a block's tokens, one layer of several that are alike."""
        return self.bytes_per_block // self.num_layers

    def size_of(self, blocks: int) -> tuple[int, ...]:
        """The tensor of so many blocks of a layer: [rows, blocks, kv_heads, block_size, width], the format's width."""
        return (self.rows, blocks, self.num_kv_heads, BLOCK_SIZE, self.format.width(self.head_dim))


def choose_tokens(
    *,
    wanted: int,
    useful: int,
    free_bytes: int,
    bytes_per_token: int,
    where: str = "free memory",
    kept_back: Mapping[str, int] | None = None,
) -> int:
    """How many KV tokens to allocate.

    wanted: what the user asked for, 0 when nothing; useful: more than this can never be used; free_bytes: memory that
    the cache may take; where: what has it; kept_back: bytes that settings keep for something else, by their names.
    Raises ValueError with the number that fits when the wish does not.
    """
    # A pipeline stage of mlps alone has blocks of nothing.
    fits = max(0, free_bytes // (max(1, bytes_per_token) * BLOCK_SIZE)) * BLOCK_SIZE
    if wanted and num_blocks(wanted) * BLOCK_SIZE > fits:
        raise ValueError(
            f"--max-batch-total-tokens is {wanted}, but {where} holds a KV cache of {fits} tokens "
            f"({bytes_per_token} bytes each): use --max-batch-total-tokens {fits} or less"
        )
    if not fits:
        kept = {name: size for name, size in (kept_back or {}).items() if size}
        told = "".join(f", {size / 1e9:.2f} GB kept back for {name}" for name, size in kept.items())
        lower = f"lower {' or '.join(kept)}, " if kept else ""
        raise ValueError(
            f"no memory is left for a KV cache ({max(0, free_bytes)} bytes free, {bytes_per_token} needed per token"
            f"{told}): {lower}use more shards, a smaller --dtype, --quantize int8 or --kv-cache-dtype int8"
        )
    return wanted or min(useful, fits)


def allocate(shape: KVShape, blocks: int, device: Device) -> list[Tensor]:
    """One zeroed tensor [rows, blocks, kv_heads, block_size, width] per layer; none for a cache that is not paged.

    Where no layer attends, one [blocks, bytes] for kept states.

    A block's tokens lie together for each head, so that attention reads a head's keys in long runs. The width is the
    format's.

    Zeroed because a padded read may touch slots that were never written: 0 * 0 is harmless, 0 * NaN is not.
    """
    if not shape.is_paged:
        return []
    if shape.holds_states_alone:
        return [device.empty_kv((blocks, shape.bytes_per_block), torch.uint8)]
    stored = shape.format.stored(shape.dtype)
    return [device.empty_kv(layer.size_of(blocks), stored) for layer in shape.paged]


def allocate_rings(shape: KVShape, sequences: int, device: Device) -> list[Tensor]:
    """One tensor as those of `allocate` for each layer with rings: row r of the tables has the r-th, from 1 on."""
    blocks = 0 if shape.ring is None else sequences * shape.ring.num_blocks
    return [device.empty_kv(layer.size_of(blocks), layer.format.stored(layer.dtype)) for layer in shape.ringed]


class KvAndState(NamedTuple):
    """Of a layer that attends and has states: its KV blocks, and the states."""

    kv: Tensor
    state: Tensor


Kept = Tensor | KvAndState  # what a layer keeps of all sequences


def beside_states(
    shape: KVShape, kv: Sequence[Tensor], rings: Sequence[Tensor], rows: int, device: Device
) -> list[Kept]:
    """What each layer of a stage keeps of all sequences, in order: `kv` or `rings` where it attends, states where it
    recurs, and both where it does both.

    A layer's states are [rows, numbers] float32, of which row 0 is no sequence's; a layer that keeps nothing has 0 of
    them.
    """
    if not shape.attending:
        return list(kv)
    paged, ringed, windows = iter(kv), iter(rings), iter(shape.windows)
    kept: list[Kept] = []
    for layer, (numbers, attends) in enumerate(zip(shape.states, shape.attending, strict=True)):
        if shape.sources and shape.sources[layer] != layer:
            kept.append(kept[shape.sources[layer]])
            continue
        state = torch.zeros(rows, numbers, dtype=STATE_DTYPE, device=device.torch_device)
        if not attends:
            kept.append(state)
            continue
        blocks = next(ringed if next(windows, 0) and shape.ring is not None else paged)
        kept.append(KvAndState(blocks, state) if numbers else blocks)
    return kept


class KvPlacement(Protocol):
    """Keeps the KV blocks of one model on one rank."""

    where: str  # what holds the blocks, for sentences
    has_rings: bool  # whether windowed layers may have rings beside them

    @property
    def device_bytes(self) -> int:
        """Memory of the device that the blocks take which were allocated, and what it takes to move the others."""

    @property
    def offloaded(self) -> str:
        """Which blocks are not on the device, for people; empty: all are there."""

    @property
    def moved_bytes(self) -> int:
        """What has been read from a disk and written to it since the blocks were allocated."""

    def room(self, shape: KVShape, free_bytes: int, longest: int) -> int:
        """Bytes of blocks that may be allocated. free_bytes: of the device; longest: blocks of the longest sequence."""

    def allocate(self, shape: KVShape, blocks: int, longest: int, backend: Backend) -> list[Tensor]:
        """What each layer writes to and reads from, [rows, …, K, P, W]; what was there before is gone by then.

        Raises ValueError where they have no room after all.
        """

    def release(self) -> None:
        """Give back the blocks."""

    def attention(self, attention: Attention) -> Attention:
        """Attention that finds the blocks wherever they are."""

    def step(self, forward: Forward) -> AbstractContextManager[None]:
        """For the time of one pass of the model. Entering or leaving it raises DiskError for blocks that are lost."""


class KvOnDevice:
    """See `KvPlacement`."""

    where = "free memory"
    has_rings = True
    offloaded = ""
    moved_bytes = 0

    def __init__(self) -> None:
        self.device_bytes = 0

    def room(self, shape: KVShape, free_bytes: int, longest: int) -> int:
        return free_bytes

    def allocate(self, shape: KVShape, blocks: int, longest: int, backend: Backend) -> list[Tensor]:
        self.device_bytes = blocks * shape.bytes_per_block
        return allocate(shape, blocks, backend.device)

    def release(self) -> None:
        self.device_bytes = 0

    def attention(self, attention: Attention) -> Attention:
        return attention

    def step(self, forward: Forward) -> AbstractContextManager[None]:
        return nullcontext()


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
