"""States and rings in KV blocks: what a sequence has to go on from, where another begins with its tokens.

A state is that after one token, so that of a prefix in the cache only those places can be gone on from at which states
were kept. Kept states are blocks among the others, whose bytes mean something else: the router gives them out, finds
them and gives them away by the same rules, and they pass to the host and the disk and back as all blocks do. Which
tokens they are of, and when they are kept, the router knows.

A windowed layer's ring holds the latest tokens, so what is behind a prefix is copied while it is still there, a block
of tokens at a time: prefixes whose windows overlap have such blocks in common.

Shapes: B blocks, W numbers of a layer's state, n blocks of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from server.stepping.cache import STATE_DTYPE

COPIED_BYTES = 64 << 20  # from rings at once
WORD = torch.int64  # a block's 16 tokens are whole words in any format, and these are copied faster than bytes


class Checkpoints:
    """Copies the states of one rank to blocks and back. Nothing here waits for the device."""

    def __init__(self, states: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """states: of each recurrent layer [rows, W]; parts: [B, n] of the KV cache, whose rows are of the blocks."""
        self._states = states
        self._parts = [part.view(torch.uint8) for part in parts]
        self._widths = [state.shape[1] for state in states]
        self._sizes = [part.shape[1] for part in self._parts]

    @property
    def num_blocks(self) -> int:
        """Blocks that hold the states of one sequence; 0: blocks hold nothing."""
        block_bytes = sum(self._sizes)
        return -(-self._num_bytes // block_bytes) if block_bytes else 0

    @property
    def _num_bytes(self) -> int:
        return STATE_DTYPE.itemsize * sum(self._widths)

    def keep(self, row: int, blocks: Tensor) -> None:
        """Copy the states in `row` to these blocks [n], of which those behind `num_blocks` are left alone."""
        blocks = blocks[: self.num_blocks]
        content = torch.cat([state[row] for state in self._states]).view(torch.uint8)
        whole = content.new_zeros(len(blocks) * sum(self._sizes))
        whole[: self._num_bytes] = content
        pieces = whole.view(len(blocks), -1).split(self._sizes, dim=1)
        for part, piece in zip(self._parts, pieces, strict=True):
            part.index_copy_(0, blocks, piece)

    def load(self, row: int, blocks: Tensor) -> None:
        """Copy what these blocks [n] hold to the states in `row`."""
        blocks = blocks[: self.num_blocks]
        whole = torch.cat([part.index_select(0, blocks) for part in self._parts], dim=1).flatten()
        content = whole[: self._num_bytes].view(STATE_DTYPE).split(self._widths)
        for state, piece in zip(self._states, content, strict=True):
            state[row].copy_(piece)


class RingCopies:
    """Copies blocks of tokens from one rank's rings to KV blocks and back. Nothing here waits for the device."""

    def __init__(self, rings: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """rings: [blocks of all rings, n]; parts: [B, n] of the KV cache. Rows of either are of blocks."""
        self._rings = [ring.view(WORD) for ring in rings]
        self._parts = [part.view(WORD) for part in parts]
        self._widths = [ring.shape[1] for ring in self._rings]
        self._sizes = [part.shape[1] for part in self._parts]

    @property
    def num_blocks(self) -> int:
        """KV blocks that hold what all rings have of one block of tokens; 0: there are no rings."""
        return -(-sum(self._widths) // sum(self._sizes)) if self._rings else 0

    def keep(self, places: Tensor, blocks: Tensor) -> None:
        """Copy these blocks of rings [n] to KV blocks [n, num_blocks or more], as many of them as are needed."""
        for some, to in self._batches(places, blocks):
            content = torch.cat([ring.index_select(0, some) for ring in self._rings], dim=1)
            whole = content.new_zeros(len(some), self.num_blocks * sum(self._sizes))
            whole[:, : content.shape[1]] = content
            pieces = whole.view(to.numel(), -1).split(self._sizes, dim=1)
            for part, piece in zip(self._parts, pieces, strict=True):
                part.index_copy_(0, to.flatten(), piece)

    def load(self, places: Tensor, blocks: Tensor) -> None:
        """Copy to these blocks of rings [n] what `keep` left in KV blocks [n, num_blocks or more]."""
        for some, source in self._batches(places, blocks):
            whole = torch.cat([part.index_select(0, source.flatten()) for part in self._parts], dim=1)
            pieces = whole.view(len(some), -1)[:, : sum(self._widths)].split(self._widths, dim=1)
            for ring, piece in zip(self._rings, pieces, strict=True):
                ring.index_copy_(0, some, piece)

    def _batches(self, places: Tensor, blocks: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """A few of them at a time, each with the KV blocks that are needed."""
        if not self._rings:  # a pipeline stage without windowed layers
            return iter(())
        at_once = max(1, COPIED_BYTES // (WORD.itemsize * sum(self._widths)))
        return zip(places.split(at_once), blocks[:, : self.num_blocks].split(at_once), strict=True)
