"""Layers whose weights are not on the device until they are computed with.

Which layers stay is decided while they are loaded, one after the other: a share of them that is spread evenly, so that
while those that stay compute, those that stream can come. What stands before and after the layers, embedding and head,
always stays. The anchor is FlexGen (Sheng et al. 2023, arXiv 2303.06865), which moves weights by layers too.

Left out: recording steps as graphs. A step waits for the link, not for Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from server.backends.device import Device
from server.backends.protocol import StepMeta
from server.model.layer import Layer, LayerStep, Stream
from server.offload.cost import SLOTS, Span, Times
from server.offload.disk_store import DiskError
from server.offload.ring import Image, Ring, StoredImage, keep
from server.offload.share import Share
from server.offload.stores import Store
from server.stepping.cache import Kept


class AnyLayer(Protocol):
    """A `Layer`, wherever its weights are."""

    @property
    def nbytes(self) -> int:
        """Memory of its matrices, on the device or off it."""

    def __call__(self, stream: Stream, kv: Kept, step: LayerStep) -> Stream:
        """See `Layer`."""

    def remember(self, encoded: Tensor, kv: Tensor, meta: StepMeta) -> None:
        """See `Layer`."""


class Placement(Protocol):
    """Decides where the weights of layers are kept."""

    def stack(self, count: int, load: Callable[[int], Layer]) -> Sequence[AnyLayer]:
        """The layers 0 … count - 1, each loaded and brought to its place before the next one is."""

    def finish(self) -> None:
        """All stacks are loaded, in the order in which they are computed."""

    def moved_bytes(self) -> int:
        """What has been read from a disk and written to it so far."""


class OnDevice:
    """A `Placement`: all weights stay on the device."""

    def stack(self, count: int, load: Callable[[int], Layer]) -> Sequence[AnyLayer]:
        return [load(index) for index in range(count)]

    def finish(self) -> None:
        """Nothing is left to do."""

    def moved_bytes(self) -> int:
        return 0


@dataclass(frozen=True)
class StreamedLayer:
    """A layer whose weights pass through a ring of slots."""

    layer: Layer
    number: int  # among the streamed ones
    streaming: Streaming

    @property
    def nbytes(self) -> int:
        """Memory of its matrices, wherever they are."""
        return self.layer.nbytes

    def __call__(self, stream: Stream, kv: Kept, step: LayerStep) -> Stream:
        """See `Layer`. Raises DiskError when its weights cannot be read."""
        with self.streaming.computing(self.number):
            return self.layer(stream, kv, step)

    def remember(self, encoded: Tensor, kv: Tensor, meta: StepMeta) -> None:
        """See `Layer`. Raises DiskError when its weights cannot be read."""
        with self.streaming.computing(self.number):
            self.layer.remember(encoded, kv, meta)


class ShareChooser(Protocol):
    """Finds how much of the layers' weights stays on the device."""

    def choose(self, layer_bytes: int, total_layers: int) -> Share:
        """From the bytes of the first layer, which is on the device. Raises ValueError where nothing can be found."""


