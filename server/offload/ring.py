"""Slots of device memory through which a model's streamed layers pass, one after the other.

While a layer computes, the next one comes. A layer that was not expected, such as an encoder's first, costs a wait. The
caller is one thread, which computes; stores read behind its back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from server.offload.image import Image
from server.offload.times import Span, Times


class Store(Protocol):
    """Where images are kept that are not on the device."""

    @property
    def read_bytes(self) -> int:
        """What has been read from a disk so far."""

    @property
    def is_direct(self) -> bool:
        """Whether what it reads passes the page cache by."""

    def keep(self, slot: Tensor, num_bytes: int) -> int:
        """Take an image from a slot. Returns its number in this store. Raises DiskError where there is no room."""

    def fill(self, slot: Tensor, number: int, num_bytes: int) -> Callable[[], float | None]:
        """Begin to bring an image to a slot. Returns what waits for it, so that it can be computed with.

        Waiting returns when the last byte had come, by `time.perf_counter`, or None where the host does not know. It
        raises DiskError for an image that cannot be read.
        """

    def close(self) -> None:
        """Give back what it holds. Nothing is being brought."""


@dataclass(frozen=True)
class Stored:
    """An image that streams."""

    image: Image
    store: Store
    number: int


@dataclass
class _Slot:
    memory: Tensor
    holds: int | None = None  # which layer
    finish: Callable[[], float | None] | None = None  # waits for it; None: it is there
    began_s: float = 0.0  # when it was asked for


class Ring:
    """Brings stored layers to slots, in the order in which they are computed.

    following: the layer that is most likely computed after each. slots: [N] uint8 each, page-aligned, two at least.
    """

    def __init__(self, layers: Sequence[Stored], following: Sequence[int], slots: Sequence[Tensor]):
        assert len(slots) > 1, "one slot is computed with, and another one filled"
        self._layers = layers
        self._following = following
        self._slots = [_Slot(memory) for memory in slots]
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
        if slot.finish is not None:  # of a layer that nobody wanted
            self._finish(slot)
        stored = self._layers[layer]
        slot.holds, slot.began_s = None, time.perf_counter()
        slot.finish = stored.store.fill(slot.memory, stored.number, stored.image.nbytes)
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
