"""Layers' weights as runs of bytes, and slots of device memory through which they pass, one after the other.

A layer's image is laid out like the tensors that it is made of: each in its dtype and its strides, at offsets that
processors like. Which tensors these are is the formats' business (`LinearFormat.memory`); small ones of which a step
reads little, such as norms and biases, are none of them.

While a layer computes, the next one comes. A layer that was not expected, such as an encoder's first, costs a wait. The
caller is one thread, which computes; stores read behind its back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from host.direct_io import PAGE, page_aligned
from server.backends.device import Device
from server.backends.protocol import Movable
from server.offload.cost import Span, Times
from server.offload.disk_store import DiskError
from server.offload.stores import Memory, Run, Store, Wait

PAGES = (PAGE,)  # what stores keep of weights: blocks of one plane, of a page each
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


def pages(slot: Tensor) -> Memory:
    """A slot [N] uint8 as the blocks that stores keep of weights."""
    return Memory([slot.view(-1, PAGE)])


def keep(device: Device, store: Store, slot: Tensor, num_bytes: int) -> Run:
    """Have a store take an image, the first bytes of a slot. Returns where it is. Raises DiskError without room."""
    count = page_aligned(num_bytes) // PAGE
    run = Run(store.add(count), 0, count)
    try:
        store.save(pages(slot), [run], device.event())()
    except DiskError as error:
        raise DiskError(
            f"{error} behind the first {run.block * PAGE / 1e9:.2f} GB: free space there, or leave more on the device "
            "with --weights-on-device"
        ) from None
    return run


@dataclass(frozen=True)
class StoredImage:
    """An image that streams."""

    image: Image
    store: Store
    run: Run  # where the store has it, and at the beginning of a slot


@dataclass
class _Slot:
    memory: Tensor
    blocks: Memory
    holds: int | None = None  # which layer
    finish: Wait | None = None  # waits for it; None: it is there
    began_s: float = 0.0  # when it was asked for


class Ring:
    """Brings stored layers to slots, in the order in which they are computed.

    following: the layer that is most likely computed after each. slots: [N] uint8 each, page-aligned, two at least.
    """

    def __init__(
        self, device: Device, layers: Sequence[StoredImage], following: Sequence[int], slots: Sequence[Tensor]
    ):
        assert len(slots) > 1, "one slot is computed with, and another one filled"
        self._device = device
        self._layers = layers
        self._following = following
        self._slots = [_Slot(memory, pages(memory)) for memory in slots]
        # What has a slot each comes once and stays.
        self.times = Times(pass_bytes=sum(layer.image.nbytes for layer in layers) * (len(layers) > len(slots)))

    def bring(self, layer: int) -> None:
        """Have a layer's weights on the device until another layer is asked for.

        Raises DiskError when they cannot be read.
        """
        slot = self._slot_of(layer)
        if slot is None:
            slot = self._slots[0]
            self._begin(slot, layer)
        self._look_ahead(layer, slot)
        self._finish(slot)
        self._layers[layer].image.bind(slot.memory)

    def _look_ahead(self, layer: int, held: _Slot) -> None:
        """Have the layers that come next read, into what slots there are beside the one in use."""
        wanted = [layer]
        while len(wanted) < min(len(self._slots), len(self._layers)):
            wanted.append(self._following[wanted[-1]])
        for next_layer in wanted[1:]:
            if self._slot_of(next_layer) is None:
                slot = next(s for s in self._slots if s is not held and s.holds not in wanted)
                self._begin(slot, next_layer)

    def _begin(self, slot: _Slot, layer: int) -> None:
        if slot.finish is not None:  # of a layer that was not wanted
            self._finish(slot)
        stored = self._layers[layer]
        slot.holds, slot.began_s = None, time.perf_counter()
        slot.finish = stored.store.load(slot.blocks, [stored.run], self._device.event())
        slot.holds = layer
        self.times.bytes += stored.image.nbytes

    def _finish(self, slot: _Slot) -> None:
        if slot.finish is None:
            return
        finish, slot.finish = slot.finish, None
        holds, slot.holds = slot.holds, None  # nothing, if it cannot be read
        began = time.perf_counter()
        try:
            ended = finish()
            slot.holds = holds
            if ended is not None and holds is not None:
                self.times.reads.append(Span(holds, slot.began_s, ended))
        finally:
            self.times.waited_s += time.perf_counter() - began

    def _slot_of(self, layer: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.holds == layer), None)
