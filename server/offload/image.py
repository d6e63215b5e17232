"""A layer's weights as one run of bytes, so that they move as one: what a slot of device memory holds, or a file.

An image is laid out like the tensors that it is made of: each in its dtype and its strides, at offsets that processors
like. Which tensors these are is the formats' business (`LinearFormat.memory`); small ones of which a step reads little,
such as norms and biases, are none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from server.backends.protocol import Movable

ALIGNMENT = 256  # of each tensor: what a GPU reads at once, and four lines of a CPU's cache


@dataclass(frozen=True)
class Piece:
    """One tensor of an image."""

    tensor: Tensor  # the object that the format reads, whatever memory it has at the time
    offset: int  # bytes from the image's beginning
    shape: torch.Size
    strides: tuple[int, ...]

    def lay(self, tensor: Tensor, slot: Tensor) -> Tensor:
        """Give a tensor of the same dtype the memory that this piece has in a slot [N] uint8 which holds the image."""
        first = slot.storage_offset() + self.offset
        assert first % tensor.itemsize == 0, "slots and pieces are aligned"
        return tensor.set_(slot.untyped_storage(), first // tensor.itemsize, self.shape, self.strides)


class Image:
    """The weights of some formats that move together."""

    def __init__(self, formats: Sequence[Movable]):
        self._formats = formats
        self._pieces: list[Piece] = []
        end = 0
        for tensor in (tensor for format in formats for tensor in format.memory):
            assert torch.ops.aten.is_non_overlapping_and_dense(tensor), "a weight has no gaps"
            self._pieces.append(Piece(tensor, end, tensor.shape, tensor.stride()))
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self.nbytes = end

    def write(self, slot: Tensor) -> None:
        """Copy the weights to where they lie in a slot, and have them read from there."""
        for piece in self._pieces:
            piece.lay(piece.tensor.new_empty(0), slot).copy_(piece.tensor)
        self.bind(slot)

    def bind(self, slot: Tensor) -> None:
        """Have the weights read from a slot, which holds the image, or will when they are read."""
        for piece in self._pieces:
            piece.lay(piece.tensor, slot)
        for format in self._formats:
            format.moved()
