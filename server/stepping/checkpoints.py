"""States of recurrent layers in KV blocks: what a sequence has to go on from, where another begins with its tokens.

A state is that after one token, so that of a prefix in the cache only those places can be gone on from at which states
were kept. Kept states are blocks among the others, whose bytes mean something else: the router gives them out, finds
them and gives them away by the same rules, and they pass to the host and the disk and back as all blocks do. Which
tokens they are of, and when they are kept, the router knows.

Shapes: B blocks, W numbers of a layer's state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from server.stepping.cache import STATE_DTYPE


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
