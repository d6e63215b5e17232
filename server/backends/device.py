"""What a device is to its host: memory, events, and what they exchange. Each backend has one (`protocol.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from server.backends.host_copies import HostCopies
from server.ranks.host_sums import HostQueue


class Event(Protocol):
    """A moment in a device's work."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def synchronize(self) -> None:
        """Wait until the device has reached it."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to another event, both of which the device has reached."""


class Link(Protocol):
    """Copies between the host and a device, beside what that computes."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Memory of the host [N] uint8 that the device reads by itself."""

    def unpin(self, memory: Tensor) -> None:
        """Give back what `pinned` gave, once all copies from and to it have ended."""

    def copy(self, source: Tensor, target: Tensor, after: Any) -> Event:
        """Begin to copy between pinned memory and the device, either way, once that has reached the event `after`.

        Copies follow each other in the order in which they were begun. Returns the copy's end.
        """

    def order(self, event: Any) -> None:
        """Let what is computed from now on wait for an event."""


class Device(Protocol):
    """What a host and a device exchange, and how much memory there is."""

    torch_device: torch.device
    name: str  # as people know it
    kind: str  # for sentences: "this GPU"
    measures_memory: bool  # whether its memory is ours alone, so that what a step takes can be measured

    def activate(self) -> None:
        """Make it the device of the calling thread: every thread that computes calls this first."""

    def good_dtypes(self) -> set[torch.dtype]:
        """The dtypes that the device computes well."""

    def upload(self, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        """The values as a tensor of their shape on the device, without waiting for what the device is computing."""

    def download(self, tensor: Tensor) -> Tensor:
        """A copy on the host, complete once an `event` that is made afterwards has been reached."""

    def event(self) -> Event | None:
        """The end of all work so far; None where a call returns only when its work is done."""

    def empty_kv(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros for a KV cache."""

    def host_copies(self, parts: Sequence[Tensor], slots: int) -> HostCopies:
        """Room on the host for copies of so many blocks. parts: [B, n] each, which together hold a KV cache."""

    def slot(self, num_bytes: int) -> Tensor:
        """Memory of the device [N] uint8, of whole pages and aligned to them, for weights that come and go."""

    def link(self) -> Link | None:
        """What brings weights from the host; None where the host's memory is the device's."""

    def host_queue(self) -> HostQueue | None:
        """Functions of the host in the order of the device's work; None where a call returns when its work is done."""

    def free_bytes(self, *, fraction: float, world_size: int) -> int:
        """Memory that this rank may still take. fraction: share of a GPU's memory that we may use."""

    def left_bytes(self, *, fraction: float, world_size: int, kv_bytes: int) -> int:
        """Memory that this rank has left when its KV cache of `kv_bytes` is full."""

    def peak_bytes(self, step: Callable[[], object]) -> int:
        """Run `step`: what it needs beside what is allocated now; 0 where memory is not measured."""

    def clocks(self, action: Callable[[], object]) -> str:
        """Run `action`: the device's clocks and power meanwhile, for people; empty where nobody tells."""

    def taken_bytes(self, action: Callable[[], object]) -> int:
        """Run `action`: by how much it lessens the free memory; 0 where memory is not measured."""

    def profiled(self) -> tuple[list[Any], str]:
        """What torch's profiler records (its activities), and which attribute of an operator's record is its time."""
