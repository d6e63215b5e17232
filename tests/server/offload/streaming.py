"""Placements for tests: a share of the weights or of the KV blocks on the device, the rest in a file."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from host.direct_io import PAGE
from server.arch import families
from server.arch.spec import ArchSpec
from server.backends.cpu.device import CpuDevice
from server.backends.device import map_pages
from server.model.offloaded_kv import STAGE_BYTES, OffloadedKv
from server.model.streamed import Streaming
from server.offload.disk_store import DiskStore
from server.offload.places import OnDisk, Place
from server.offload.share import Share


def spec_of(model: Path) -> ArchSpec:
    """What config.json of a folder describes."""
    return families.find(json.loads((model / "config.json").read_text()))[1]


def weight_file(folder: Path) -> DiskStore:
    """A file for weights."""
    return DiskStore(folder, "--offload-dir", "weights", PAGE)


@contextmanager
def streaming(model: Path, on_device: str, folder: Path) -> Iterator[Streaming]:
    """Where the layers of the model in a folder are kept, while it is served."""
    spec = spec_of(model)
    total = spec.num_layers + (spec.encoder.num_layers if spec.encoder else 0)
    file = weight_file(folder)
    try:
        yield Streaming(CpuDevice(), Share.parse(on_device), total, [(Share(num_bytes=0), file)])
    finally:
        file.close()


@contextmanager
def offloaded(
    model: Path, on_device: str, folder: Path, *, stage_bytes: int = STAGE_BYTES, places: list[Place] | None = None
) -> Iterator[OffloadedKv]:
    """Where the KV blocks of the model in a folder are kept, while it is served. places: by default a file."""
    spec = spec_of(model)
    encoder_layers = spec.encoder.num_layers if spec.encoder else 0
    windows = [layer.window for layer in spec.layers]
    places = places or [OnDisk(folder, "--offload-dir", 1, None)]
    placement = OffloadedKv(Share.parse(on_device), places, windows, encoder_layers, stage_bytes)
    try:
        yield placement
    finally:
        placement.release()


class LateEvent:
    """A moment that has come when somebody waits for it, and not before."""

    def __init__(self, action: Callable[[], object] = lambda: None):
        self._action: Callable[[], object] | None = action

    def query(self) -> bool:
        return self._action is None

    def synchronize(self) -> None:
        action, self._action = self._action, None
        if action is not None:
            action()

    def elapsed_time(self, end: Any) -> float:
        return 1.0


class LateLink:
    """Copies when it is waited for, in the order in which copies were begun. See `device.Link`.

    Who forgets to wait computes with other weights, or with other keys and values.
    """

    def __init__(self) -> None:
        self._begun: deque[Callable[[], object]] = deque()
        self._number = self._done = 0
        self._copying = threading.Lock()
        self.pins: list[Tensor] = []  # what is pinned now

    def pinned(self, num_bytes: int) -> Tensor:
        self.pins.append(map_pages(num_bytes))
        return self.pins[-1]

    def unpin(self, memory: Tensor) -> None:
        self.pins = [pin for pin in self.pins if pin is not memory]

    def copy(self, source: Tensor, target: Tensor, after: LateEvent) -> LateEvent:
        def copy() -> None:
            after.synchronize()
            target.copy_(source)

        with self._copying:
            self._begun.append(copy)
            self._number += 1
            number = self._number
        return LateEvent(lambda: self._copy_up_to(number))

    def _copy_up_to(self, number: int) -> None:
        with self._copying:
            while self._done < number:
                self._begun.popleft()()
                self._done += 1

    def order(self, event: LateEvent) -> None:
        event.synchronize()


class LinkedDevice(CpuDevice):
    """A CPU that has to fetch weights from a host, as a GPU has."""

    def event(self) -> Any:
        return LateEvent()

    def link(self) -> Any:
        return LateLink()