@dataclass
class Streaming:
    """A `Placement`: a share of the weights stays on the device; stores take the rest, each as much as its share says.

    share: of the layers' weights, or what finds it once the first layer is there. total_layers: of all stacks. stores:
    with the share of what streams that each takes; the last takes what is left.
    """

    device: Device
    share: Share | ShareChooser
    total_layers: int
    stores: Sequence[tuple[Share, Store]]
    resident_bytes: int = 0
    stored: list[StoredImage] = field(default_factory=list)
    _share: Share | None = None
    _seen_bytes: int = 0
    _taken: list[int] = field(default_factory=list)  # bytes by store
    _stacks: list[range] = field(default_factory=list)  # of streamed layers
    _slot: Tensor | None = None
    _ring: Ring | None = None
    _computes_at_once: bool = False  # whether a layer's call returns when it is computed

    @property
    def ring(self) -> Ring:
        """What brings the layers. Known after `finish`."""
        assert self._ring is not None, "layers are computed when all are loaded"
        return self._ring

    @contextmanager
    def computing(self, number: int) -> Iterator[None]:
        """Have a streamed layer's weights on the device within the block, and note when it was computed.

        Raises DiskError when they cannot be read.
        """
        self.ring.bring(number)
        began = time.perf_counter()
        yield
        if self._computes_at_once:  # else it is only launched by now
            self.ring.times.computed.append(Span(number, began, time.perf_counter()))

    @property
    def times(self) -> Times | None:
        """What streaming has cost; None where nothing streams."""
        return None if self._ring is None else self._ring.times

    @property
    def streamed_bytes(self) -> int:
        """What every pass over all layers must read."""
        return sum(stored.image.nbytes for stored in self.stored)

    @property
    def slot_bytes(self) -> int:
        """Memory of the device that streaming takes."""
        return SLOTS * max((stored.image.nbytes for stored in self.stored), default=0)

    def stack(self, count: int, load: Callable[[int], Layer]) -> Sequence[AnyLayer]:
        """See `Placement`. Raises DiskError where a store has no room."""
        first = len(self.stored)
        layers = [self._place(load(index)) for index in range(count)]
        self._stacks.append(range(first, len(self.stored)))
        return layers

    def finish(self) -> None:
        if not self.stored:
            for _, store in self.stores:
                store.close()
            self.stores = ()
            return
        size = max(stored.image.nbytes for stored in self.stored)
        slots = [self._slot_of(size), *(self.device.slot(size) for _ in range(SLOTS - 1))]
        self._ring = Ring(self.device, self.stored, self._following(), slots)
        self._computes_at_once = self.device.event() is None

    def moved_bytes(self) -> int:
        return sum(store.moved_bytes for _, store in self.stores)

    def _place(self, layer: Layer) -> AnyLayer:
        image = Image(layer.matrices)
        share = self._share = self._share or self._choose(image.nbytes or layer.nbytes)
        if share.is_all:
            return layer
        if not image.nbytes:
            raise ValueError(
                "weights in oneDNN's order cannot stream: install a C++ compiler for kernels that can, give other "
                "--cpu-kernels than none, or start with --disable-custom-kernels"
            )
        expected = image.nbytes * self.total_layers
        self._seen_bytes += image.nbytes
        if share.admits(self.resident_bytes, image.nbytes, self._seen_bytes, expected):
            self.resident_bytes += image.nbytes
            return layer
        slot = self._slot_of(image.nbytes)
        image.write(slot)
        store = self._store_for(image.nbytes, expected)
        try:
            kept = keep(self.device, store, slot, image.nbytes)
        except DiskError as error:
            raise DiskError(f"{error}; about {self._last_bytes(expected) / 1e9:.2f} GB go there") from None
        self.stored.append(StoredImage(image, store, kept))
        return StreamedLayer(layer, len(self.stored) - 1, self)

    def _choose(self, layer_bytes: int) -> Share:
        return self.share if isinstance(self.share, Share) else self.share.choose(layer_bytes, self.total_layers)

    def _store_for(self, num_bytes: int, expected: int) -> Store:
        self._taken = self._taken or [0] * len(self.stores)
        for index, (share, store) in enumerate(self.stores):
            is_last = index == len(self.stores) - 1
            if is_last or share.admits(self._taken[index], num_bytes, self._seen_bytes, expected):
                self._taken[index] += num_bytes
                return store
        raise AssertionError("what streams has a store")

    def _last_bytes(self, expected: int) -> int:
        """What the last store will have taken, of so many bytes of all layers."""
        shares = [self._share, *(share for share, _ in self.stores[:-1])]
        return max(0, expected - sum(share.bytes_of(expected) for share in shares if share is not None))

    def _slot_of(self, num_bytes: int) -> Tensor:
        """A slot for so many bytes; what the last one held is kept elsewhere by now."""
        if self._slot is None or len(self._slot) < num_bytes:
            self._slot = self.device.slot(num_bytes)
        return self._slot

    def _following(self) -> list[int]:
        """After a stack's last layer comes the next stack's first, and after the decoder's its own: the next step."""
        stacks = [stack for stack in self._stacks if stack]
        behind = [*stacks[1:], stacks[-1]]
        return [number for stack, then in zip(stacks, behind, strict=True) for number in (*stack[1:], then[0])]
